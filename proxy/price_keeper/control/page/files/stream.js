// Server-sent events over fetch: unlike EventSource it can send a header, and tells why it was refused.

import { HEADERS, Refused } from "./ask.js";

const SILENT_MS = 40_000; // a heartbeat comes every quarter of a minute
const FIRST_WAIT_MS = 1_000;
const MOST_WAIT_MS = 30_000;

// Takes text as it comes, in pieces of any size, and hands on each whole event.
export function reader(onEvent) {
  let rest = "";
  let event = { name: "message", data: [] };
  return (text) => {
    const lines = (rest + text).split(/\r\n|\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data.length) onEvent(event.name, event.data.join("\n"));
        event = { name: "message", data: [] };
        continue;
      }
      const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
      if (field === "data") event.data.push(value);
      if (field === "event") event.name = value;
    }
  };
}

export const waitAfter = (failures, chance) =>
  Math.min(MOST_WAIT_MS, FIRST_WAIT_MS * 2 ** Math.min(failures, 10)) * (0.5 + chance / 2);

// Goes on until it is stopped, or refused in a way that asking again does not mend.
// Hidden pages let go of their connection: a browser has few of them for one host.
export function follow(url, { onData, onState, onRefused, poll }) {
  let failures = 0;
  let current = null;
  let timer = null;
  let generation = 0; // of turns: one that was stopped does nothing more

  async function once() {
    const cancel = (current = new AbortController());
    let watch = null;
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => cancel.abort(), SILENT_MS);
    };
    try {
      heard();
      const answer = await fetch(url, { headers: { ...HEADERS, Accept: "text/event-stream" }, signal: cancel.signal, cache: "no-store" });
      if (!answer.ok) {
        const told = await answer.json().catch(() => null);
        throw new Refused(answer.status, told, Number(answer.headers.get("Retry-After")) || 0);
      }
      const feed = reader((name, data) => {
        if (name === "message") onData(JSON.parse(data));
      });
      const text = new TextDecoder();
      const body = answer.body.getReader();
      onState("live");
      for (;;) {
        const { done, value } = await body.read();
        if (done) return;
        failures = 0;
        heard();
        feed(text.decode(value, { stream: true }));
      }
    } finally {
      clearTimeout(watch);
    }
  }

  async function turn() {
    const own = ++generation;
    const isOver = () => own !== generation;
    let wait = 0;
    try {
      await once();
    } catch (failure) {
      if (isOver()) return;
      if (failure instanceof Refused) {
        if (failure.status !== 503 && failure.status !== 429) return onRefused(failure);
        wait = failure.wait * 1000;
        if (failure.status === 503 && (await polled()) && !isOver()) return again(wait || MOST_WAIT_MS);
      }
    }
    if (isOver()) return;
    onState("away");
    again(Math.max(wait, waitAfter(failures++, Math.random())));
  }

  // Where no more pages are kept up to date, this one asks now and then.
  async function polled() {
    try {
      await poll();
      onState("asking");
      return true;
    } catch {
      return false;
    }
  }

  function again(wait) {
    timer = setTimeout(turn, wait);
  }

  function stop() {
    generation++;
    clearTimeout(timer);
    current?.abort();
  }

  function seen() {
    stop();
    if (document.hidden) onState("paused");
    else turn();
  }

  document.addEventListener("visibilitychange", seen);
  turn();
  return () => {
    document.removeEventListener("visibilitychange", seen);
    stop();
  };
}
