// Lists of events, links, stacks and the ranks' output.

import { byId, element, empty, fill, setText } from "./dom.js";
import { clock, count, ms, perSecond, span } from "./format.js";

export function drawEvents(picture) {
  const { items } = picture.events;
  if (!items.length) {
    fill(byId("events"), empty("Starts, deaths, new ranks and checkpoints appear here."));
    return;
  }
  const begin = startOf(picture);
  const rows = [...items].reverse().map((event) => element("tr", {},
    element("td", { class: "left" }, clock(event.at_s - begin)),
    element("td", { class: "left" }, element("span", { class: `tag ${event.kind}` }, event.kind)),
    element("td", { class: "text" }, event.text),
    element("td", {}, event.cost_s === null ? "" : event.cost_s < 1 ? ms(event.cost_s * 1000) : span(event.cost_s))));
  fill(byId("events"), table(["after", "", "what", "cost"], ["left", "left", "left", ""], rows));
}

export function drawLinks({ links, network, owed, ranks }) {
  byId("owed").hidden = !owed?.length;
  fill(byId("owed"), ...(owed ?? []).map((text) => element("li", {}, text)));
  setText(byId("network"), network ? `${network[0].toUpperCase()}${network.slice(1)}.` : "");
  if (!links?.length) {
    fill(byId("links"), empty("Nothing has been sent yet."));
    return;
  }
  const hosts = new Map((ranks ?? []).map((row) => [row.rank, row.host]));
  const at = (rank) => (new Set(hosts.values()).size > 1 ? `${rank} (${hosts.get(rank) ?? "?"})` : rank);
  const rows = links.map((link) => element("tr", { class: link.is_slow ? "slow" : "" },
    element("td", { class: "left" }, link.peer < 0 ? `${at(link.rank)}, ${link.kind}` : `${at(link.rank)} to ${at(link.peer)}`),
    element("td", {}, perSecond(link.nbytes_per_s)),
    element("td", {}, link.delivers_nbytes_per_s === null ? "–" : perSecond(link.delivers_nbytes_per_s)),
    element("td", { title: link.variation === null ? "" : `varies by ${ms(link.variation)}` }, link.round_trip === null ? "–" : ms(link.round_trip)),
    element("td", {}, link.retransmits === null ? "–" : count(link.retransmits))));
  fill(byId("links"), table(["ranks", "sends", "delivers", "round trip", "sent again"], ["left"], rows));
}

export function drawCalls({ calls }) {
  byId("calls-card").hidden = !calls?.length;
  const rows = (calls ?? []).map((call) => element("tr", { class: call.is_far ? "slow" : "" },
    element("td", { class: "left" }, call.name),
    element("td", {}, count(call.calls)),
    element("td", {}, ms(call.predicted)),
    element("td", {}, ms(call.actual))));
  fill(byId("calls"), table(["call", "times", "predicted", "actual"], ["left"], rows));
}

export function drawStacks({ stacks }) {
  byId("stacks-card").hidden = !stacks?.length;
  fill(byId("stacks"), ...(stacks ?? []).map((stack) => element("div", {}, element("h3", {}, `rank ${stack.rank}`), element("pre", {}, stack.text))));
}

function table(heads, sides, rows) {
  const head = element("tr", {}, ...heads.map((name, at) => element("th", { class: sides[at] ?? "" }, name)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function startOf(picture) {
  return picture.events.items.length && picture.events.first === 0 ? picture.events.items[0].at_s : 0;
}

let logEnd = 0;
let logEpoch = null;
let logStart = null;
const MOST_LINES = 2000;

export function drawLog(picture, view) {
  const place = byId("log");
  const { first, epoch, items } = picture.log;
  const isNew = logEpoch !== epoch || logEnd > first + items.length || logEnd < first;
  if (isNew) {
    fill(place);
    logEnd = first;
    logEpoch = epoch;
  }
  if (!items.length) {
    fill(place, empty(document.documentElement.dataset.report ? "The output of the ranks was not saved; paceline run --log-dir saves it." : "The ranks have printed nothing yet."));
    return;
  }
  if (logStart === null) logStart = startOf(picture) || items[0].at_s;
  if (place.firstChild?.className === "empty") fill(place);
  const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  const added = items.slice(logEnd - first).map((line) => lineOf(line, view));
  place.append(...added);
  while (place.childElementCount > MOST_LINES) place.firstChild.remove();
  logEnd = first + items.length;
  chooseRanks(picture);
  if (follows) place.scrollTop = place.scrollHeight;
}

function lineOf(line, view) {
  const made = element("div", { class: line.stream === 2 ? "err" : "", "data-rank": line.rank },
    element("time", {}, clock(line.at_s - logStart)), element("span", { class: "who" }, `rank ${line.rank}`), element("span", {}, line.text));
  made.classList.toggle("away", !isWanted(made, view));
  return made;
}

export function filterLog(view) {
  for (const line of byId("log").children) line.classList.toggle("away", !isWanted(line, view));
}

function isWanted(line, view) {
  const { rank, text } = view.logFilter;
  return (rank === "" || line.dataset.rank === rank) && (!text || line.lastChild.textContent.toLowerCase().includes(text));
}

function chooseRanks({ ranks }) {
  const select = byId("log-rank");
  const wanted = (ranks ?? []).map((row) => String(row.rank));
  if (wanted.join() === [...select.options].slice(1).map((each) => each.value).join()) return;
  const chosen = select.value;
  fill(select, element("option", { value: "" }, "all"), ...wanted.map((rank) => element("option", { value: rank }, rank)));
  select.value = wanted.includes(chosen) ? chosen : "";
}
