// How times, sizes and words are written.

import { clockAheadMs } from "./api.js";

const WHEN = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  hourCycle: "h23",
});

/** Unix seconds as date and time of here. */
export function when(seconds) {
  return seconds === null || seconds === undefined ? null : WHEN.format(new Date(seconds * 1000));
}

/** Seconds since then by the supervisor's clock. */
export function since(seconds) {
  return Math.max(0, (Date.now() + clockAheadMs()) / 1000 - seconds);
}

/** Seconds in the largest unit that says enough: "4 s", "3 min", "2 h", "5 d". */
export function span(seconds) {
  if (seconds < 100) return `${Math.floor(seconds)} s`;
  if (seconds < 6000) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** Milliseconds: "0.8 ms", "15 ms", "2.4 s". */
export function milliseconds(ms) {
  if (ms === null || ms === undefined) return null;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** Bytes: "512 B", "14 KiB", "3.2 MiB". */
export function bytes(count) {
  if (count < 1024) return `${count} B`;
  const mebi = count / 1048576;
  return mebi < 1 ? `${Math.round(count / 1024)} KiB` : `${mebi.toFixed(1)} MiB`;
}

/** "1 event", "2 events". */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** A word of the wire for people: "not_applied" is "not applied". */
export function words(text) {
  return String(text).replaceAll("_", " ");
}
