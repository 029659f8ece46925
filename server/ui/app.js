// The dashboard: asks the admin service every few seconds and gives its answers to the panels. It changes nothing.

import { announce, byId, h } from "./dom.js";
import { clock, seconds } from "./format.js";
import { drawCharts, drawTables, drawTiers, drawTiles, makeCharts, makeTables } from "./panels.js";

const POLL_S = 5;
const TIMEOUT_S = 10;
const POLL_AFTER_FAULT_MAX_S = 60;
const POINTS_MAX = 2000;
const TOKEN = "kvtier-token";
const THEME = "kvtier-theme";
const API = new URL("../api/v1/", document.baseURI);

const state = { overview: null, points: [], stepS: POLL_S, faults: 0, isPaused: false, timer: 0, turn: 0, answeredS: 0, token: stored(sessionStorage, TOKEN) };
let panels = null;

/** What a storage holds; null where it is switched off. */
function stored(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null;
  }
}

function store(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch {
    // switched off: then it lasts as long as the page
  }
}

// --- asking ---

class Refused extends Error {
  /** status 0: no answer at all. */
  constructor(status, text, retryS = null) {
    super(text);
    Object.assign(this, { status, retryS });
  }
}

async function ask(name) {
  const headers = { Accept: "application/json" };
  if (state.token) {
    if (!/^[!-~]+$/.test(state.token)) throw new Refused(401, "a token has other characters"); // fetch would refuse the header
    headers.Authorization = `Bearer ${state.token}`;
  }
  let answer;
  try {
    answer = await fetch(new URL(name, API), { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_S * 1000) });
    if (answer.ok) return await answer.json();
  } catch (fault) {
    throw new Refused(0, fault.name === "TimeoutError" ? `no answer within ${TIMEOUT_S} s` : "the service does not answer");
  }
  const problem = await answer.json().catch(() => ({}));
  const text = [problem.title, problem.detail].filter(Boolean).join(": ") || `status ${answer.status}`;
  throw new Refused(answer.status, text, Number(answer.headers.get("Retry-After")) || null);
}

async function refresh() {
  clearTimeout(state.timer);
  state.turn += 1; // what an earlier turn still waits for is of no use any more
  const turn = state.turn;
  try {
    const history = state.points.length === 0 ? await ask("history") : null;
    const overview = await ask("overview");
    if (turn !== state.turn) return;
    state.faults = 0;
    if (history) tookHistory(history);
    took(overview);
  } catch (fault) {
    if (turn !== state.turn) return;
    state.faults += 1;
    if (!(fault instanceof Refused)) console.error(fault);
    refused(fault instanceof Refused ? fault : new Refused(0, "this page cannot show what the service answers"));
    if (fault.status === 401) return; // asks again when there is another token
    schedule(fault.retryS ?? Math.min(POLL_AFTER_FAULT_MAX_S, POLL_S * 2 ** Math.min(state.faults - 1, 6)));
    return;
  }
  schedule(POLL_S);
}

function tookHistory(history) {
  state.points = history.points;
  state.stepS = Math.max(history.interval_s, POLL_S);
}

function schedule(delayS) {
  if (!state.isPaused && !document.hidden) state.timer = setTimeout(refresh, delayS * 1000);
}

// --- showing ---

/** The point of the history that an overview is. */
function pointOf({ at_s, capacity, workers, rates }) {
  const { hit_ratio, load_bytes_s, save_bytes_s, evicted_bytes_s, ttft_saved_s_per_s } = rates;
  return { at_s, used_bytes: capacity.used_bytes, workers: workers.length, hit_ratio, load_bytes_s, save_bytes_s, evicted_bytes_s, ttft_saved_s_per_s };
}

function took(overview) {
  const isFirst = state.overview === null;
  state.overview = overview;
  state.answeredS = Date.now() / 1000;
  if (!state.points.length || overview.at_s > state.points.at(-1).at_s) state.points.push(pointOf(overview));
  state.points = state.points.slice(-POINTS_MAX);
  byId("sign-in").hidden = true;
  byId("figures").hidden = false;
  byId("sign-out").hidden = state.token === null;
  panels ??= { charts: makeCharts(), tables: makeTables() };
  const gapS = 3 * state.stepS;
  drawDeployment(overview.deployment);
  drawNotices(overview);
  drawTiles(overview, state.points, gapS);
  drawTiers(overview);
  drawCharts(panels.charts, overview, state.points, gapS);
  drawTables(panels.tables, overview);
  showLive();
  if (isFirst) announce("The figures are shown.");
}

function drawDeployment({ root, index_kind, version, role }) {
  const more = ` · ${index_kind} index · ${version ? `version ${version}` : "of a checkout"}${role === "admin" ? " · admin" : ""}`;
  byId("deployment").replaceChildren(h("b", null, root), more);
}

function notice(kind, title, text, button = null) {
  return h("div", { class: `notice ${kind}` }, h("b", null, title), h("span", null, text), button);
}

function drawNotices({ index, workers, namespaces }) {
  const said = [];
  if (index.is_being_rebuilt) said.push(notice("warn", "The index is being rebuilt.", "An engine reads it back from the segments; until then there are fewer hits, and figures of what is stored are too small."));
  if (workers.length === 0) said.push(notice("warn", "No engine reports.", "What is stored is shown; rates are those of engines, so there are none."));
  if (namespaces.some((row) => !row.is_readable)) said.push(notice("bad", "A namespace cannot be read.", "Nobody can tell whose KV lies there, so engines do not use it; kvtier verify says more."));
  byId("notices").replaceChildren(...said);
}

function refused(fault) {
  if (fault.status === 401) {
    showSignIn();
    return;
  }
  const again = h("button", { type: "button" }, "Try again");
  again.addEventListener("click", refresh);
  const since = state.overview ? ` The figures are those of ${clock(state.answeredS, true)}.` : "";
  const title = fault.status === 503 ? "The index does not answer." : "No figures.";
  byId("notices").replaceChildren(notice("bad", title, `${fault.message}.${since}`, again));
  announce(`${title} ${fault.message}`);
  showLive();
}

function showSignIn() {
  const text = state.token ? "This token is not one of the service's." : "";
  state.token = null;
  state.overview = null;
  state.points = [];
  store(sessionStorage, TOKEN, null);
  byId("figures").hidden = true;
  byId("sign-out").hidden = true;
  byId("notices").replaceChildren();
  byId("deployment").replaceChildren();
  byId("sign-in").hidden = false;
  byId("token-fault").textContent = text;
  byId("token").focus();
  showLive();
}

/** The word beside the dot. */
function showLive() {
  const isSignIn = !byId("sign-in").hidden;
  const age = Math.max(0, Date.now() / 1000 - state.answeredS);
  let [mark, text] = ["live", age < POLL_S + 2 ? "live" : `live, ${seconds(Math.round(age))} ago`];
  if (state.isPaused) [mark, text] = ["pause", "paused"];
  else if (isSignIn) [mark, text] = ["wait", "not signed in"];
  else if (state.faults) [mark, text] = ["fault", "no answer"];
  else if (state.overview === null) [mark, text] = ["wait", "connecting"];
  byId("live").dataset.state = mark;
  byId("live-text").textContent = text;
}

// --- steering ---

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = byId("token").value.trim();
  store(sessionStorage, TOKEN, state.token);
  byId("token").value = "";
  refresh();
});

byId("sign-out").addEventListener("click", () => {
  store(sessionStorage, TOKEN, null);
  location.reload(); // so that nothing is left of the figures, nor of an answer that is on its way
});

byId("pause").addEventListener("click", () => {
  state.isPaused = !state.isPaused;
  byId("pause").setAttribute("aria-pressed", state.isPaused);
  if (state.isPaused) clearTimeout(state.timer);
  else refresh();
  showLive();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(state.timer);
  else if (!state.isPaused && byId("sign-in").hidden) refresh();
});

const THEMES = { auto: ["Auto", "as the system has them"], light: ["Light", "light"], dark: ["Dark", "dark"] };

function setTheme(theme) {
  const [name, words] = THEMES[theme];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = name;
  byId("theme").setAttribute("aria-label", `Colours: ${words}`);
  byId("theme").dataset.theme = theme;
  store(localStorage, THEME, theme === "auto" ? null : theme);
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(byId("theme").dataset.theme) + 1) % names.length]);
});

const theme = stored(localStorage, THEME);
setTheme(Object.hasOwn(THEMES, theme) ? theme : "auto");
setInterval(showLive, 1000);
refresh();
