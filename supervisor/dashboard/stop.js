// Stop evidence in words, and the cancel dialog.

import { Refused, ask, jobPath } from "./api.js";
import { announce, byId, closers, el, fact, longFact, openDialog, say } from "./element.js";
import { count, milliseconds, when, words } from "./format.js";

const METHODS = {
  never_started: "nothing of it had been started",
  cgroup: "the kernel says that its cgroup is empty",
  sealed_cgroup: "after a restart, nobody else was left in the unit’s own cgroup",
  pid_namespace: "its PID namespace has ended, and everything in it",
  keeper: "its keeper, parent of all of it, has no child left",
  subreaper: "the supervisor, which adopts what is left, has no child of it",
  group: "its process group was killed; nothing shows what may have left that group",
  boot_changed: "the machine has been started anew since",
  none: "nobody could look",
};

/** What was done to end a job’s work, and what shows it. */
export function evidenceOf(stop) {
  const proved = stop.confirmed;
  const worker = stop.worker;
  return el("div", { class: `evidence ${proved ? "proved" : "unproved"}` },
    el("p", { class: "verdict" }, el("span", { class: `badge ${proved ? "good" : "bad"}` },
      proved ? "Proved" : "Not proved"),
    proved ? ` Nothing of it is left: ${METHODS[stop.method] || stop.method}.` : ` ${doubt(stop)}`),
    el("dl", { class: "facts" },
      fact("Ended by", words(stop.reason)),
      fact("Took", milliseconds(stop.elapsed_ms)),
      fact("Killed", stop.processes_killed ? count(stop.processes_killed, "process").replace("processs", "processes")
        : "nothing had to be killed"),
      fact("Left", stop.processes_left === null ? "cannot be seen" : stop.processes_left),
      fact("Method", el("code", {}, stop.method)),
      fact("Asked for", when(stop.requested_at)),
      fact("Proved at", when(stop.confirmed_at)),
      worker ? fact("Worker", `pid ${worker.pid}, ${exitOf(worker)}`) : null,
      stop.late_result ? longFact("Late result", `${stop.late_result.bytes} bytes came after the end was decided; `
        + `SHA-256 ${stop.late_result.sha256}`) : null),
    stop.strays.length ? straysOf(stop.strays) : null);
}

function doubt(stop) {
  const left = stop.processes_left ? ` ${stop.processes_left} could still be seen at the last look.` : "";
  return `It cannot be shown that nothing is left: ${words(stop.reason)} (${METHODS[stop.method] || stop.method}).${left}`;
}

function exitOf(worker) {
  const memory = worker.oom ? ", out of memory" : "";
  if (worker.exit_signal) return `ended by ${worker.exit_signal}${memory}`;
  return worker.exit_code === null ? "its exit status is not in hand" : `exit status ${worker.exit_code}${memory}`;
}

function straysOf(strays) {
  return el("div", {}, el("p", {}, "Found outside of its cgroup and killed:"),
    el("ul", {}, ...strays.map((stray) => el("li", {}, `pid ${stray.pid} `, el("code", {}, stray.command || "?")))));
}

let subject = null;
let onCancelled = () => {};

/** Prepare the dialog; `cancelled` is called with the view that a cancel answered. */
export function setUpCancel(cancelled) {
  onCancelled = cancelled;
  const dialog = byId("cancel-dialog");
  closers(dialog);
  byId("cancel-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("cancel-id").addEventListener("input", () => fault(""));
}

/** Ask whether this job is to be cancelled. */
export function openCancel(job) {
  subject = job;
  byId("cancel-form").reset();
  byId("cancel-form").hidden = false;
  byId("cancel-title").textContent = "Cancel this job?";
  byId("cancel-which").textContent = job.action_id;
  byId("cancel-progress").textContent = "";
  byId("cancel-proof").hidden = true;
  byId("cancel-done").hidden = true;
  fault("");
  openDialog(byId("cancel-dialog"), byId("cancel-id"));
}

function fault(text) {
  say(byId("cancel-error"), text);
  if (text) byId("cancel-id").setAttribute("aria-invalid", "true");
  else byId("cancel-id").removeAttribute("aria-invalid");
}

async function submit() {
  const job = subject;
  if (byId("cancel-id").value.trim() !== job.action_id) {
    fault("That is not the Action id. Nothing was cancelled.");
    byId("cancel-id").focus();
    return;
  }
  const reason = byId("cancel-reason").value.trim();
  const body = { crew_id: job.crew_id, action_id: job.action_id, ...(reason ? { reason } : {}) };
  byId("cancel-form").hidden = true;
  byId("cancel-title").textContent = "Stopping";
  byId("cancel-title").focus();
  byId("cancel-progress").textContent = "Killing its processes and waiting for the proof…";
  try {
    const view = await ask(jobPath(job.action_id, "/cancel"), { method: "POST", body: JSON.stringify(body) });
    if (subject === job) showProof(view);
    onCancelled(view);
  } catch (error) {
    if (subject === job) showFailure(error);
  }
}

function showProof(view) {
  const cancelled = view.status === "cancelled";
  const title = cancelled ? "Cancelled" : `It had ended before: ${view.status}`;
  finish(title, cancelled ? `${view.action_id} is cancelled. What shows that it is stopped:`
    : `${view.action_id} was not cancelled: it is ${view.status} already. What is known of its end:`);
  byId("cancel-proof").replaceChildren(view.stop ? evidenceOf(view.stop) : el("p", {}, "The record has no evidence."));
  byId("cancel-proof").hidden = false;
  announce(view.stop?.confirmed ? `${title}; the stop is proved` : `${title}; the stop is not proved`);
}

function showFailure(error) {
  const unproved = error instanceof Refused && error.code === "stop_unconfirmed";
  const advice = unproved ? "The supervisor goes on trying. The job stays running, in phase stopping, until nothing of it is left."
    : error instanceof Refused ? "" : "The connection broke; the stop may go on. Look at the job’s status.";
  finish(unproved ? "Not proved yet" : "Not cancelled", `${error.message}. ${advice}`);
}

function finish(title, text) {
  byId("cancel-title").textContent = title;
  byId("cancel-progress").textContent = text;
  byId("cancel-done").hidden = false;
  byId("cancel-title").focus();
}
