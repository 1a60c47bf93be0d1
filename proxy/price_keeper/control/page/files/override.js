// The override in force, and for administrators the form that sets or ends one.

import { ask, pathOf } from "./ask.js";
import { byId, make, options, say, show } from "./elements.js";
import { clock, epoch } from "./format.js";

let scope = null;
let shown = "";

export function update(newScope, at, isAdmin) {
  if (scope !== null && (scope.org !== newScope.org || scope.app !== newScope.app)) clear();
  scope = newScope;
  options(byId("override-label"), scope.ordering);
  show(byId("override"), isAdmin && scope.ordering.length > 0);
  const key = JSON.stringify([scope.org, scope.app, scope.override, isAdmin]);
  if (key !== shown) {
    shown = key;
    byId("override-now").replaceChildren(...told(scope, epoch(at), isAdmin));
  }
}

function told({ override, timezone }, now, isAdmin) {
  if (override === null) return [make("p", { class: "dim" }, "None is in force: the quotas decide.")];
  const until = clock(epoch(override.until), now, timezone);
  const text = make("p", { class: "in-force" }, make("strong", {}, override.label), ` is in force until ${until}, by ${override.who}: ${override.reason}`);
  return isAdmin ? [text, make("p", {}, make("button", { type: "button", id: "override-clear" }, "Let the quotas decide again"))] : [text];
}

function clear() {
  say(byId("override-error"), "");
  say(byId("override-done"), "");
  byId("override").reset();
}

export function prepare(changed) {
  byId("override").addEventListener("submit", async (event) => {
    event.preventDefault();
    const until = byId("override-until").value;
    const body = { label: byId("override-label").value, reason: byId("override-reason").value };
    if (until) body.until = new Date(until).toISOString();
    await done("PUT", body, `${body.label} is in force.`, changed);
  });
  byId("override-now").addEventListener("click", async (event) => {
    if (event.target.id !== "override-clear") return;
    await done("DELETE", undefined, "The quotas decide again.", changed);
    byId("override-label").focus(); // the button that was pressed is gone
  });
}

async function done(method, body, text, changed) {
  clearTold();
  try {
    await ask(method, `${pathOf(scope.scope)}/override`, body);
    if (method === "PUT") byId("override").reset();
    await changed();
    say(byId("override-done"), text);
  } catch (failure) {
    say(byId("override-error"), failure.message);
  }
}

function clearTold() {
  say(byId("override-error"), "");
  say(byId("override-done"), "");
}
