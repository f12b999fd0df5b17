// Entry point of the report: draws the state embedded in the file.

import { byId } from "./dom.js";
import { applied, newPicture } from "./state.js";
import { newView } from "./view.js";

const reported = newView(newPicture());
reported.changed(applied(reported.picture, JSON.parse(byId("picture").textContent), true));
