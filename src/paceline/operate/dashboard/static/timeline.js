// Timeline of one step on all ranks: each rank's phases, with its buckets below them. Dragging zooms in.

import { byId, color, copied, element, empty, fill, hovering, paletteKey, prepared, setText, swatch } from "./dom.js";
import { bytes, count, ms } from "./format.js";
import { PART_NAMES } from "./state.js";

const GUTTER = 46;
const FOOT = 22;
let laneCanvas = null;
let laneView = null; // the current drawing: { timeline, lane, from, to, width }
let zoomed = null; // the zoomed range, [from, to] in ms
let dragged = null;
const laneStore = {};

export function drawTimeline(picture, view) {
  const place = byId("timeline");
  const timeline = picture.timeline;
  if (!timeline) {
    laneCanvas = null;
    fill(place, empty("The latest step of all ranks appears here, with the gradient buckets and the time spent waiting for them."));
    return;
  }
  if (!laneCanvas) buildTimeline(place, view);
  paintLanes(timeline, view);
  setText(byId("timeline-hint"), `step ${count(timeline.step)}, ${ms(timeline.span)}; drag to zoom, double-click to reset`);
}

function buildTimeline(place, view) {
  laneCanvas = element("canvas");
  hovering(laneCanvas, describeLane, (x, y) => {
    const lane = laneAt(y);
    if (lane && x < GUTTER) view.choose(lane.rank);
  });
  laneCanvas.addEventListener("pointerdown", (event) => { dragged = [timeAt(event.offsetX), null]; });
  laneCanvas.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    dragged[1] = timeAt(event.offsetX);
    paintLanes(laneView.timeline, view);
  });
  window.addEventListener("pointerup", () => {
    if (dragged && dragged[1] !== null && Math.abs(dragged[1] - dragged[0]) > (laneView.to - laneView.from) / 100) zoomed = [Math.min(...dragged), Math.max(...dragged)];
    dragged = null;
    if (laneView && laneCanvas) paintLanes(laneView.timeline, view);
  });
  laneCanvas.addEventListener("dblclick", () => {
    zoomed = null;
    paintLanes(laneView.timeline, view);
  });
  const keys = ["data", "forward", "backward", "exposed", "optimizer"].map((part) => element("span", {}, swatch(part), PART_NAMES[part]));
  keys.push(element("span", {}, swatch("bucket-wait"), "a bucket waits for the other ranks"), element("span", {}, swatch("bucket"), "is sent and reduced"));
  fill(place, element("div", {}, laneCanvas), element("div", { class: "keys" }, ...keys));
}

function paintLanes(timeline, view) {
  const lane = timeline.lanes.length <= 8 ? 34 : timeline.lanes.length <= 24 ? 20 : 11;
  const bottom = timeline.lanes.length * lane;
  const [context, width] = prepared(laneCanvas, bottom + FOOT);
  const [from, to] = zoomed ?? [0, timeline.span];
  laneView = { timeline, lane, from, to, width };
  const x = (time) => GUTTER + ((time - from) / (to - from)) * (width - GUTTER);
  copied(context, laneStore, [timeline.step, timeline.span, from, to, paletteKey()].join(), (hidden) => {
    hidden.font = context.font;
    hidden.textBaseline = "middle";
    grid(hidden, from, to, x, bottom);
    hidden.beginPath();
    hidden.rect(GUTTER, 0, width - GUTTER, bottom);
    hidden.clip();
    timeline.lanes.forEach((each, at) => paintLane(hidden, each, at * lane, lane, x));
  });
  const every = lane > 12 ? 1 : 4;
  context.textAlign = "right";
  timeline.lanes.forEach((each, at) => {
    if (at % every && each.rank !== view.chosen) return;
    context.fillStyle = color(each.rank === view.chosen ? "ink" : "quiet");
    context.fillText(String(each.rank), GUTTER - 8, Math.max(6, (at + 0.5) * lane));
  });
  if (dragged && dragged[1] !== null) {
    context.globalAlpha = 0.15;
    context.fillStyle = color("ink");
    context.fillRect(x(dragged[0]), 0, x(dragged[1]) - x(dragged[0]), bottom);
    context.globalAlpha = 1;
  }
}

function paintLane(context, lane, top, height, x) {
  const gap = height > 12 ? 3 : 1;
  const phase = height > 12 ? height * 0.44 : height * 0.5;
  for (const [name, begin, end] of lane.phases) {
    context.fillStyle = color(name in PART_NAMES ? name : "other");
    context.fillRect(x(begin), top + gap / 2, Math.max(1, x(end) - x(begin) - 0.5), phase);
  }
  const y = top + gap / 2 + phase + (height > 12 ? 2 : 1);
  const thick = Math.max(2, height - phase - gap - (height > 12 ? 2 : 1));
  context.fillStyle = color("bucket-wait");
  for (const [ready, sent] of lane.buckets) {
    if (sent > ready) context.fillRect(x(ready), y + thick / 4, x(sent) - x(ready), thick / 2);
  }
  context.fillStyle = color("bucket");
  for (const [, sent, done] of lane.buckets) {
    context.fillRect(x(sent), y, Math.max(1.5, x(done) - x(sent) - 1), thick);
  }
}

function grid(context, from, to, x, bottom) {
  const raw = (to - from) / 8;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= raw);
  context.strokeStyle = color("line");
  context.fillStyle = color("quiet");
  context.textAlign = "center";
  for (let time = Math.ceil(from / step) * step; time < to; time += step) {
    const at = Math.round(x(time)) + 0.5;
    context.beginPath();
    context.moveTo(at, 0);
    context.lineTo(at, bottom + 4);
    context.stroke();
    const shown = Number(time.toPrecision(6));
    if (at > GUTTER - 4) context.fillText(shown === 0 ? "0 ms" : String(shown), at, bottom + 13);
  }
}

function timeAt(x) {
  const share = (x - GUTTER) / (laneView.width - GUTTER);
  return laneView.from + Math.max(0, Math.min(1, share)) * (laneView.to - laneView.from);
}

function laneAt(y) {
  return laneView?.timeline.lanes[Math.floor(y / laneView.lane)];
}

function describeLane(x, y) {
  const lane = laneAt(y);
  if (!lane || x < GUTTER) return "";
  const time = timeAt(x);
  const low = y % laneView.lane > laneView.lane * 0.55;
  const bucket = lane.buckets.filter(([ready, , done]) => ready <= time && time <= done).pop();
  const phase = lane.phases.find(([, begin, end]) => begin <= time && time <= end);
  if (bucket && (low || !phase)) {
    const [ready, sent, done, nbytes, name] = bucket;
    return [`rank ${lane.rank}: bucket ${lane.buckets.indexOf(bucket)}, ${bytes(nbytes)}`, name, `ready at ${ms(ready)}`, `waits ${ms(sent - ready)}`, `under way ${ms(done - sent)}`].filter(Boolean).join("\n");
  }
  if (!phase) return `rank ${lane.rank}`;
  const [name, begin, end] = phase;
  return `rank ${lane.rank}: ${PART_NAMES[name] ?? name}\n${ms(end - begin)}, starting at ${ms(begin)}`;
}
