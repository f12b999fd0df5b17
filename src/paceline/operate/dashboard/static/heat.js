// Heat map with a row for each rank and a column for each step. Slow ranks appear as horizontal lines, slow steps as vertical ones.

import { byId, color, copied, element, empty, fill, hovering, paletteKey, prepared, setText } from "./dom.js";
import { count, ms } from "./format.js";

const LABELS = 46;
const KINDS = {
  compute: ["own time", "compared with the median of all ranks over the last steps; colored if at least 5 % slower"],
  wait: ["waiting", "for communication, as a share of the step"],
};
const FULL = { compute: 0.5, wait: 0.5 };
const LEAST = { compute: 0.05, wait: 0 };
const FEWEST_COLUMNS = 60;
let heatCanvas = null;
let heatKind = "compute";
let heatGrid = null;
const heatStore = {};

export function drawHeat(picture, view) {
  const place = byId("heat");
  const steps = picture.steps.items;
  if (!steps.length) {
    heatCanvas = null;
    fill(place, empty("Steps appear here from left to right."));
    return;
  }
  if (!heatCanvas) buildHeat(place, view);
  setText(byId("heat-hint"), KINDS[heatKind][1]);
  const ranks = Math.max(...steps.map((step) => step.compute.length));
  const rowHeight = Math.max(5, Math.min(20, 320 / ranks));
  const [context, width] = prepared(heatCanvas, ranks * rowHeight + 20);
  const shown = steps.slice(-Math.max(1, Math.floor((width - LABELS) / 3)));
  const each = (width - LABELS) / Math.max(FEWEST_COLUMNS, shown.length);
  const key = [heatKind, picture.steps.epoch, picture.steps.first + steps.length, paletteKey()].join();
  copied(context, heatStore, key, (hidden) => paintCells(hidden, shown, each, rowHeight));
  labels(context, ranks, rowHeight, width, shown, each, view.chosen);
  heatGrid = { shown, each, rowHeight, ranks };
}

function paintCells(context, shown, each, rowHeight) {
  const middle = median(shown.flatMap((step) => step.compute.filter((time) => time !== null)));
  const gap = [each > 5 ? 1 : 0, rowHeight > 7 ? 1 : 0];
  const shades = scale(color("heat-0"), color("heat-1"));
  shown.forEach((step, column) => {
    for (let rank = 0; rank < step.compute.length; rank += 1) {
      const heat = heatOf(step, rank, middle);
      if (heat === null) continue;
      context.fillStyle = shades[Math.round(heat * 31)];
      context.fillRect(LABELS + column * each, rank * rowHeight, each - gap[0], rowHeight - gap[1]);
    }
  });
}

function buildHeat(place, view) {
  heatCanvas = element("canvas");
  hovering(heatCanvas, describeCell, (_, y) => {
    const rank = heatGrid && Math.floor(y / heatGrid.rowHeight);
    if (heatGrid && rank < heatGrid.ranks) view.choose(rank);
  });
  fill(place, element("div", {}, heatCanvas));
  const buttons = Object.entries(KINDS).map(([kind, [name]]) => element("button", {
    type: "button",
    "aria-pressed": String(kind === heatKind),
    onclick: () => {
      heatKind = kind;
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
      drawHeat(view.picture, view);
    },
  }, name));
  fill(byId("heat-choice"), ...buttons);
}

function heatOf(step, rank, middle) {
  const time = step[heatKind][rank];
  if (time === null || time === undefined) return null;
  const value = heatKind === "wait" ? time / step.duration : time / middle - 1;
  return Math.max(0, Math.min(1, (value - LEAST[heatKind]) / (FULL[heatKind] - LEAST[heatKind])));
}

function labels(context, ranks, rowHeight, width, shown, each, chosen) {
  const every = rowHeight >= 12 ? 1 : Math.ceil(14 / rowHeight / 4) * 4;
  context.textAlign = "right";
  for (let rank = 0; rank < ranks; rank += 1) {
    if (rank % every !== 0 && rank !== chosen) continue;
    context.fillStyle = color(rank === chosen ? "ink" : "quiet");
    context.fillText(String(rank), LABELS - 8, Math.max(6, (rank + 0.5) * rowHeight));
  }
  context.fillStyle = color("quiet");
  context.textAlign = "left";
  context.fillText(`step ${count(shown[0].step)}`, LABELS, ranks * rowHeight + 12);
  context.textAlign = "right";
  const right = LABELS + shown.length * each;
  if (right - LABELS > 180) context.fillText(count(shown[shown.length - 1].step), right, ranks * rowHeight + 12);
  if (chosen !== null && chosen < ranks) {
    context.strokeStyle = color("ink");
    context.strokeRect(LABELS - 0.5, chosen * rowHeight - 0.5, shown.length * each, rowHeight);
  }
}

function describeCell(x, y) {
  if (!heatGrid || x < LABELS) return "";
  const step = heatGrid.shown[Math.floor((x - LABELS) / heatGrid.each)];
  const rank = Math.floor(y / heatGrid.rowHeight);
  const time = step?.compute[rank];
  if (time === undefined || time === null) return "";
  return `rank ${rank}, step ${count(step.step)}\nown time ${ms(time)}\nwaits ${ms(step.wait[rank])}`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] || 1;
}

function scale(from, to) {
  const [first, last] = [from, to].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 32 }, (_, step) => {
    const mixed = first.map((value, at) => Math.round(value + ((last[at] - value) * step) / 31));
    return `rgb(${mixed.join(",")})`;
  });
}
