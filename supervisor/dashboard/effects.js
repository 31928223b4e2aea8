// Effects of tools, the unknown ones in front, and the dialog that records what became of one.

import { Refused, send } from "./api.js";
import { announce, byId, closers, el, fact, fill, longFact, openDialog, say } from "./element.js";
import { count, when, words } from "./format.js";

const PAGE = 100;
const LOSSES = {
  worker_died: "the worker died during the call",
  worker_ended: "the worker ended without a word about the call",
  cancelled: "the job was cancelled during the call",
  timeout: "the job timed out during the call",
  shutdown: "the supervisor was shut down during the call",
  journal_unavailable: "the journal could not be written",
};

/** Query of a list of effects. */
export const QUERY = `limit=${PAGE}`;

/** Show a list in one element. `rest`: where to say that there are more. `withJob`: name the job of each, "link" it. */
export function showEffects(list, rest, page, { withJob = "" } = {}) {
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  fill(list, page.effects.map((effect) => itemOf(effect, withJob)));
  // Listeners are no part of what is compared above, so there is one for all buttons.
  list.onclick = (event) => {
    const button = event.target.closest("button[data-key]");
    if (button) openReconcile(button.dataset.key);
  };
  if (focused) list.querySelector(`button[data-key="${focused}"]`)?.focus();
  say(rest, page.next_cursor === null ? "" : `The newest ${count(page.effects.length, "effect")}; the API has the others.`);
}

function itemOf(effect, withJob) {
  const open = effect.state === "unknown";
  return el("li", { class: open ? "effect open" : "effect" },
    el("p", { class: "head" },
      el("span", { class: `badge ${open || effect.state === "abandoned" ? "bad" : effect.state}` }, words(effect.state)),
      " ", el("b", {}, effect.tool), " ", el("code", { class: "identity" }, identityOf(effect)),
      open ? el("button", { type: "button", class: "primary", "data-key": effect.key_id },
        "Reconcile…", el("span", { class: "unseen" }, ` ${effect.tool} ${identityOf(effect)}`)) : null),
    factsOf(effect, withJob));
}

function identityOf(effect) {
  const [kind, first, , ordinal] = effect.identity;
  if (kind === "call") return `call ${ordinal + 1} of its kind in task ${first + 1}`;
  return typeof first === "string" ? first : JSON.stringify(first);
}

function factsOf(effect, withJob) {
  const decided = effect.reconciliation;
  return el("dl", { class: "facts" },
    withJob ? fact("Job", withJob === "link" ? jobLink(effect.action_id) : effect.action_id) : null,
    effect.reason ? fact("Why unknown", LOSSES[effect.reason] || words(effect.reason)) : null,
    fact("Claimed", when(effect.claimed_at)),
    effect.attempt > 1 ? fact("Attempt", effect.attempt) : null,
    fact("Settled", when(effect.settled_at)),
    effect.receipt_stored ? longFact("Receipt", el("code", {}, cut(JSON.stringify(effect.receipt)))) : null,
    effect.replays ? fact("Replayed", count(effect.replays, "time")) : null,
    decided ? longFact("Reconciled", `${words(decided.decision)} by ${decided.actor}: ${decided.evidence}`) : null,
    fact("Scope", effect.scope_id ? `${effect.scope} ${effect.scope_id}` : effect.scope),
    longFact("Key id", el("code", {}, effect.key_id)));
}

function jobLink(actionId) {
  return el("a", { href: `#/jobs/${encodeURIComponent(actionId)}` }, actionId);
}

function cut(text) {
  return text.length > 500 ? `${text.slice(0, 500)}…` : text;
}

let keyId = "";
let tag = "";
let onReconciled = () => {};

/** Prepare the dialog; `reconciled` is called once a decision is recorded. */
export function setUpReconcile(reconciled) {
  onReconciled = reconciled;
  closers(byId("reconcile-dialog"));
  const form = byId("reconcile-form");
  form.addEventListener("change", () => { byId("receipt-part").hidden = form.decision.value !== "settled"; });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit(form);
  });
}

async function openReconcile(key) {
  const form = byId("reconcile-form");
  const actor = form.actor.value;
  form.reset();
  form.actor.value = actor;
  byId("receipt-part").hidden = true;
  say(byId("reconcile-error"), "");
  keyId = key;
  openDialog(byId("reconcile-dialog"), byId("reconcile-title"));
  try {
    await look();
  } catch (error) {
    say(byId("reconcile-error"), error.message);
  }
}

/** Show the effect as it is now; its entity tag says in the decision which version was looked at. */
async function look() {
  byId("reconcile-effect").replaceChildren();
  tag = "";
  const asked = keyId;
  const response = await send(`/effects/${asked}`);
  const effect = await response.json();
  if (asked !== keyId) return;
  tag = response.headers.get("ETag");
  byId("reconcile-effect").replaceChildren(
    el("p", { class: "head" }, el("span", { class: "badge bad" }, words(effect.state)), " ", el("b", {}, effect.tool),
      " ", el("code", { class: "identity" }, identityOf(effect))),
    factsOf(effect, "text"));
}

function problemOf(form) {
  if (!form.decision.value) return ["Choose a decision.", form.decision[0]];
  if (form.decision.value === "settled" && !isJson(form.receipt.value)) {
    return ["The receipt is not JSON. Text goes in double quotes; null says that there is none.", form.receipt];
  }
  if (!form.actor.value.trim()) return ["Say who decides.", form.actor];
  return form.evidence.value.trim() ? null : ["Say how it was found out.", form.evidence];
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

async function submit(form) {
  const problem = problemOf(form);
  say(byId("reconcile-error"), problem ? problem[0] : "");
  if (problem) {
    problem[1].focus();
    return;
  }
  const decision = form.decision.value;
  let body = JSON.stringify({ actor: form.actor.value.trim(), decision, evidence: form.evidence.value.trim() });
  // As it was typed: parsed and written anew, a long number would be another one.
  if (decision === "settled") body = `${body.slice(0, -1)},"receipt":${form.receipt.value}}`;
  try {
    await send(`/effects/${keyId}/reconcile`, { method: "POST", headers: { "If-Match": tag }, body });
  } catch (error) {
    await refuse(error);
    return;
  }
  await onReconciled();
  byId("reconcile-dialog").close();
  announce(`Recorded: ${words(decision)}`);
}

async function refuse(error) {
  const changed = error instanceof Refused && error.status === 412;
  say(byId("reconcile-error"), changed
    ? "Nothing was recorded: the effect has changed since it was looked at. Below is what it is now; decide again."
    : `Nothing was recorded: ${error.message}`);
  if (changed) await look().catch(() => {});
}
