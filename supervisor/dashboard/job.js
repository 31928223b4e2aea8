// One job: what it is, its unknown effects first, its stop, its output, its events, its log.

import { Refused, ask, jobPath, send } from "./api.js";
import { QUERY, showEffects } from "./effects.js";
import { announce, byId, el, fact, fill, longFact, say } from "./element.js";
import { bytes, count, since, span, when } from "./format.js";
import { statusOf } from "./jobs.js";
import { evidenceOf, openCancel } from "./stop.js";
import { Timeline } from "./timeline.js";

const LOG_TAIL = 65536;
/** Characters of an output that are shown unasked. */
const OUTPUT_CHARS = 20000;
const LOG_ROUTE = /^\/jobs\/\{[^}]+\}\/log$/;

let open = null;
let hasLogRoute = null;

/** Prepare the buttons. */
export function setUpJob() {
  byId("cancel").addEventListener("click", () => { if (open?.view) openCancel(open.view); });
  byId("log-again").addEventListener("click", () => { if (open) readLog(open); });
}

/** The Action that is open, null for none. */
export function openAction() {
  return open?.actionId ?? null;
}

/** Show a job. Refreshing it is up to the caller. */
export function openJob(actionId) {
  closeJob();
  const job = { actionId, view: null, effects: "", ended: false, gone: false, timeline: null, output: "" };
  open = job;
  byId("job-title").textContent = actionId;
  byId("job-missing").hidden = true;
  byId("job-body").hidden = false;
  byId("cancel").hidden = true;
  for (const id of ["unknown-section", "stop-section", "output-section", "effects-section", "log-section"]) {
    byId(id).hidden = true;
  }
  for (const id of ["facts", "stop", "output"]) byId(id).replaceChildren();
  byId("job").hidden = false;
  byId("job-title").focus();
  job.timeline = new Timeline(actionId, { onEnd: () => refreshJob().catch(() => {}) });
}

/** Close the job that is open, if one is. */
export function closeJob() {
  open?.timeline?.stop();
  open = null;
  byId("job").hidden = true;
}

/** Ask for the record that is open, unless it can change no more, and show it. Throws as ask does. */
export async function refreshJob({ again = false } = {}) {
  const job = open;
  if (job === null || job.gone || (job.ended && !again)) return;
  try {
    const view = await ask(jobPath(job.actionId));
    if (open === job) await show(job, view);
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 404 || open !== job) throw error;
    job.gone = true;
    job.timeline.stop();
    byId("job-body").hidden = true;
    byId("cancel").hidden = true;
    say(byId("job-missing"), `There is no such job here, or it was archived: ${error.message}`);
  }
}

async function show(job, view) {
  const before = job.view;
  job.view = view;
  job.ended = view.phase === "done";
  if (before && before.status !== view.status) announce(`${view.action_id} is ${view.status}`);
  fill(byId("facts"), factsOf(view));
  showCancel(!job.ended);
  byId("stop-section").hidden = view.stop === null;
  if (view.stop) fill(byId("stop"), [evidenceOf(view.stop)]);
  if (job.ended && view.output !== null && job.output === "") showOutput(job, view.output);
  await refreshEffects(job, view.effects);
  if (job.ended !== (before?.phase === "done") || !before) await readLog(job);
}

function showCancel(possible) {
  const button = byId("cancel");
  if (!possible && document.activeElement === button) byId("job-title").focus();
  button.hidden = !possible;
}

function factsOf(view) {
  const worker = view.worker;
  const took = view.ended_at !== null && view.started_at !== null ? view.ended_at - view.started_at : null;
  return [
    fact("Status", ...statusOf(view)),
    fact("Crew", view.crew_id),
    fact("Operation", view.operation),
    fact("Age", span(since(view.admitted_at))),
    fact("Admitted", when(view.admitted_at)),
    fact("Started", view.started_at === null ? (view.phase === "done" ? "never" : "not yet") : when(view.started_at)),
    fact("Ended", when(view.ended_at)),
    took === null ? null : fact("Ran for", took < 10 ? `${took.toFixed(2)} s` : span(took)),
    fact("Timeout", view.timeout_ms === null ? null : `${view.timeout_ms / 1000} s`),
    worker ? fact("Worker", `pid ${worker.pid}${worker.memory_bytes ? `, ${bytes(worker.memory_bytes)}` : ""}`) : null,
    longFact("Outcome", outcomeOf(view)),
  ];
}

function outcomeOf(view) {
  if (view.uncertain_outcome === null) return null;
  return view.uncertain_outcome
    ? el("span", {}, el("span", { class: "badge doubt" }, "uncertain"),
      " Work was dispatched, and not all of its effects are known.")
    : "certain";
}

async function refreshEffects(job, counts) {
  const now = JSON.stringify(counts);
  if (job.effects === now) return;
  const page = await ask(jobPath(job.actionId, `/effects?${QUERY}`));
  if (open !== job) return;
  const unknown = page.effects.filter((effect) => effect.state === "unknown");
  const others = page.effects.filter((effect) => effect.state !== "unknown");
  byId("unknown-section").hidden = counts.unknown === 0;
  byId("effects-section").hidden = others.length === 0;
  showEffects(byId("unknown-effects"), byId("unknown-rest"), { effects: unknown, next_cursor: null });
  if (unknown.length < counts.unknown) {
    say(byId("unknown-rest"), `${counts.unknown - unknown.length} more are under “Unknown effects” on top.`);
  }
  showEffects(byId("effects"), byId("effects-rest"), { effects: others, next_cursor: page.next_cursor });
  job.effects = now;
}

function showOutput(job, output) {
  job.output = JSON.stringify(output, null, 2);
  const raw = typeof output.raw === "string" && output.raw ? output.raw : null;
  const parts = raw === null ? [whole(job.output, "Output")] : [
    whole(raw, "Text of the output"),
    el("details", {}, el("summary", {}, `All of it as JSON (${bytes(job.output.length)})`), whole(job.output, "Output as JSON")),
  ];
  byId("output").replaceChildren(...parts);
  byId("output-section").hidden = false;
}

/** Text in full if it is short, else its beginning and a button. */
function whole(text, label) {
  const shown = el("pre", { tabindex: "0", role: "region", "aria-label": label }, text.slice(0, OUTPUT_CHARS));
  if (text.length <= OUTPUT_CHARS) return shown;
  const button = el("button", { type: "button", class: "quiet", onclick: () => {
    shown.textContent = text;
    shown.focus();
    button.remove();
  } }, `Show all ${count(text.length, "character")}`);
  return el("div", {}, shown, button);
}

/** Show the captured output, where the supervisor has a route for it. */
async function readLog(job) {
  hasLogRoute ??= ask("/openapi.json").then((document) => Object.keys(document.paths).some((path) => LOG_ROUTE.test(path)));
  try {
    if (!await hasLogRoute) return;
    const response = await send(jobPath(job.actionId, `/log?tail=${LOG_TAIL}`), { headers: { Accept: "text/plain" } });
    const text = await response.text();
    if (open !== job) return;
    byId("log").textContent = text || "(nothing was written)";
    byId("log-section").hidden = false;
  } catch (error) {
    // 404: no such route or no log; anything else comes back with the next look.
    if (error instanceof Refused && error.status === 404) byId("log-section").hidden = true;
    else hasLogRoute = null;
  }
}
