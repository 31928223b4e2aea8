// A job's events as they come. However many there are, the page has a window of them: at most MOST_ROWS rows.

import { Refused, follow } from "./api.js";
import { byId, el } from "./element.js";
import { count } from "./format.js";

const TERMINAL = new Set(["completed", "failed", "cancelled"]);
/** Rows shown while the newest are followed, and how many "show earlier" adds. */
const WINDOW = 200;
const MOST_ROWS = 600;
/** Events kept in memory, and characters of each. */
const MOST_EVENTS = 20000;
const MOST_CHARS = 2000;
/** Longer texts are folded, and longer documents. */
const TEXT_CHARS = 240;
const DATA_CHARS = 120;
const RENDER_MS = 100;
/** Work on events before the page gets a turn, milliseconds. */
const TURN_MS = 12;
const RETRY_MS = [500, 1000, 2000, 5000, 10000];
/** Distance from the bottom that still counts as being there, pixels. */
const NEAR_PX = 24;

/** Follows one job; `onEnd` is called when its terminal event is here, `onOpen` whenever a connection works. */
export class Timeline {
  #abort = new AbortController();
  #events = [];
  #dropped = 0;
  #from = 0;
  #to = 0;
  #following = true;
  #timer = 0;
  #state = "connecting";
  #rows = byId("events");
  #box = byId("timeline");

  constructor(actionId, { onEnd }) {
    const { signal } = this.#abort;
    this.#rows.replaceChildren();
    byId("earlier").addEventListener("click", () => this.#showEarlier(), { signal });
    byId("newest").addEventListener("click", () => this.#showNewest(), { signal });
    this.#box.addEventListener("scroll", () => this.#scrolled(), { signal, passive: true });
    this.#describe();
    this.#run(actionId, onEnd);
  }

  /** Close the stream and let go of the page. */
  stop() {
    this.#abort.abort();
    clearTimeout(this.#timer);
  }

  async #run(actionId, onEnd) {
    const { signal } = this.#abort;
    let failures = 0;
    while (!signal.aborted) {
      try {
        for await (const events of follow(actionId, this.#last(), signal)) {
          failures = 0;
          this.#state = "live";
          await this.#take(events);
        }
        if (TERMINAL.has(this.#events.at(-1)?.name)) {
          this.#state = "ended";
          this.#render();
          onEnd();
          return;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && error.status < 500) {
          this.#state = `stopped: ${error.message}`;
          this.#render();
          return;
        }
      }
      this.#state = "the connection broke; it goes on behind the last event";
      this.#render();
      await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
      failures += 1;
    }
  }

  #last() {
    return this.#events.at(-1)?.sequence ?? -1;
  }

  async #take(events) {
    let turn = performance.now();
    for (const event of events) {
      this.#events.push(keep(event));
      if (performance.now() - turn > TURN_MS) {
        this.#schedule();
        await pause(0);
        if (this.#abort.signal.aborted) return;
        turn = performance.now();
      }
    }
    this.#schedule();
  }

  #schedule() {
    this.#timer ||= setTimeout(() => this.#render(), RENDER_MS);
  }

  #render() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (this.#abort.signal.aborted) return;
    this.#forget();
    if (this.#following) this.#show(Math.max(this.#from, this.#events.length - WINDOW), this.#events.length);
    this.#describe();
  }

  /** Let go of the oldest events where there are too many. */
  #forget() {
    const many = this.#events.length - MOST_EVENTS;
    if (many <= 0) return;
    this.#events.splice(0, many);
    this.#dropped += many;
    const gone = Math.max(0, many - this.#from);
    for (let row = 0; row < gone; row += 1) this.#rows.firstChild?.remove();
    this.#from = Math.max(0, this.#from - many);
    this.#to = Math.max(0, this.#to - many);
  }

  /** Make the rows those of the events from one index to before another. */
  #show(from, to) {
    if (from >= this.#to || to <= this.#from) {
      this.#rows.replaceChildren();
      this.#from = this.#to = from;
    }
    while (this.#from < from) { this.#rows.firstChild.remove(); this.#from += 1; }
    while (this.#to > to) { this.#rows.lastChild.remove(); this.#to -= 1; }
    const before = this.#events.slice(from, this.#from).map(rowOf);
    const behind = this.#events.slice(this.#to, to).map(rowOf);
    this.#rows.prepend(...before);
    this.#rows.append(...behind);
    this.#from = from;
    this.#to = to;
    if (this.#following) this.#box.scrollTop = this.#box.scrollHeight;
  }

  #showEarlier() {
    const height = this.#box.scrollHeight;
    const was = this.#box.scrollTop;
    this.#following = false;
    const from = Math.max(0, this.#from - WINDOW);
    this.#show(from, Math.min(this.#to, from + MOST_ROWS));
    // What was in sight stays there.
    this.#box.scrollTop = was + this.#box.scrollHeight - height;
    this.#describe();
    if (byId("earlier").hidden) this.#box.focus();
  }

  #showNewest() {
    this.#following = true;
    this.#show(Math.max(0, this.#events.length - WINDOW), this.#events.length);
    this.#describe();
    this.#box.focus();
  }

  #scrolled() {
    const below = this.#box.scrollHeight - this.#box.clientHeight - this.#box.scrollTop;
    // Our own scroll to the end is told late: events that came meanwhile and are not drawn yet end no following.
    const following = below <= NEAR_PX && (this.#following || this.#to === this.#events.length);
    if (following === this.#following) return;
    this.#following = following;
    this.#describe();
  }

  #describe() {
    const all = this.#dropped + this.#events.length;
    const shown = this.#rows.childElementCount;
    const part = shown < all ? `, ${shown.toLocaleString("en")} of them shown` : "";
    byId("timeline-state").textContent = `${count(all, "event")}${part} · ${this.#state}`;
    const earlier = byId("earlier");
    earlier.hidden = this.#from === 0;
    earlier.textContent = `Show ${Math.min(WINDOW, this.#from)} earlier`;
    const newest = byId("newest");
    newest.hidden = this.#following;
    newest.textContent = this.#to < this.#events.length
      ? `${(this.#events.length - this.#to).toLocaleString("en")} newer: go to the newest` : "Go to the newest";
    if (this.#dropped) byId("timeline-state").textContent += ` · the first ${this.#dropped.toLocaleString("en")} left this page`;
  }
}

/** What the page keeps of an event: its data as text, cut where it is long. */
function keep({ event, sequence, data }) {
  const plain = typeof data.content === "string" && data.content !== "";
  const text = plain ? data.content : JSON.stringify(data);
  return {
    name: event, sequence, channel: data.channel ?? data.chunk_type ?? "", plain,
    text: text.slice(0, MOST_CHARS), length: text.length,
  };
}

function rowOf(event) {
  const name = event.name === "chunk" ? event.channel || "chunk" : event.name;
  const line = event.plain ? TEXT_CHARS : DATA_CHARS;
  const folded = event.text.length > line;
  const rest = event.length - event.text.length;
  const more = rest ? el("p", { class: "hint" }, `${count(rest, "more character")}; the API has all of it.`) : null;
  const text = folded
    ? el("details", {}, el("summary", { class: event.plain ? null : "data" }, `${event.text.slice(0, line)}…`), el("pre", {}, event.text), more)
    : el("span", { class: event.plain ? "text" : "text data" }, event.text);
  return el("li", { class: `event ${TERMINAL.has(event.name) ? event.name : ""}` },
    el("span", { class: "sequence" }, event.sequence), el("span", { class: "name" }, name), text);
}

function pause(ms) {
  return new Promise((resolve) => { setTimeout(resolve, ms); });
}
