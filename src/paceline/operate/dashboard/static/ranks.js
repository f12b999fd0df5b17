// Table of ranks. Rows are reused and only their text changes, which keeps updates cheap with 64 ranks.

import { byId, element, empty, fill, setText } from "./dom.js";
import { age, bytes, count, ms } from "./format.js";

const COLUMNS = [
  ["rank", (row) => String(row.rank), (row) => row.rank],
  ["host", (row) => row.host, (row) => row.host, "left"],
  ["state", null, (row) => row.state, "left"],
  ["step", (row) => (row.step === null ? "–" : count(row.step)), (row) => row.step ?? -1],
  ["samples/s", (row) => (row.samples_per_s ? count(row.samples_per_s) : "–"), (row) => row.samples_per_s],
  ["own time", null, (row) => row.compute],
  ["waits", null, (row) => row.wait],
  ["memory", (row) => bytes(row.memory_nbytes), (row) => row.memory_nbytes],
  ["last record", (row) => age(row.silent_s), (row) => row.silent_s],
];

let order = { column: 0, descending: false };
let rows = new Map();
let body = null;

export function drawRanks(picture, view) {
  const place = byId("ranks");
  if (!picture.ranks?.length) {
    body = null;
    fill(place, empty("No rank has recorded anything yet."));
    return;
  }
  if (!body || !place.contains(body)) build(place, picture, view);
  const longest = Math.max(...picture.ranks.map((row) => row.compute + row.wait), 1e-9);
  const seen = new Set();
  for (const row of picture.ranks) {
    seen.add(row.rank);
    if (!rows.has(row.rank)) rows.set(row.rank, newRow(row.rank, view));
    show(rows.get(row.rank), row, longest, view);
  }
  for (const rank of [...rows.keys()].filter((each) => !seen.has(each))) {
    rows.get(rank).line.remove();
    rows.delete(rank);
  }
  arrange(picture.ranks);
  const hosts = new Set(picture.ranks.map((row) => row.host)).size;
  setText(byId("ranks-hint"), hosts > 1 ? `on ${hosts} machines` : "");
}

function build(place, picture, view) {
  rows = new Map();
  body = element("tbody");
  const heads = COLUMNS.map(([name, , , side], at) =>
    element("th", { class: `sortable ${side ?? ""}`, onclick: () => sortBy(at, heads, picture, view) }, name));
  heads[order.column].classList.add("sorted");
  fill(place, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
}

function sortBy(column, heads, picture, view) {
  order = { column, descending: order.column === column ? !order.descending : column > 2 };
  heads.forEach((head, at) => head.classList.toggle("sorted", at === column));
  arrange(view.picture.ranks);
}

function arrange(ranks) {
  const key = COLUMNS[order.column][2];
  const compare = (a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : a.rank - b.rank);
  const isDefault = order.column === 0 && !order.descending; // in the default order, blamed ranks come first
  const sorted = [...ranks].sort((a, b) => (isDefault && b.is_blamed - a.is_blamed) || (order.descending ? compare(b, a) : compare(a, b)));
  const wanted = sorted.map((row) => rows.get(row.rank).line);
  if (wanted.some((line, at) => body.children[at] !== line)) body.append(...wanted);
}

function newRow(rank, view) {
  const cells = COLUMNS.map(([, , , side]) => element("td", { class: side ?? "" }));
  const state = element("span");
  cells[2].append(state);
  const [compute, wait] = [meter("backward"), meter("exposed")];
  cells[5].append(compute.text, compute.meter);
  cells[6].append(wait.text, wait.meter);
  const line = element("tr", { class: "pick", onclick: () => view.choose(rank) }, ...cells);
  return { line, cells, state, compute, wait };
}

function meter(part) {
  const bar = element("i");
  bar.style.background = `var(--${part})`;
  return { text: element("span"), bar, meter: element("span", { class: "meter" }, bar) };
}

function show(kept, row, longest, view) {
  COLUMNS.forEach(([, text], at) => {
    if (text) setText(kept.cells[at], text(row));
  });
  setText(kept.state, row.state);
  kept.state.className = `tag ${row.state}`;
  kept.line.title = [row.doing, `process ${row.pid}`].filter(Boolean).join(" · ");
  setText(kept.compute.text, row.compute ? ms(row.compute) : "–");
  kept.compute.text.className = row.is_slow ? "slow" : "";
  kept.compute.bar.style.width = `${(row.compute / longest) * 100}%`;
  setText(kept.wait.text, row.compute ? ms(row.wait) : "–");
  kept.wait.bar.style.width = `${(row.wait / longest) * 100}%`;
  kept.line.classList.toggle("chosen", view.chosen === row.rank);
  kept.line.classList.toggle("blamed", row.is_blamed);
}
