// State of the job, built from messages in the event stream (see event_stream.py).

export const PARTS = ["data", "forward", "backward", "exposed", "optimizer", "other"];
export const PART_NAMES = {
  data: "waiting for data",
  forward: "forward",
  backward: "backward",
  exposed: "waiting for communication",
  optimizer: "optimizer",
  other: "the rest of the program",
};
const GROWING = ["steps", "curves", "events", "log"];

export function newPicture() {
  const picture = {};
  for (const name of GROWING) picture[name] = { epoch: 0, first: 0, items: [] };
  return picture;
}

// Returns the names of the fields that have changed.
export function applied(picture, message, isSnapshot) {
  if (isSnapshot) Object.assign(picture, newPicture(), { figures: null, ranks: [], what_if: null, timeline: null, verdict: null, stacks: [], links: [], network: null, owed: [], calls: [] });
  for (const [name, value] of Object.entries(message)) picture[name] = GROWING.includes(name) ? grown(picture[name], value) : value;
  return isSnapshot ? Object.keys(picture) : Object.keys(message);
}

function grown(old, part) {
  if (old.epoch !== part.epoch) return { epoch: part.epoch, first: part.first, items: part.items };
  const kept = old.items.slice(Math.max(0, part.first - old.first), Math.max(0, part.from - old.first));
  return { epoch: part.epoch, first: part.first, items: kept.concat(part.items) };
}
