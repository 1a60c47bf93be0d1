// The list of budgets: one line each, brought up to date in place, so that whoever is on one of them stays there.

import { byId, make, say, show } from "./elements.js";
import { nameOf, percent, placeTold } from "./format.js";

export const hashOf = ({ org, app }) => `#${org}${app === null ? "" : `/${encodeURIComponent(app)}`}`;

export function placeOf(hash) {
  const [org, ...rest] = hash.replace(/^#/, "").split("/");
  if (!/^[0-9a-f-]{36}$/.test(org)) return null;
  try {
    return { org, app: rest.length ? decodeURIComponent(rest.join("/")) : null };
  } catch {
    return null;
  }
}

// Which label a line is about, and what it says of it.
export function lineOf(row) {
  const hasQuota = row.labels.some(({ label }) => label === row.serves);
  if (row.serves !== null && !hasQuota) return { text: `${row.serves}, unlimited`, share: 0, mode: "NORMAL" };
  const shown = row.labels.find(({ label }) => label === row.serves) ?? row.labels.find(({ label }) => label === row.active_label);
  if (!shown) return { text: "no budget", share: 0, mode: "NORMAL" };
  if (row.serves === null) return { text: "all spent: calls are refused", share: 100, mode: "EXCEEDED" };
  const more = [row.is_overridden ? "by override" : "", row.is_stale ? "not up to date" : ""].filter(Boolean).join(", ");
  return { text: `${shown.label}, ${percent(shown.quota_pct)} spent${more ? `, ${more}` : ""}`, share: shown.quota_pct, mode: shown.mode };
}

export function render(list, chosen, query) {
  const { rows, cursor } = list;
  const isAlone = rows.length <= 1 && cursor === null && !query.search && !query.after;
  show(byId("budgets"), !isAlone);
  const place = byId("rows");
  const known = new Map([...place.children].map((item) => [item.dataset.place, item]));
  const items = rows.map((row) => filled(known.get(hashOf(row)) ?? line(row), row, chosen));
  if (items.length !== place.children.length || items.some((item, i) => item !== place.children[i])) place.replaceChildren(...items);
  say(byId("no-rows"), query.search ? "Nothing here has that in its name or id." : "There is no org yet.");
  show(byId("no-rows"), !rows.length);
  if (!rows.length && cursor) say(byId("no-rows"), "Nothing so far; there is more to look through.");
  show(byId("more"), cursor !== null);
  show(byId("back"), Boolean(query.after));
}

function line(row) {
  const item = make(
    "li",
    {},
    make("a", { href: hashOf(row) }, make("span", { class: "name" }), make("span", { class: "dim" }), make("span", { class: "state" }), make("span", { class: "bar", "aria-hidden": "true" }, make("span"))),
  );
  item.dataset.place = hashOf(row);
  return item;
}

function filled(item, row, chosen) {
  const [link] = item.children;
  const [name, where, state, bar] = link.children;
  const { text, share, mode } = lineOf(row);
  say(name, nameOf(row));
  say(where, placeTold(row));
  say(state, text);
  bar.className = `bar ${mode.toLowerCase()}`;
  bar.firstChild.style.width = `${Math.min(100, share)}%`;
  const isChosen = chosen !== null && row.org === chosen.org && row.app === chosen.app;
  if (isChosen) link.setAttribute("aria-current", "true");
  else link.removeAttribute("aria-current");
  return item;
}
