// Draws changes once per frame and stores the user's selection.

import { byId, onNewColors, setText } from "./dom.js";
import { drawCurves, redrawCurves } from "./curves.js";
import { drawFigures, drawHeader, drawVerdict, drawWhatIf } from "./header.js";
import { drawHeat } from "./heat.js";
import { drawCalls, drawEvents, drawLinks, drawLog, drawStacks, filterLog } from "./lists.js";
import { drawRanks } from "./ranks.js";
import { drawStep } from "./step.js";
import { drawTimeline } from "./timeline.js";

const DRAWN_FROM = [
  [["header"], drawHeader],
  [["verdict"], (picture, view) => drawVerdict(picture, view.takeStacks)],
  [["what_if"], drawWhatIf],
  [["figures"], drawFigures],
  [["ranks"], drawRanks],
  [["steps", "figures"], drawStep],
  [["steps"], drawHeat],
  [["timeline"], drawTimeline],
  [["curves"], drawCurves],
  [["events"], drawEvents],
  [["calls"], drawCalls],
  [["links", "network", "owed"], drawLinks],
  [["stacks"], drawStacks],
  [["log", "ranks"], drawLog],
];

export function newView(picture) {
  const view = { picture, chosen: null, takeStacks: null, logFilter: { rank: "", text: "" }, isPaused: false };
  const stale = new Set();
  let isAsked = false;

  function draw() {
    isAsked = false;
    if (view.isPaused) return;
    for (const [names, drawing] of DRAWN_FROM) {
      if (names.some((name) => stale.has(name))) drawing(view.picture, view);
    }
    stale.clear();
  }

  view.changed = (names) => {
    for (const name of names) stale.add(name);
    if (!isAsked) requestAnimationFrame(draw);
    isAsked = true;
  };
  view.everything = () => view.changed(DRAWN_FROM.flatMap(([names]) => names));
  view.choose = (rank) => {
    view.chosen = view.chosen === rank ? null : rank;
    for (const drawing of [drawRanks, drawHeat, drawTimeline]) drawing(view.picture, view);
    view.logFilter.rank = view.chosen === null ? "" : String(view.chosen);
    byId("log-rank").value = view.logFilter.rank;
    filterLog(view);
  };
  listen(view);
  return view;
}

function listen(view) {
  byId("log-rank").addEventListener("change", (event) => {
    view.logFilter.rank = event.target.value;
    filterLog(view);
  });
  byId("log-text").addEventListener("input", (event) => {
    view.logFilter.text = event.target.value.toLowerCase();
    filterLog(view);
  });
  byId("pause").addEventListener("click", () => pause(view));
  document.addEventListener("keydown", (event) => {
    if (event.key !== " " || ["INPUT", "SELECT", "BUTTON"].includes(event.target.tagName)) return;
    event.preventDefault();
    pause(view);
  });
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    view.everything();
  }).observe(document.body);
  onNewColors(() => {
    redrawCurves(view.picture);
    view.everything();
  });
}

function pause(view) {
  view.isPaused = !view.isPaused;
  byId("pause").setAttribute("aria-pressed", String(view.isPaused));
  setText(byId("pause"), view.isPaused ? "Paused" : "Pause");
  if (!view.isPaused) view.everything();
}
