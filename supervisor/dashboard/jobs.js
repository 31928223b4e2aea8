// The list of jobs: one row for each, kept while it is there, so that focus and selection stay where they are.

import { ask } from "./api.js";
import { byId, el, fill, say } from "./element.js";
import { count, since, span, when } from "./format.js";

const STEP = 50;
const MOST = 500;

let limit = STEP;
let known = { crews: "", operations: "" };
const rows = new Map();

/** Let the filters and the button ask for another list by `again`. */
export function setUpJobs(again) {
  const anew = () => { limit = STEP; again(); };
  for (const id of ["filter-status", "filter-crew", "filter-operation"]) byId(id).addEventListener("change", anew);
  byId("filter-id").addEventListener("input", again);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("more").addEventListener("click", () => {
    limit = Math.min(MOST, limit + STEP);
    again();
  });
}

/** Offer the crews and operations that there are. */
export function offerFilters(health) {
  const control = new Set(["cancel", "status", "events"]);
  offer("filter-crew", "crews", health.crews);
  offer("filter-operation", "operations", health.operations.filter((name) => !control.has(name)));
}

function offer(id, kind, names) {
  const now = names.join("\n");
  if (known[kind] === now) return;
  known = { ...known, [kind]: now };
  const select = byId(id);
  const chosen = select.value;
  select.replaceChildren(el("option", { value: "" }, "any"), ...names.map((name) => el("option", { value: name }, name)));
  select.value = names.includes(chosen) ? chosen : "";
}

/** Ask for the list and show it. `chosen`: the Action that is open. Throws as ask does. */
export async function refreshJobs(chosen) {
  const query = new URLSearchParams({ limit: String(limit) });
  for (const [name, id] of [["status", "filter-status"], ["crew_id", "filter-crew"], ["operation", "filter-operation"]]) {
    if (byId(id).value) query.set(name, byId(id).value);
  }
  const page = await ask(`/jobs?${query}`);
  const part = byId("filter-id").value.trim();
  const jobs = page.jobs.filter((job) => job.action_id.includes(part));
  show(jobs, chosen);
  const whole = page.next_cursor === null;
  say(byId("empty"), jobs.length ? "" : emptiness(whole, query.size > 1 || part));
  const reached = !whole && limit >= MOST ? "; filter for others, or ask the API for more" : "";
  const among = part ? ` of the newest ${page.jobs.length}` : "";
  byId("shown").textContent = jobs.length ? `${count(jobs.length, "job")}${among}, newest first${reached}` : "";
  byId("more").hidden = whole || limit >= MOST;
}

function emptiness(whole, filtered) {
  if (!filtered) return "No jobs yet. They appear here when they are started.";
  return whole ? "No job matches the filters." : "None of the newest jobs matches; show more, or narrow the filters.";
}

function show(jobs, chosen) {
  const body = byId("rows");
  const wanted = jobs.map((job) => {
    const row = rows.get(job.action_id) ?? newRow(job);
    update(row, job, job.action_id === chosen);
    return row;
  });
  const there = new Set(wanted);
  for (const [actionId, row] of rows) {
    if (!there.has(row)) {
      row.remove();
      rows.delete(actionId);
    }
  }
  wanted.forEach((row, at) => {
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

function newRow(job) {
  const cell = (name, ...children) => el("td", { role: "cell", class: name }, ...children);
  const link = el("a", { href: `#/jobs/${encodeURIComponent(job.action_id)}` }, job.action_id);
  const row = el("tr", { role: "row" },
    el("th", { role: "rowheader", scope: "row", class: "id" }, link), cell("status"), cell("crew", job.crew_id),
    cell("operation", job.operation), cell("age"), cell("notes"));
  row.addEventListener("click", (event) => {
    if (event.target.closest("a") === null && !String(getSelection())) link.click();
  });
  rows.set(job.action_id, row);
  return row;
}

function update(row, job, chosen) {
  const [, status, , , age, notes] = row.children;
  fill(status, statusOf(job));
  const text = span(since(job.admitted_at));
  if (age.textContent !== text) age.textContent = text;
  age.title = when(job.admitted_at);
  fill(notes, notesOf(job));
  row.classList.toggle("chosen", chosen);
  if (chosen) row.firstChild.firstChild.setAttribute("aria-current", "true");
  else row.firstChild.firstChild.removeAttribute("aria-current");
}

/** Status and, where it says more, phase. */
export function statusOf(job) {
  const badge = el("span", { class: `badge ${job.status}` }, job.status);
  const more = job.phase !== "done" && job.phase !== job.status;
  return more ? [badge, el("span", { class: "phase" }, ` ${job.phase}`)] : [badge];
}

function notesOf(job) {
  const unproved = job.stop !== null && !job.stop.confirmed;
  return [
    job.effects.unknown ? el("span", { class: "badge bad" }, count(job.effects.unknown, "unknown effect")) : null,
    unproved ? el("span", { class: "badge bad" }, "stop not proved") : null,
    job.uncertain_outcome ? el("span", { class: "badge doubt" }, "uncertain") : null,
  ].filter((note) => note !== null).flatMap((note, at) => at ? [document.createTextNode(" "), note] : [note]);
}
