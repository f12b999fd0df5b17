// Formatting of numbers.

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
}

export function percent(share) {
  const value = share * 100;
  return `${value.toFixed(value > 0 && value < 10 ? 1 : 0)} %`;
}

export function bytes(count) {
  if (!count) return "–";
  let value = count;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") return `${value >= 100 || unit === "B" ? Math.round(value) : value.toPrecision(3)} ${unit}`;
    value /= 1024;
  }
  return "";
}

export function perSecond(count) {
  if (!count) return "–";
  let value = count;
  for (const unit of ["B/s", "kB/s", "MB/s", "GB/s"]) {
    if (value < 1000 || unit === "GB/s") return `${value >= 100 ? Math.round(value) : value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
  return "";
}

export function count(value) {
  return value >= 100 || Number.isInteger(value)
    ? Math.round(value).toLocaleString("en")
    : value.toLocaleString("en", { maximumFractionDigits: 1 });
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return Number(value.toPrecision(4)).toString();
}

export function span(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const rest = minutes % 60;
  const hours = Math.floor(minutes / 60);
  return rest ? `${hours} h ${rest} min` : `${hours} h`;
}

export function age(seconds) {
  return seconds < 10 ? `${seconds.toFixed(1)} s` : span(seconds);
}

export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
