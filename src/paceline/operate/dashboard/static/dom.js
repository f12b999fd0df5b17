// Helpers for elements and canvases. Text from the job only goes into text nodes and is never parsed as HTML.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children);
  return parent;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function swatch(part) {
  const made = element("span", { class: "swatch" });
  made.style.background = `var(--${part})`;
  return made;
}

export function empty(...children) {
  return element("div", { class: "empty" }, ...children);
}

let colors = {};
let colorEpoch = 0;

// Changes whenever the colors change.
export function paletteKey() {
  return colorEpoch;
}

export function color(name) {
  if (!(name in colors)) colors[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return colors[name];
}

export function onNewColors(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colors = {};
    colorEpoch += 1;
    redraw();
  });
}

// Returns a cleared canvas as wide as its parent and `height` high, in CSS pixels.
export function prepared(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  const wanted = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wanted[0] || canvas.height !== wanted[1]) {
    [canvas.width, canvas.height] = wanted;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return [context, width];
}

// Returns an offscreen canvas of the same size that caches a slow drawing for later redraws. `paint(context)` is called
// when `key` changes.
export function copied(context, store, key, paint) {
  const { width, height } = context.canvas;
  const whole = `${key} ${width} ${height}`;
  if (store.key !== whole) {
    store.canvas ??= document.createElement("canvas");
    [store.canvas.width, store.canvas.height] = [width, height];
    const hidden = store.canvas.getContext("2d");
    hidden.setTransform(context.getTransform());
    paint(hidden);
    store.key = whole;
  }
  context.save();
  context.resetTransform();
  context.drawImage(store.canvas, 0, 0);
  context.restore();
}

export function tip(event, text) {
  const box = byId("tip");
  box.hidden = !text;
  if (!text) return;
  setText(box, text);
  const { innerWidth: width, innerHeight: height } = window;
  box.style.left = `${Math.min(event.clientX + 14, width - box.offsetWidth - 8)}px`;
  box.style.top = `${event.clientY + 18 + box.offsetHeight > height ? event.clientY - box.offsetHeight - 10 : event.clientY + 18}px`;
}

// Shows the text of `describe(x, y)` for the point under the mouse; a click calls `pick` with the point.
export function hovering(canvas, describe, pick) {
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("mousemove", (event) => tip(event, describe(...at(event))));
  canvas.addEventListener("mouseleave", (event) => tip(event, ""));
  if (pick) canvas.addEventListener("click", (event) => pick(...at(event)));
}
