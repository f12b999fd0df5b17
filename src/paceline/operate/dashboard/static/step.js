// Breakdown of steps: a stacked bar for each recent step, and the recent medians as numbers.

import { byId, color, element, empty, fill, hovering, prepared, setText, swatch } from "./dom.js";
import { count, ms, percent } from "./format.js";
import { PARTS, PART_NAMES } from "./state.js";

const HEIGHT = 180;
const AXIS = 58;
const FEWEST_BARS = 40;
const MOST_BARS = 120;
let stepCanvas = null;
let stepBars = { steps: [], width: 1 };

export function drawStep(picture) {
  const place = byId("step");
  const steps = picture.steps.items.slice(-MOST_BARS);
  if (!steps.length || !picture.figures) {
    stepCanvas = null;
    fill(place, empty("No step has completed yet. Steps are those of ", element("code", {}, "DistributedDataParallel"), ", ZeRO and elastic training, or spans of ", element("code", {}, 'paceline.span("step")'), "."));
    return;
  }
  if (!stepCanvas) {
    stepCanvas = element("canvas");
    hovering(stepCanvas, describeBar);
    fill(place, element("div", {}, stepCanvas), element("table", { class: "legend" }, element("tbody", { id: "step-legend" })));
  }
  paintBars(steps);
  const total = picture.figures.parts.reduce((sum, part) => sum + part, 0) || 1;
  fill(byId("step-legend"), ...PARTS.map((part, at) => [part, picture.figures.parts[at]]).filter(([part, time]) => time > 0 || part === "exposed").map(([part, time]) =>
    element("tr", {}, element("td", { class: "left" }, swatch(part), PART_NAMES[part]), element("td", {}, ms(time)), element("td", {}, percent(time / total)))));
  setText(byId("step-hint"), `steps ${count(steps[0].step)} to ${count(steps[steps.length - 1].step)}, mean of the ranks`);
}

function paintBars(steps) {
  const [context, width] = prepared(stepCanvas, HEIGHT);
  const top = niceTop(steps.map((step) => step.parts.reduce((sum, part) => sum + part, 0)));
  const each = (width - AXIS) / Math.max(FEWEST_BARS, steps.length);
  const low = HEIGHT - 6;
  context.fillStyle = color("quiet");
  context.strokeStyle = color("line");
  context.textAlign = "right";
  for (let at = 0; at <= 4; at += 1) {
    const y = low - (at / 4) * (low - 10);
    context.fillText(at ? `${Number(((top * at) / 4).toPrecision(3))}${at === 4 ? " ms" : ""}` : "0", AXIS - 8, y);
    context.beginPath();
    context.moveTo(AXIS, Math.round(y) + 0.5);
    context.lineTo(width, Math.round(y) + 0.5);
    context.stroke();
  }
  const gap = each > 4 ? 1 : 0;
  PARTS.forEach((part, place) => {
    context.fillStyle = color(part);
    steps.forEach((step, at) => {
      const below = step.parts.slice(0, place).reduce((sum, time) => sum + time, 0);
      const y = low - (Math.min(top, below + step.parts[place]) / top) * (low - 10);
      const bottom = low - (Math.min(top, below) / top) * (low - 10);
      context.fillRect(AXIS + at * each, y, each - gap, bottom - y);
    });
  });
  stepBars = { steps, width: each };
}

// A single very long step, such as the first, must not flatten all other bars.
function niceTop(totals) {
  const sorted = [...totals].sort((a, b) => a - b);
  const usual = sorted[Math.floor(sorted.length * 0.95)] || sorted[sorted.length - 1] || 1;
  const raw = Math.min(sorted[sorted.length - 1] || 1, usual * 1.6) * 1.05;
  const unit = 10 ** Math.floor(Math.log10(raw));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].map((factor) => factor * unit).find((each) => each >= raw) || raw;
}

function describeBar(x) {
  const step = stepBars.steps[Math.floor((x - AXIS) / stepBars.width)];
  if (!step || x < AXIS) return "";
  const lines = PARTS.map((part, at) => [PART_NAMES[part], step.parts[at]]).filter(([, time]) => time > 0.005);
  return [`step ${count(step.step)}: ${ms(step.duration)}`, ...lines.map(([name, time]) => `${name}: ${ms(time)}`)].join("\n");
}
