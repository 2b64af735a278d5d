"use strict";
// Shows GET /delta_status of the engine that has served this page. Text of the engine goes into
// textContent only: names come from trainers.

const PERIOD_MS = 3000;
const TIMEOUT_MS = 10000;
const TOKEN = "delta-token"; // its key in sessionStorage
const SVG = "http://www.w3.org/2000/svg";
const GOOD = ["committed", "already_applied", "staged", "certain"];
const WARN = ["rolled_back", "refused", "asleep", "waiting for the token"];
const PHASES = ["receive_ms", "stage_ms", "pause_ms", "commit_ms"];
const MAX_REFUSED = 100; // tensors listed by name
const PLOT_HEIGHT = 150; // as in page.css

const find = (selector) => document.querySelector(selector);
let shown = null; // the last answer
let answeredAt = null; // when it came, in ms since the epoch
let timer = null;
let round = 0; // of asking; only the newest one's answer counts

// Text --------------------------------------------------------------------------------------

/** Return text to show: control and bidirectional characters could disguise what follows. */
function plain(value) {
  return value === null || value === undefined ? "" : String(value).replace(/\p{C}/gu, "\uFFFD");
}

function kindOf(word) {
  if (GOOD.includes(word)) return "good";
  return WARN.includes(word) ? "warn" : "bad";
}

function make(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = plain(text);
  node.className = className;
  return node;
}

function size(count) {
  for (const unit of ["B", "kB", "MB"]) {
    if (count < 1000) return `${Number(count.toPrecision(3))} ${unit}`;
    count /= 1000;
  }
  return `${Number(count.toPrecision(3))} GB`;
}

function milliseconds(value) {
  if (value === undefined || value === null) return "";
  return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

function timeOf(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

function duration(seconds) {
  for (const [name, length] of [["days", 86400], ["hours", 3600], ["minutes", 60]]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${name}`;
  }
  return `${Math.floor(seconds)} s`;
}

function ago(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  return seconds < 120 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`;
}

// Asking ------------------------------------------------------------------------------------

class Refused extends Error {}

async function ask() {
  const token = sessionStorage.getItem(TOKEN);
  const response = await fetch("delta_status?history=true", {
    headers: token === null ? {} : { Authorization: `Bearer ${token}` },
    cache: "no-store",
    redirect: "error",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (response.status === 401) throw new Refused();
  const body = await response.json().catch(() => null);
  if (!response.ok) {
    throw new Error(`${response.status}: ${body?.error?.message ?? response.statusText}`);
  }
  if (!Array.isArray(body?.history)) throw new Error("the answer is not a delta status");
  return body;
}

async function update() {
  clearTimeout(timer);
  const mine = ++round;
  try {
    const status = await ask();
    if (mine !== round) return;
    answeredAt = Date.now();
    shown = status;
    show(status);
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof Refused) {
      askForToken();
      return;
    }
    showUnreachable(error);
  }
  timer = setTimeout(update, PERIOD_MS);
}

function askForToken() {
  const refused = sessionStorage.getItem(TOKEN) !== null;
  sessionStorage.removeItem(TOKEN);
  shown = null;
  answeredAt = null;
  setState("waiting for the token");
  setProblem(refused ? "The engine has refused this token." : null);
  find("#content").hidden = true;
  find("#login").hidden = false;
  find("#token").focus();
}

function takeToken(event) {
  event.preventDefault();
  const token = find("#token").value.trim();
  find("#token").value = "";
  // No engine has a token that a header cannot carry.
  if (!/^[\x21-\x7e]+$/.test(token)) {
    setProblem("A token has printable ASCII characters only, without spaces.");
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  update();
}

function forgetToken() {
  sessionStorage.removeItem(TOKEN);
  update();
}

// Showing -----------------------------------------------------------------------------------

function setState(word) {
  const badge = find("#state");
  if (badge.textContent !== plain(word)) badge.textContent = plain(word); // read aloud on change
  badge.className = `badge ${kindOf(word)}`;
  const meaning = find(`[data-state="${CSS.escape(word)}"]`);
  find("#meaning").textContent = meaning === null ? "" : meaning.textContent;
}

function setProblem(text) {
  const problem = find("#problem");
  problem.hidden = text === null;
  if (problem.textContent !== plain(text)) problem.textContent = plain(text);
}

function showAge() {
  find("#age").textContent = answeredAt === null ? "" : `updated ${ago(Date.now() - answeredAt)}`;
}

function showUnreachable(error) {
  setState("unreachable");
  const seen = shown === null ? "" : ` Below is the last answer, of version ${shown.version.number}.`;
  setProblem(`No status from the engine: ${error.message}.${seen}`);
  find("#content").classList.add("stale");
  showAge();
}

function show(status) {
  const { version, health } = status;
  setState(health.state === "certain" && health.asleep ? "asleep" : health.state);
  setProblem(problemOf(status));
  find("#login").hidden = true;
  find("#content").hidden = false;
  find("#content").classList.remove("stale");
  find("#forget").hidden = sessionStorage.getItem(TOKEN) === null;
  find("#engine").textContent = plain(status.engine);
  document.title = `v${version.number} ${health.state} - delta-updates`;
  const pairs = factsOf(status).filter(([, value]) => value !== null && value !== undefined);
  find("#facts").replaceChildren(...pairs.map(factNode));
  showPlan(health);
  showSyncs(status.history);
  showAge();
}

function problemOf({ version, health, scrub, log }) {
  const found = [];
  if (health.state === "uncertain") {
    found.push("A write failed half-way: the engine serves nothing until a full sync commits.");
  }
  if (health.mismatched.length) {
    found.push(`Other bits than the syncs have written are in ${health.mismatched.join(", ")}: send a full sync.`);
  }
  if (health.changed_externally !== null) {
    found.push(`Something else has changed the weights: ${health.changed_externally}.`);
  }
  if (health.paused !== null) {
    const since = health.paused.since === null ? "" : ` since ${timeOf(health.paused.since)}`;
    found.push(`Generation is paused${since} by ${health.paused.by ?? "an unknown client"}.`);
  }
  if (version.complete === false) found.push("Not all of this version has arrived.");
  if (scrub?.mismatched.length) {
    found.push(`Scrubbing found other bits in ${scrub.mismatched.join(", ")}.`);
  }
  if (scrub?.error) found.push(`Scrubbing fails: ${scrub.error}.`);
  if (log?.problem) found.push(`Delta log: ${log.problem.type}: ${log.problem.message}.`);
  return found.length ? found.join(" ") : null;
}

function factsOf(status) {
  const { version, health, staged, log, scrub, server } = status;
  const parts = staged && `${staged.parts.length} of ${staged.num_parts ?? "?"} parts of version ${staged.version}`;
  const differ = new Set(version.by_rank).size > 1;
  const complete = version.complete === null ? "unknown" : yesOrNo(version.complete);
  const passes = scrub && `${scrub.passes} passes${scrub.passed_at ? `, the last one ended ${timeOf(scrub.passed_at)}` : ""}`;
  const full = status.history.filter((sync) => sync.full && sync.outcome === "committed").at(-1);
  return [
    ["version", version.number],
    ["model", server?.model],
    ["host", server?.host],
    ["up for", server && `${duration(server.seconds)}, since ${new Date(server.since * 1000).toLocaleString()}`],
    ["run", version.run],
    ["owner", status.owner && ownerOf(status.owner, version.run)],
    ["the engine's weight version", version.published],
    ["versions of the ranks", differ ? version.by_rank.join(", ") : null],
    ["ranks", status.ranks],
    ["takes no deltas before", health.awaits_full_sync ? "full sync" : null],
    ["complete", complete],
    ["staged", parts ?? "nothing"],
    ["can roll back", yesOrNo(version.can_roll_back)],
    ["last full sync", full && fullOf(full)],
    ["digest", version.digest],
    ["delta log", log && `newest version ${log.newest ?? "none"}, ${log.folder}`],
    ["scrubbing", passes],
    ...(status.adapters ?? []).map((one) => [`adapter ${one.name}`, `version ${one.version}`]),
  ];
}

function fullOf(sync) {
  const why = sync.reason === null ? "no reason given" : sync.reason;
  return `version ${sync.version} at ${timeOf(sync.at)}: ${why}`;
}

function yesOrNo(value) {
  return value ? "yes" : "no";
}

function ownerOf(owner, run) {
  const process = owner.host === null ? "a process" : `process ${owner.pid ?? "?"} on ${owner.host}`;
  const other = owner.run === run ? "" : ` of run ${owner.run}`;
  return `${process}${other}, epoch ${owner.epoch}, since ${new Date(owner.since * 1000).toLocaleString()}`;
}

function factNode([name, value]) {
  const node = document.createElement("div");
  node.append(make("dt", name), make("dd", value));
  return node;
}

function showPlan({ certification, uncertified }) {
  const kinds = [...new Set(certification.flatMap((counts) => Object.keys(counts)))];
  const rows = kinds.map((kind) => {
    const counts = certification.map((rank) => rank[kind] ?? 0);
    const [least, most] = [Math.min(...counts), Math.max(...counts)];
    const row = document.createElement("tr");
    row.append(make("td", kind), make("td", least === most ? most : `${least} to ${most}`, "number"));
    return row;
  });
  find("#plan").replaceChildren(...rows);
  const refused = Object.entries(uncertified);
  find("#refused").hidden = refused.length === 0;
  const more = refused.length > MAX_REFUSED ? `, the first ${MAX_REFUSED}` : "";
  find("#refused summary").textContent = `${refused.length} tensors cannot be updated${more}`;
  find("#refused tbody").replaceChildren(
    ...refused.slice(0, MAX_REFUSED).map(([name, why]) => {
      const row = document.createElement("tr");
      row.append(make("td", name), make("td", why));
      return row;
    }),
  );
}

function showSyncs(history) {
  find("#syncs tbody").replaceChildren(...history.map(syncRow).reverse());
  plot(find("#pause-plot"), "Pause in milliseconds", milliseconds, history, (sync) => sync.timings_ms.pause_ms);
  plot(find("#bytes-plot"), "Bytes", size, history, (sync) => sync.bytes);
}

function syncRow(sync) {
  const row = document.createElement("tr");
  const versions = [sync.base_version, sync.version].filter((version) => version !== null);
  const share = sync.elements ? ` (${Number(((100 * sync.nnz) / sync.elements).toPrecision(3))} %)` : "";
  const sent = sync.nnz === null ? "" : sync.nnz.toLocaleString("en") + share;
  row.append(
    make("td", timeOf(sync.at)),
    make("td", sync.outcome, kindOf(sync.outcome)),
    make("td", versions.join(" \u2192 ") + (sync.full ? " full" : "")),
    make("td", size(sync.bytes), "number"),
    make("td", sent, "number"),
    ...PHASES.map((phase) => make("td", milliseconds(sync.timings_ms[phase]), "number")),
    make("td", whyOf(sync)),
  );
  return row;
}

function whyOf(sync) {
  if (sync.error !== null) return `${sync.error}: ${sync.message}`;
  return sync.reason === null ? "" : `full: ${sync.reason}`;
}

// Plots -------------------------------------------------------------------------------------

function draw(tag, attributes, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = plain(text);
  return node;
}

/** Draw one bar per sync, the newest at the right; `valueOf` can return nothing. */
function plot(place, name, format, history, valueOf) {
  const bars = history
    .map((sync) => ({ sync, value: valueOf(sync) }))
    .filter(({ value }) => value !== undefined && value !== null && value > 0);
  if (bars.length === 0) {
    place.replaceChildren(make("p", "none yet"));
    return;
  }
  const values = bars.map(({ value }) => value).sort((a, b) => a - b);
  const [least, most] = [values[0], values[values.length - 1]];
  // A full sync is hundreds of times larger than a delta.
  const logarithmic = most / least > 20;
  const scale = logarithmic ? ", logarithmic scale" : "";
  place.parentElement.querySelector("figcaption span").textContent = scale;
  const bottom = logarithmic ? least / 2 : 0;
  const share = (value) =>
    logarithmic ? Math.log(value / bottom) / Math.log(most / bottom) : value / most;
  const width = Math.max(place.clientWidth, 200);
  const [left, top, base] = [58, 8, PLOT_HEIGHT - 18];
  const height = base - top;
  const step = (width - left) / Math.max(bars.length, 12);
  const middle = values[Math.floor(values.length / 2)];
  const label = `${name} of ${bars.length} syncs: median ${format(middle)}, largest ${format(most)}${scale}`;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${PLOT_HEIGHT}`, role: "img", "aria-label": label });
  const ticks = logarithmic ? [least, Math.sqrt(least * most), most] : [0, most / 2, most];
  for (const tick of ticks) {
    const y = base - height * (tick === 0 ? 0 : share(tick));
    svg.append(draw("line", { x1: left, x2: width, y1: y, y2: y }));
    svg.append(draw("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, tick === 0 ? "0" : format(tick)));
  }
  bars.forEach(({ sync, value }, number) => {
    const tall = Math.max(1, height * share(value));
    const kind = kindOf(sync.outcome);
    const bar = draw("rect", {
      x: left + number * step + 1, y: base - tall, width: Math.max(1, step - 2), height: tall, class: kind,
    });
    bar.append(draw("title", {}, `version ${sync.version ?? "?"}, ${sync.outcome}: ${format(value)}`));
    svg.append(bar);
  });
  const ends = [[left, "start", bars[0]], [left + step * bars.length, "end", bars[bars.length - 1]]];
  for (const [x, anchor, { sync }] of bars.length > 4 ? ends : ends.slice(0, 1)) {
    svg.append(draw("text", { x, y: PLOT_HEIGHT - 4, "text-anchor": anchor }, `version ${sync.version ?? "?"}`));
  }
  place.replaceChildren(svg);
}

// Start -------------------------------------------------------------------------------------

find("#login").addEventListener("submit", takeToken);
find("#forget").addEventListener("click", forgetToken);
addEventListener("resize", () => shown === null || showSyncs(shown.history));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (find("#login").hidden) update();
});
setInterval(showAge, 1000);
update();
