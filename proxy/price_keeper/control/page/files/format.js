// How money, shares and times are written. Nothing here touches the page.

const MICROS = 1_000_000;
const DIGITS = 6;

// Micro-dollars, as a number or an exact decimal in a string.
export function usd(micros) {
  const dollars = Number(micros) / MICROS;
  if (dollars === 0) return "$0.00";
  if (dollars < 0.0001) return "<$0.0001";
  const digits = dollars < 1 ? 4 : 2;
  return "$" + dollars.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// What somebody typed, as whole micro-dollars; null where it is no amount.
export function toMicros(text) {
  const found = /^\$?(\d{1,9})(?:\.(\d{0,6}))?$/.exec(text.trim().replaceAll(",", ""));
  return found === null ? null : Number(found[1]) * MICROS + Number((found[2] ?? "").padEnd(DIGITS, "0"));
}

export function toDollars(micros) {
  const [whole, part] = [Math.floor(micros / MICROS), micros % MICROS];
  const digits = String(part).padStart(DIGITS, "0").replace(/0+$/, "").padEnd(2, "0");
  return `${whole}.${digits}`;
}

export function percent(value) {
  return `${value.toLocaleString("en-US")} %`;
}

// Both times are in epoch seconds; the day is told where it is not that of `now`.
export function clock(at, now, zone) {
  const day = (when) => new Date(when * 1000).toLocaleDateString("en-GB", { timeZone: zone });
  const time = new Date(at * 1000).toLocaleTimeString("en-GB", { timeZone: zone, hour: "2-digit", minute: "2-digit" });
  if (day(at) === day(now)) return time;
  const date = new Date(at * 1000).toLocaleDateString("en-GB", { timeZone: zone, day: "numeric", month: "short" });
  return `${date}, ${time}`;
}

export function lasting(seconds) {
  const minutes = Math.round(seconds / 60);
  if (minutes < 1) return "less than a minute";
  if (minutes < 60) return minutes === 1 ? "a minute" : `${minutes} minutes`;
  const [hours, rest] = [Math.floor(minutes / 60), minutes % 60];
  if (hours >= 48) return `${Math.round(hours / 24)} days`;
  return rest ? `${hours} h ${rest} min` : `${hours} h`;
}

export const epoch = (iso) => Date.parse(iso) / 1000;

export function reachedTold(reached, now, zone) {
  switch (reached?.state) {
    case "reached":
      return reached.at === null ? "spent, before anything is known here" : `spent at ${clock(epoch(reached.at), now, zone)}`;
    case "expected":
      return `at ${clock(epoch(reached.at), now, zone)}, in ${lasting(epoch(reached.at) - now)}`;
    case "not_in_this_period":
      return "not before it resets";
    default:
      return "not known yet";
  }
}

const MODES = { NORMAL: "", TIGHT: ", nearly all", EXCEEDED: ", all of it" };

export const shareTold = (share, mode) => `${percent(share)} spent${MODES[mode]}`;

export const nameOf = (place) => place.app_name ?? place.app ?? place.org_name ?? place.org;

export function placeTold(place) {
  const org = place.org_name ?? place.org;
  return place.app === null ? "org" : `app of ${org}`;
}
