// Entry point of the page: follows the launcher's event stream and draws changes.

import { byId, setText } from "./dom.js";
import { applied, newPicture } from "./state.js";
import { newView } from "./view.js";

const ANSWER_SHOWN_MS = 10_000;

const view = newView(newPicture());

function connect() {
  const stream = new EventSource("events");
  const take = (isSnapshot) => (event) => {
    setText(byId("connection"), "");
    view.changed(applied(view.picture, JSON.parse(event.data), isSnapshot));
  };
  stream.addEventListener("snapshot", take(true));
  stream.addEventListener("change", take(false));
  stream.addEventListener("end", () => {
    stream.close();
    setText(byId("connection"), "the job has ended; this is its last state");
  });
  stream.addEventListener("error", () => {
    const isOver = stream.readyState === EventSource.CLOSED;
    setText(byId("connection"), isOver ? "not connected: open the address with its token again" : "the launcher does not answer; this is its last state");
  });
}

async function takeStacks() {
  const answer = await fetch("actions/stacks", { method: "POST", headers: { "X-Paceline-Action": "stacks" } });
  const text = answer.ok ? (await answer.json()).report : await answer.text();
  setText(byId("answer"), text);
  setTimeout(() => setText(byId("answer"), ""), ANSWER_SHOWN_MS);
}

if (document.documentElement.dataset.actions === "1") view.takeStacks = takeStacks;
connect();
