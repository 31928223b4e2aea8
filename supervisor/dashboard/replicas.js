// The replicas of a fleet, as the database has them, and a way to any Action: whoever is asked leads to its owner.

import { ask } from "./api.js";
import { byId, el, fill, say } from "./element.js";
import { count, span, when } from "./format.js";

/** Let the form open the Action that is typed. */
export function setUpReplicas() {
  byId("open-action").addEventListener("submit", (event) => {
    event.preventDefault();
    const actionId = byId("open-id").value.trim();
    if (actionId) location.hash = `#/jobs/${encodeURIComponent(actionId)}`;
  });
}

/** Ask for the fleet and show it. Throws as ask does. */
export async function refreshReplicas() {
  const fleet = await ask("/fleet");
  fill(byId("replica-rows"), fleet.replicas.map((one) => row(one, one.replica_id === fleet.replica_id)));
  const lease = fleet.lease_valid ? "its lease is valid" : `it has no valid lease: ${fleet.why}`;
  say(byId("replicas-here"), `This page is ${fleet.replica_id}’s, epoch ${fleet.epoch}: ${lease}; `
    + `${count(fleet.outbox, "ending")} not told to the others yet, lease recovered `
    + `${count(fleet.lease_recoveries, "time")}. The list of jobs has its own only.`);
}

function row(replica, here) {
  const [word, kind] = state(replica);
  const cell = (name, ...children) => el("td", { role: "cell", "data-name": name }, ...children);
  return el("tr", { role: "row", class: here ? "chosen" : null },
    el("th", { role: "rowheader", scope: "row" }, replica.replica_id),
    cell("State", el("span", { class: `badge ${kind}` }, word)),
    cell("Running", replica.running),
    cell("Queued", replica.queued),
    cell("Unfinished", replica.unfinished),
    cell("Epoch", replica.epoch),
    cell("Address", replica.url));
}

/** One word for how it stands, and how that looks. */
function state(replica) {
  if (replica.retired_at !== null) return [`retired ${when(replica.retired_at)}`, ""];
  if (!replica.lease_valid) return [`away for ${span(-replica.lease_left_s)}`, "bad"];
  return replica.draining ? ["draining", "warn"] : ["ready", "good"];
}
