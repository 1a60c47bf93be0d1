// Another quota, tried on what was spent so far. The server reckons; nothing changes until an administrator applies it.

import { ask, pathOf } from "./ask.js";
import { byId, make, options, say, show } from "./elements.js";
import { epoch, percent, reachedTold, toDollars, toMicros, usd } from "./format.js";

const WAIT_MS = 150;
const AGAIN_MS = 4000; // while the figures move
const STEPS = 1000;

let scope = null;
let now = 0;
let isAdmin = false;
let isTouched = false;
let timer = null;
let asked = 0;

const control = (name) => byId(`what-if-${name}`);
const quotaOf = (label) => scope.labels.find((each) => each.label === label)?.quota_usd_micros ?? 0;

// The slider is finer where amounts are small: its middle is the quota as it is.
export const slid = (position, quota, spent) => Math.round((position / STEPS) * most(quota, spent));
export const position = (micros, quota, spent) => Math.min(STEPS, Math.round((micros / most(quota, spent)) * STEPS));
const most = (quota, spent) => Math.max(quota * 2, spent * 2, 1_000_000);

export function update(newScope, at, mayApply) {
  const isAnother = scope === null || scope.org !== newScope.org || scope.app !== newScope.app;
  [scope, now, isAdmin] = [newScope, epoch(at), mayApply];
  const labels = scope.labels.filter(({ quota_usd_micros }) => quota_usd_micros !== null).map(({ label }) => label);
  const isNew = options(control("label"), labels);
  show(control("actions"), labels.length > 0);
  show(byId("what-if"), labels.length > 0);
  if (isAnother || isNew) {
    control("label").value = labels.includes(scope.active_label) ? scope.active_label : (labels[0] ?? "");
    reset();
  } else if (isTouched && Date.now() - asked > AGAIN_MS) soon();
  else if (!isTouched && document.activeElement !== control("quota")) fill(quotaOf(control("label").value));
}

export function prepare(confirmed, changed) {
  control("label").addEventListener("change", reset);
  control("quota").addEventListener("input", () => {
    const micros = toMicros(control("quota").value);
    say(control("error"), micros === null ? "A quota is an amount of dollars, as 12.50." : "");
    if (micros !== null) slide(micros);
    if (micros !== null) touched();
  });
  control("slider").addEventListener("input", () => {
    const label = control("label").value;
    control("quota").value = toDollars(slid(Number(control("slider").value), quotaOf(label), spentOf(label)));
    describeSlider();
    say(control("error"), "");
    touched();
  });
  byId("what-if").addEventListener("submit", (event) => event.preventDefault());
  byId("what-if-reset").addEventListener("click", reset);
  byId("apply").addEventListener("click", () => apply(confirmed, changed));
}

const spentOf = (label) => Number(scope.labels.find((each) => each.label === label)?.spent_usd_micros ?? 0);

function fill(micros) {
  const text = toDollars(micros);
  if (control("quota").value !== text) control("quota").value = text;
  slide(micros);
}

function slide(micros) {
  const label = control("label").value;
  control("slider").max = STEPS;
  control("slider").value = position(micros, quotaOf(label), spentOf(label));
  describeSlider();
}

const describeSlider = () => control("slider").setAttribute("aria-valuetext", `${control("quota").value} dollars`);

function reset() {
  isTouched = false;
  clearTimeout(timer);
  fill(quotaOf(control("label").value));
  say(control("outcome"), "");
  show(control("table"), false);
  say(control("error"), "");
  byId("apply").disabled = true;
  show(byId("apply"), isAdmin);
}

function touched() {
  isTouched = true;
  soon();
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(find, WAIT_MS);
}

async function find() {
  const [label, micros] = [control("label").value, toMicros(control("quota").value)];
  if (micros === null) return;
  asked = Date.now();
  const query = new URLSearchParams({ label, quota_usd_micros: micros });
  try {
    const { told } = await ask("GET", `${pathOf(scope)}/what-if?${query}`);
    if (isTouched && label === control("label").value) render(told);
  } catch (failure) {
    say(control("error"), failure.message);
  }
}

function render(found) {
  const { as_it_is: is, as_it_would_be: would, label } = found;
  byId("apply").disabled = found.quota_usd_micros === quotaOf(label);
  say(control("outcome"), outcome(found));
  control("table").replaceChildren(comparison(is, would, label));
  show(control("table"), true);
}

export function outcome({ label, quota_usd_micros: quota, as_it_is: is, as_it_would_be: would }) {
  const told = would.serves === null ? "every quota would be spent, and calls refused" : would.serves === is.serves ? `${would.serves} would go on serving` : `${would.serves} would serve`;
  const fresh = would.would_have_served;
  const since = fresh === would.serves ? "" : fresh === null ? "" : ` Had it held since the period began, ${fresh} would still serve: a label that was left is gone back to in the next period, or by override.`;
  return `With ${usd(quota)} for ${label}, ${told}.${since}`;
}

function comparison(is, would, changed) {
  const head = make("tr", {}, ...["Label", "Quota", "Spent", "Used up"].map((text) => make("th", { scope: "col" }, text)));
  const rows = would.labels.map((each, i) => {
    const before = is.labels[i];
    const both = (was, willBe) => (was === willBe ? willBe : `${was} → ${willBe}`);
    return make(
      "tr",
      { class: each.label === changed ? "changed" : null },
      make("th", { scope: "row" }, each.label),
      make("td", {}, both(usd(before.quota_usd_micros), usd(each.quota_usd_micros))),
      make("td", {}, both(percent(before.quota_pct), percent(each.quota_pct))),
      make("td", {}, reachedTold(each.reached, now, scope.timezone)),
    );
  });
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

// An app's quota becomes its own; that of an org holds for its apps that have none.
async function apply(confirmed, changed) {
  const [label, micros, place] = [control("label").value, toMicros(control("quota").value), scope.scope];
  const whose = place.app === null ? "the org, for all of its apps together" : `the app ${place.app} alone`;
  if (!(await confirmed("Apply this quota?", `${label} of ${whose} may then spend ${usd(micros)} in each period, from now on.`))) return;
  try {
    const { told, tag } = await ask("GET", pathOf(place));
    const quotas = { ...(told.settings.quotas ?? told.in_force.quotas), [label]: micros };
    await ask("PUT", pathOf(place), { ...told.settings, quotas }, { "If-Match": tag });
    reset();
    say(control("outcome"), `The quota of ${label} is ${usd(micros)} now.`);
    await changed();
  } catch (failure) {
    say(control("error"), failure.message);
  }
}
