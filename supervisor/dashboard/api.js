// Asks the API. The token is kept here, in memory, and in sessionStorage only if its owner wants that.

const KEPT = "crew-supervisor-token";

let token = null;
let aheadMs = 0;
let onRefusedToken = () => {};

/** An answer that is an error: its status and the problem document's code and detail. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `the supervisor answered ${status}`);
    this.status = status;
    this.code = problem.code || "";
  }
}

/** What to do once when a token that was good is refused. */
export function whenRefused(act) {
  onRefusedToken = act;
}

/** The token of an earlier visit of this tab, null without one. */
export function keptToken() {
  return sessionStorage.getItem(KEPT);
}

/** Use this token from now on. */
export function setToken(text, { keep = false } = {}) {
  token = text;
  if (keep) sessionStorage.setItem(KEPT, text);
}

/** Forget the token everywhere. */
export function forgetToken() {
  token = null;
  sessionStorage.removeItem(KEPT);
}

/** Milliseconds that the supervisor's clock is ahead of ours, to the second. */
export function clockAheadMs() {
  return aheadMs;
}

/** The path of a job, with what follows it. */
export function jobPath(actionId, rest = "") {
  return `/jobs/${encodeURIComponent(actionId)}${rest}`;
}

/** Send a request and return the response, its body unread. Throws Refused, or TypeError without a connection. */
export async function send(path, { method = "GET", headers = {}, body, signal } = {}) {
  const sent = { ...headers };
  const used = token;
  // A header is bytes; fetch takes them as the characters of the same numbers.
  if (used) sent.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(used))}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method, headers: sent, body, signal, cache: "no-store", credentials: "omit", redirect: "error",
  });
  noteClock(response);
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  if (response.status === 401 && used === token) onRefusedToken();
  throw new Refused(response.status, problem);
}

/** Send a request and return its JSON. Throws as send does. */
export async function ask(path, options) {
  return (await send(path, options)).json();
}

function noteClock(response) {
  const date = Date.parse(response.headers.get("Date") || "");
  // The header has whole seconds: half of one is the best guess of the rest.
  if (date) aheadMs = date + 500 - Date.now();
  if (Math.abs(aheadMs) < 2000) aheadMs = 0;
}

/**
 * Yield a job's events after the sequence `last` (-1: from the first on), in batches as they arrive, until the server
 * ends the stream. EventSource would not do: it cannot send a token.
 */
export async function* follow(actionId, last, signal) {
  const headers = { Accept: "text/event-stream" };
  if (last >= 0) headers["Last-Event-ID"] = String(last);
  const response = await send(jobPath(actionId, "/events"), { headers, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      const events = frames.map(parse).filter((event) => event !== null);
      if (events.length) yield events;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The event of a frame of server-sent events, null for a comment. */
function parse(frame) {
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
  }
  return data.length ? JSON.parse(data.join("\n")) : null;
}
