// Page header: the job's state, progress, diagnosis, what-if line and key figures.

import { byId, element, fill, setText } from "./dom.js";
import { count, ms, percent, span } from "./format.js";

export function drawHeader({ header }) {
  if (!header) return;
  const sentence = header.sentence.charAt(0).toUpperCase() + header.sentence.slice(1);
  setText(byId("sentence"), sentence);
  document.title = `${sentence} – Paceline`;
  document.body.className = `health-${header.health}`;
  byId("progress").hidden = header.share === null;
  byId("done").style.width = `${(header.share ?? 0) * 100}%`;
  const parts = [["job", header.run_id], ["", header.command], ["running for", span(header.elapsed_s)]];
  if (header.security) parts.push(["connections", header.security === "encrypt" ? "authenticated and encrypted" : "authenticated"]);
  fill(byId("meta"), ...parts.filter(([, text]) => text).map(([name, text]) => element("span", {}, name ? `${name} ` : "", element("code", {}, text))));
}

export function drawVerdict({ verdict }, takeStacks) {
  const card = byId("verdict");
  card.hidden = !verdict;
  if (!verdict) return;
  const text = element("div", {}, element("p", {}, verdict.sentence));
  if (verdict.details.length) text.append(element("ul", {}, ...verdict.details.map((line) => element("li", {}, line))));
  const row = element("div", { class: "row" }, text, element("span", { class: "grow" }));
  if (takeStacks) row.append(element("button", { type: "button", onclick: takeStacks }, "Capture stacks"));
  fill(card, row);
}

export function drawWhatIf({ what_if: guess }) {
  const card = byId("what-if");
  card.hidden = !guess;
  if (!guess) return;
  const done = element("div");
  done.style.width = `${(guess.then / guess.now) * 100}%`;
  fill(card, element("span", {}, guess.sentence), element("div", { class: "bar" }, done));
}

export function drawFigures({ figures }) {
  const place = byId("figures");
  place.hidden = !figures;
  if (!figures) return;
  const [value, unit] = ms(figures.step).split(" ");
  const cards = [[value, unit, "mean step"]];
  if (typeof figures.predicted === "number") {
    const [expected, its] = ms(figures.predicted).split(" ");
    cards.push([expected, its, "predicted step"]);
  }
  if (figures.samples_per_s) cards.push([count(figures.samples_per_s), "/s", "samples, all ranks"]);
  cards.push([percent(figures.exposed_share).replace(" %", ""), "%", "of a step is spent waiting"]);
  if (figures.overlap !== null) cards.push([percent(figures.overlap).replace(" %", ""), "%", "of the communication overlaps"]);
  fill(place, ...cards.map(([number, its, text]) => element("div", { class: "figure" }, element("b", {}, number, " ", element("small", {}, its)), element("span", {}, text))));
}
