// One budget in full: what serves, how fast is spent, and what happened.

import { draw, numberOf, readAt, table, unread } from "./chart.js";
import { byId, make, say, show } from "./elements.js";
import { clock, epoch, lasting, nameOf, percent, placeTold, shareTold, usd } from "./format.js";

const ENFORCED = {
  soft: "soft budget: a call under way may pass a quota",
  hard: "hard budget: no call may pass a quota",
  shadow: "shadow mode: budgets are reckoned, and enforce nothing",
};

let chart = null;
let drawnOf = null; // what the chart shows now

export function render(scope, course, happened, at) {
  const now = epoch(at);
  say(byId("title"), nameOf(scope));
  const period = { day: "Today", week: "This week", month: "This month" }[scope.period.split("#")[0].toLowerCase()] ?? scope.period;
  const isShared = scope.app !== null && scope.scope.app === null ? "; its org’s apps share this budget" : "";
  const until = `${clock(epoch(scope.resets_at), now, scope.timezone)} ${scope.timezone}`;
  say(byId("subtitle"), `${placeTold(scope)}${isShared}. ${period}, until ${until}; ${ENFORCED[scope.enforcement] ?? scope.enforcement}.`);
  say(byId("notices"), scope.is_stale ? "The store could not be asked when it was time to: these figures may be old." : "");
  serves(scope);
  chain(scope);
  tiles(scope, now);
  spend(scope, course, now);
  events(scope, happened ?? [], now);
}

function serves(scope) {
  const first = scope.ordering[0];
  let text = `${scope.serves} serves whoever asks for ${first}.`;
  if (!first) text = "No chain is set: whatever label is asked for serves, and nothing is limited.";
  else if (scope.serves === null) text = "Every quota of the chain is spent: calls are refused until it resets.";
  else if (scope.serves === first) text = `${first} serves, the first of the chain.`;
  if (first && scope.enforcement === "shadow") text = `Each call gets what it asks for; if the budget were enforced: ${text}`;
  if (scope.override) text += " An override is in force.";
  say(byId("serves"), text);
}

function chain(scope) {
  const inChain = scope.labels.filter(({ label }) => scope.ordering.includes(label));
  const others = scope.labels.filter(({ label, quota_usd_micros }) => !scope.ordering.includes(label) && quota_usd_micros !== null);
  byId("chain").replaceChildren(...[...inChain, ...others].map((each) => link(scope, each)));
}

function link(scope, { label, spent_usd_micros: spent, in_flight_usd_micros: flight, quota_usd_micros: quota, quota_pct: share, mode }) {
  const isServing = label === scope.serves;
  const badge = isServing ? "serves now" : label === scope.active_label ? "active" : "";
  const under = Number(flight) > 0 ? `, ${usd(flight)} under way` : "";
  return make(
    "li",
    { class: isServing ? "link serving" : "link", "aria-current": isServing ? "true" : null },
    make("p", { class: "link-head" }, make("span", { class: `swatch s${numberOf(scope, label)}`, "aria-hidden": "true" }), make("strong", {}, label), badge ? make("span", { class: "badge" }, badge) : null),
    make("p", { class: "amount" }, quota === null ? "unlimited" : `${usd(spent)} of ${usd(quota)}`),
    bar(mode, share),
    make("p", { class: "dim" }, quota === null ? "" : `${shareTold(share, mode)}${under}`),
  );
}

function bar(mode, share) {
  const filled = make("span");
  filled.style.width = `${Math.min(100, share ?? 0)}%`;
  return make("span", { class: `bar ${mode.toLowerCase()}`, "aria-hidden": "true" }, filled);
}

function tiles(scope, now) {
  const spent = scope.labels.reduce((sum, each) => sum + Number(each.spent_usd_micros ?? 0), 0);
  const paces = Object.values(scope.pace).filter(Boolean);
  const hourly = paces.reduce((sum, each) => sum + each.usd_micros_per_hour, 0);
  const over = Math.max(0, ...paces.map((each) => each.over_seconds));
  const of = scope.serves ?? scope.active_label;
  const found = [
    ["Spent", usd(spent), "of all quotas together"],
    ["Burn rate", paces.length ? `${usd(hourly)}/h` : "–", paces.length ? `over the last ${lasting(over)}` : "told after a minute"],
    [of ? `${of} lasts` : "It lasts", ...reach(scope.reached[of], now, scope.timezone)],
    ["Resets in", lasting(epoch(scope.resets_at) - now), `at ${clock(epoch(scope.resets_at), now, scope.timezone)}`],
  ];
  byId("tiles").replaceChildren(
    ...found.map(([name, value, more]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, make("span", { class: "value" }, value), make("span", { class: "dim" }, more)))),
  );
}

function reach(reached, now, zone) {
  const at = reached?.at ? clock(epoch(reached.at), now, zone) : "";
  if (reached?.state === "expected") return [`until ${at}`, `${lasting(epoch(reached.at) - now)} more, at this rate`];
  if (reached?.state === "reached") return ["no longer", at ? `spent since ${at}` : "spent before this is known"];
  if (reached?.state === "not_in_this_period") return ["until it resets", "at this rate"];
  return reached ? ["–", "told after a minute"] : ["–", "it has no quota"];
}

function spend(scope, course, now) {
  const since = scope.known_since && epoch(scope.known_since);
  const begins = epoch(scope.starts_at);
  const note = !since
    ? "Nothing is known yet of how it grew."
    : since <= begins
      ? "As a share of each quota."
      : `As a share of each quota, since ${clock(since, now, scope.timezone)}: the store keeps no hours, and this process learns them while it runs.`;
  say(byId("chart-note"), note);
  drawnOf = { scope, course, now };
  redraw();
  byId("legend").replaceChildren(
    ...scope.labels
      .filter(({ label }) => course[label])
      .map(({ label, spent_usd_micros: spent, quota_pct: share }) => make("li", {}, make("span", { class: `swatch s${numberOf(scope, label)}`, "aria-hidden": "true" }), `${label}: ${usd(spent)}, ${percent(share)}`)),
  );
  table(byId("chart-table"), scope, course, now);
}

export function redraw() {
  if (drawnOf) chart = draw(byId("chart"), drawnOf.scope, drawnOf.course, drawnOf.now);
}

export function prepare() {
  const place = byId("chart");
  let width = 0;
  new ResizeObserver(() => {
    if (place.clientWidth !== width) {
      width = place.clientWidth;
      redraw();
    }
  }).observe(place);
  place.addEventListener("pointermove", (event) => chart && readAt(chart, event.clientX, drawnOf.scope, drawnOf.now, byId("readout")));
  place.addEventListener("pointerleave", () => chart && unread(chart, byId("readout")));
}

function events(scope, happened, now) {
  const place = byId("happened");
  const found = happened.map((each) => make("li", {}, make("span", { class: "when" }, each.at ? clock(epoch(each.at), now, scope.timezone) : "some time"), told(each)));
  place.replaceChildren(...(found.length ? found : [make("li", { class: "dim" }, "No threshold was reached, and the active label never moved on.")]));
}

export function told(each) {
  if (each.kind === "moved") return `${each.before || "the first label"} was spent: ${each.label} became active for the rest of the period`;
  if (each.threshold_pct === 100) return `${each.label} reached its quota`;
  return `${each.label} reached ${percent(each.threshold_pct)} of its quota`;
}

export function health({ status, checks }, trouble) {
  const isReady = status === "ready" && !trouble;
  say(byId("health-brief"), trouble ?? (isReady ? "Ready: all that it needs is there." : "Not ready."));
  byId("health-brief").className = isReady ? "good" : "bad";
  byId("checks").replaceChildren(...Object.entries(checks).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  show(byId("checks"), Object.keys(checks).length > 0);
}
