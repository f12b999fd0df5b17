// Charts of logged values, one chart per name. Each chart shows the mean over the ranks on top of their range.

import { byId, color, element, empty, fill, setText } from "./dom.js";
import { short } from "./format.js";

const CURVE_HEIGHT = 170;
const ORDER = ["loss", "lr"];
const LONG_NAMES = { lr: "learning rate" };
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7];
const charts = new Map();
let curvesRead = { epoch: -1, end: 0 };
const columns = new Map();

export function drawCurves(picture) {
  const place = byId("curves");
  const { epoch, first, items } = picture.curves;
  if (!items.length) {
    forgetCurves();
    fill(place, empty("No values are logged. ", element("code", {}, "paceline.log(loss=loss.item())"), " in the training loop adds a curve here."));
    return;
  }
  if (curvesRead.epoch !== epoch || curvesRead.end > first + items.length) {
    columns.clear();
    curvesRead = { epoch, end: first };
  }
  for (const point of items.slice(curvesRead.end - first)) {
    if (!columns.has(point.name)) columns.set(point.name, [[], [], [], []]);
    const [steps, means, lows, highs] = columns.get(point.name);
    steps.push(point.step);
    means.push(point.mean);
    lows.push(point.low);
    highs.push(point.high);
  }
  curvesRead.end = first + items.length;
  const names = [...columns.keys()].sort((a, b) => rankOf(a) - rankOf(b) || (a < b ? -1 : 1));
  if (names.join("\n") !== [...charts.keys()].join("\n")) buildCurves(place, names);
  for (const name of names) showCurve(name);
}

export function redrawCurves(picture) {
  forgetCurves();
  curvesRead = { epoch: -1, end: 0 };
  drawCurves(picture);
}

function rankOf(name) {
  return ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length;
}

function forgetCurves() {
  for (const { chart } of charts.values()) chart.destroy();
  charts.clear();
}

function buildCurves(place, names) {
  forgetCurves();
  fill(place);
  for (const name of names) {
    const latest = element("b");
    const box = element("div");
    place.append(element("div", {}, element("h3", {}, LONG_NAMES[name] ?? name, latest), box));
    charts.set(name, { latest, box, chart: new uPlot(optionsOf(name, box.clientWidth), columns.get(name), box) });
  }
}

function showCurve(name) {
  const { latest, box, chart } = charts.get(name);
  const data = columns.get(name);
  if (box.clientWidth !== chart.width) chart.setSize({ width: box.clientWidth, height: CURVE_HEIGHT });
  chart.setData(data);
  setText(latest, short(data[1][data[1].length - 1]));
}

function optionsOf(name, width) {
  const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const edge = { stroke: "transparent", points: { show: false } };
  return {
    width,
    height: CURVE_HEIGHT,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    scales: { x: { time: false } },
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
    hooks: {
      setCursor: [(chart) => {
        const at = chart.cursor.idx;
        const data = columns.get(name);
        const shown = at === null || at === undefined ? data[0].length - 1 : at;
        const where = at === null || at === undefined ? "" : ` at step ${data[0][shown]}`;
        if (charts.has(name)) setText(charts.get(name).latest, `${short(data[1][shown])}${where}`);
      }],
    },
    axes: [
      { ...axis, size: 26, incrs: WHOLE },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) },
    ],
    series: [{}, { stroke: color("backward"), width: 1.6, points: { show: false } }, edge, edge],
    bands: [{ series: [3, 2], fill: `${color("backward")}2e` }],
  };
}
