// The summary on top: whether work would be taken, what runs, how stops are proved, what nobody knows.

import { announce, byId, el, fill, say } from "./element.js";

const CHECKS = {
  journal: "the journal cannot be written",
  template: "the process that starts workers is down",
  slots: "every slot is out of service",
  accepting: "the supervisor is shutting down",
  lease: "it has no valid lease in its fleet",
};
const STOPS = {
  cgroup: "proved by cgroup",
  keeper: "proved by keepers",
  group: "not proved",
};

let before = "";

/** Show a health document. */
export function showHealth(health) {
  const ready = health.status === "ready";
  const missing = Object.entries(health.checks).filter(([, good]) => !good).map(([name]) => CHECKS[name] || name);
  fill(byId("health"), [
    item("State", el("span", { class: `badge ${ready ? "good" : "bad"}` }, ready ? "Ready" : "Not ready")),
    item("Running", health.running),
    item("Queued", health.queued),
    item("Retained", `${health.retained_runs} of ${health.max_retained_runs}`),
    item("Stops", el("span", { class: health.stop_method === "group" ? "badge bad" : null },
      STOPS[health.stop_method] || health.stop_method)),
    item("Unknown effects", health.effects_unknown
      ? el("a", { class: "badge bad", href: "#/unknown-effects" }, health.effects_unknown, " – look") : "0"),
    "lease" in health.checks ? item("Fleet", el("a", { href: "#/replicas" }, "Replicas")) : null,
  ]);
  byId("health").title = `crew-supervisor ${health.version}, CrewAI ${health.crewai_version ?? "not loaded"}, `
    + `launch by ${health.launch_mode}`;
  say(byId("reasons"), ready ? "" : `Not ready: ${missing.join("; ")}.`);
  if (before && before !== health.status) announce(ready ? "The supervisor is ready" : `Not ready: ${missing.join("; ")}`);
  before = health.status;
}

function item(name, value) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value));
}
