// Sign-in, which view is shown, and the two clocks that ask again.

import { Refused, ask, forgetToken, keptToken, setToken, whenRefused } from "./api.js";
import { QUERY, setUpReconcile, showEffects } from "./effects.js";
import { announce, byId, say } from "./element.js";
import { showHealth } from "./health.js";
import { closeJob, openAction, openJob, refreshJob, setUpJob } from "./job.js";
import { offerFilters, refreshJobs, setUpJobs } from "./jobs.js";
import { refreshReplicas, setUpReplicas } from "./replicas.js";
import { setUpCancel } from "./stop.js";

const EVERY_MS = 2000;
const EVERY_FAILING_MS = 5000;

let signedIn = false;
let timer = 0;
let asking = false;
let askAgain = false;

// --- sign-in ----------------------------------------------------------------------------------------------------------

async function signIn(token, keep) {
  setToken(token, { keep });
  const button = byId("sign-in-form").querySelector("button");
  button.disabled = true;
  try {
    const health = await ask("/health");
    signedIn = true;
    byId("token").value = "";
    byId("sign-in").hidden = true;
    for (const id of ["views", "health", "sign-out"]) byId(id).hidden = false;
    showHealth(health);
    offerFilters(health);
    announce("Signed in");
    route();
  } catch (error) {
    signOut(error instanceof Refused && error.status === 401 ? wrongToken(token) : `Not signed in: ${reason(error)}`);
  } finally {
    button.disabled = false;
  }
}

function wrongToken(token) {
  return token ? "The supervisor does not accept this token. Check it, and type it again."
    : "This supervisor needs a token.";
}

function reason(error) {
  return error instanceof Refused ? error.message : "the supervisor cannot be reached";
}

/** Forget the token and everything that was shown, and ask for another. */
function signOut(message = "") {
  signedIn = false;
  clearTimeout(timer);
  forgetToken();
  closeJob();
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  for (const id of ["views", "health", "sign-out", "reasons", "trouble"]) byId(id).hidden = true;
  const shown = ["rows", "events", "log", "output", "facts", "stop", "all-unknown-effects", "replica-rows"];
  for (const id of shown) byId(id).replaceChildren();
  byId("sign-in").hidden = false;
  say(byId("sign-in-error"), message);
  byId("token").focus();
  byId("token").select();
}

// --- views ------------------------------------------------------------------------------------------------------------

/** Views of their own, by the word of the address, with their elements. */
const OTHERS = { "unknown-effects": "all-unknown", replicas: "replicas" };

/** Show what the address names: "#/jobs/ID", one of the others, or the list. */
function route() {
  if (!signedIn) return;
  const [, view, rest] = /^#\/([^/]*)\/?(.*)$/.exec(location.hash) ?? [];
  const actionId = view === "jobs" ? decoded(rest) : "";
  const other = OTHERS[view];
  const before = openAction();
  byId("views").dataset.view = actionId ? "job" : other ?? "jobs";
  byId("jobs").hidden = other !== undefined;
  for (const id of Object.values(OTHERS)) byId(id).hidden = id !== other;
  if (actionId !== before) {
    if (actionId) openJob(actionId);
    else closeJob();
  }
  if (!actionId && (before || other)) byId(`${other ?? "jobs"}-title`).focus();
  document.title = actionId ? `${actionId} – crew-supervisor` : "crew-supervisor";
  refresh();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

async function refreshUnknown() {
  const page = await ask(`/effects?state=unknown&${QUERY}`);
  showEffects(byId("all-unknown-effects"), byId("all-unknown-rest"), page, { withJob: "link" });
  if (page.effects.length === 0) say(byId("all-unknown-rest"), "There are none.");
}

// --- the clock --------------------------------------------------------------------------------------------------------

/** Ask for everything that is shown, now, and then again and again; never twice at once. */
async function refresh() {
  clearTimeout(timer);
  askAgain = asking;
  if (asking || !signedIn) return;
  asking = true;
  let next = EVERY_MS;
  try {
    const health = await ask("/health");
    if (!signedIn) return;
    showHealth(health);
    offerFilters(health);
    const view = byId("views").dataset.view;
    const others = { "all-unknown": refreshUnknown, replicas: refreshReplicas };
    await Promise.all([others[view] ? others[view]() : refreshJobs(openAction()), refreshJob()]);
    say(byId("trouble"), "");
  } catch (error) {
    if (signedIn) say(byId("trouble"), `What is shown may be old: ${reason(error)}. Trying again.`);
    next = EVERY_FAILING_MS;
  } finally {
    asking = false;
    if (signedIn) timer = setTimeout(tick, askAgain ? 0 : next);
  }
}

function tick() {
  // A page that nobody sees asks nothing; it is brought up to date when it is seen again.
  if (!document.hidden) refresh();
}

// --- start ------------------------------------------------------------------------------------------------------------

setUpJob();
setUpJobs(refresh);
setUpReplicas();
setUpCancel(async () => {
  await refreshJob({ again: true }).catch(() => {});
  refresh();
});
setUpReconcile(async () => {
  await refreshJob({ again: true }).catch(() => {});
  refresh();
});
whenRefused(() => {
  if (signedIn) signOut("The supervisor does not accept the token any more. Sign in again.");
});
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn(byId("token").value.trim(), byId("keep").checked);
});
byId("sign-out").addEventListener("click", () => signOut());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => { if (!document.hidden && signedIn) refresh(); });

const kept = keptToken();
if (kept === null) signOut();
else signIn(kept, true);
