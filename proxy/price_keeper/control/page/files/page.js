// The status page: who is signed in, what is looked at, and what comes of it.

import { ask, pathOf } from "./ask.js";
import * as budgets from "./budgets.js";
import { byId, say, show } from "./elements.js";
import * as inFull from "./in-full.js";
import * as override from "./override.js";
import { follow } from "./stream.js";
import * as whatIf from "./what-if.js";

const SEARCH_MS = 300;
const STATES = { live: "Live", away: "Connecting again …", paused: "Paused", asking: "Every half minute" };

let session = null;
let board = {};
let stop = null;
let searching = null;
let shown = ""; // the budget that is shown in full
let answer = null; // for whoever waits to have something confirmed
const query = { search: "", after: "" };

// Signing in and out.

async function start() {
  const { told } = await ask("GET", "/status/session");
  session = told;
  show(byId("sign-in"), !session.is_signed_in);
  for (const id of ["board", "live", "who", "sign-out"]) show(byId(id), session.is_signed_in);
  if (!session.is_signed_in) {
    if (history.state?.why) say(byId("sign-in-error"), history.state.why);
    history.replaceState(null, "");
    return byId("secret").focus();
  }
  say(byId("who"), session.is_admin ? "administrator" : session.app === null ? "an org’s client" : `client of ${session.app}`);
  return look();
}

async function signIn(event) {
  event.preventDefault();
  const secret = byId("secret");
  const kind = new FormData(byId("sign-in-form")).get("kind");
  say(byId("sign-in-error"), "");
  try {
    await ask("POST", "/status/session", { kind, secret: secret.value });
    secret.value = "";
    await start();
    byId("main").focus();
  } catch (failure) {
    say(byId("sign-in-error"), failure.message);
    secret.select();
  }
}

function notStarted(failure) {
  show(byId("sign-in"), true);
  say(byId("sign-in-error"), failure.message);
}

async function signOut() {
  try {
    await ask("DELETE", "/status/session");
    leave("");
  } catch (failure) {
    if (failure.status === 503) leave(failure.message); // this browser is signed out, as far as that goes
    else failed(failure);
  }
}

// All that was shown goes with the page: whoever signs in next sees nothing of it.
function leave(why) {
  stop?.();
  history.replaceState({ why }, "", "/status");
  location.reload();
}

// What is looked at.

const chosen = () => budgets.placeOf(location.hash) ?? own();
const own = () => (session?.is_signed_in && !session.is_admin && session.app !== null ? { org: session.org, app: session.app } : null);

function asked() {
  const place = chosen();
  const wanted = { search: query.search, after: query.after, org: place?.org, app: place?.app };
  return new URLSearchParams(Object.entries(wanted).filter(([, value]) => value)).toString();
}

function look() {
  stop?.();
  if (shown !== location.hash) {
    shown = location.hash;
    board = {};
    show(byId("in-full"), false);
  }
  const url = asked();
  stop = follow(`/status/events?${url}`, {
    onData: learn,
    onState: state,
    onRefused: (failure) => (failure.status === 401 ? leave("The session is over: sign in again.") : failed(failure)),
    poll: async () => learn((await ask("GET", `/status/board?${url}`)).told),
  });
}

function state(name) {
  const place = byId("live");
  place.dataset.state = name;
  say(place, STATES[name]);
}

function failed(failure) {
  say(byId("notices"), failure.message);
}

// What came of it.

function learn(told) {
  board = { ...board, ...told };
  inFull.health(board.health, board.trouble);
  if (board.list) {
    const { rows, cursor } = board.list;
    if (chosen() === null && rows.length === 1 && cursor === null && !query.search) {
      history.replaceState(null, "", budgets.hashOf(rows[0])); // there is nothing else to choose
      return look();
    }
    budgets.render(board.list, chosen(), query);
  }
  if (!board.scope) return undefined;
  show(byId("in-full"), true);
  document.title = `${board.scope.app_name ?? board.scope.app ?? board.scope.org_name ?? "org"}: Bedrock Price Keeper`;
  inFull.render(board.scope, board.course ?? {}, board.happened, board.at);
  whatIf.update(board.scope, board.at, session.is_admin);
  return override.update(board.scope, board.at, session.is_admin);
}

// After a change of ours, the process is to look at the store at once.
const changed = () => ask("GET", `${pathOf(chosen())}/model-selection?force_check=true`);

function confirmed(title, text) {
  const dialog = byId("confirm");
  answer?.(false);
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => (answer = resolve));
}

// The event may come late, when the dialog is open again already for another question.
function answered() {
  const dialog = byId("confirm");
  if (dialog.open) return;
  answer?.(dialog.returnValue === "yes");
  answer = null;
}

function searched(search, after) {
  Object.assign(query, { search, after });
  look();
}

byId("sign-in-form").addEventListener("submit", signIn);
byId("sign-out").addEventListener("click", signOut);
byId("confirm").addEventListener("close", answered);
byId("search-form").addEventListener("submit", (event) => event.preventDefault());
byId("search").addEventListener("input", (event) => {
  clearTimeout(searching);
  searching = setTimeout(() => searched(event.target.value.trim(), ""), SEARCH_MS);
});
byId("more").addEventListener("click", () => searched(query.search, board.list.cursor));
byId("back").addEventListener("click", () => searched(query.search, ""));
window.addEventListener("hashchange", () => {
  if (!session?.is_signed_in) return;
  look();
  byId("budget").focus();
});
inFull.prepare();
whatIf.prepare(confirmed, changed);
override.prepare(changed);
start().catch(notStarted);
