// The live view: asks /fleet/state once a second and shows what has changed.

import { ApiError, key, request, setKey } from "./api.js";
import { Curve } from "./curves.js";
import { announce, ask, byId, h } from "./dom.js";
import { PHASES, Timeline } from "./timeline.js";
import { showTrace } from "./trace.js";

const EVERY_MS = 1000;
const GONE_MS = 20000; // how long a worker that has left is still shown
const LATE_MS = 5000;
const workers = new Map(); // by incarnation: {element, parts, last, at, left}
const timeline = new Timeline(byId("ended").tBodies[0], byId("axis"), showTrace);
const curves = {
  rate: new Curve("Tokens/s", (value) => count(Math.round(value))),
  running: new Curve("Running", (value) => count(value)),
  waiting: new Curve("Waiting", (value) => count(value)),
  held: new Curve("KV held", (value) => `${value.toFixed(0)} %`, 100),
};
let isFirst = true;

byId("curves").append(...Object.values(curves).map((curve) => curve.element));
byId("phases-legend").append(...PHASES.map(({ name, label }) => h("li", {}, h("i", { className: name }), label)));

async function poll() {
  const began = performance.now();
  try {
    const response = await request("fleet/state", null, AbortSignal.timeout(LATE_MS));
    show(await response.json());
    live("live", "Live");
  } catch (error) {
    if (error.status === 401) {
      live("waiting", "An API key is required");
      if (await askKey()) return void poll();
      return void setTimeout(poll, 5 * EVERY_MS);
    }
    if (!(error instanceof ApiError)) console.error(error);
    live("lost", "Connection lost, retrying");
  }
  setTimeout(poll, Math.max(EVERY_MS / 4, EVERY_MS - (performance.now() - began)));
}

function live(state, text) {
  const place = byId("live");
  if (place.dataset.state === state) return;
  place.dataset.state = state;
  place.textContent = text;
  if (!isFirst || state !== "live") announce(text);
}

async function askKey() {
  byId("key-error").textContent = key() ? "The API key is not valid for this server." : "";
  byId("api-key").value = "";
  if (!(await ask(byId("key-dialog")))) return false;
  setKey(byId("api-key").value.trim());
  return true;
}

function show(state) {
  byId("notice").hidden = !state.error;
  byId("notice").textContent = state.error ? `The router is not responding: ${state.error}.` : "";
  if (!state.error) {
    showWorkers(state.workers);
    showCurves(state.workers);
  }
  showTiles(state);
  showOpen(state);
  timeline.show(state.ended);
  byId("no-ended").hidden = state.ended.length > 0;
  byId("ended").parentElement.hidden = state.ended.length === 0;
  isFirst = false;
}

// --- figures

const count = (number) => number.toLocaleString("en");
const seconds = (time) => (time < 9.95 ? `${time.toFixed(1)} s` : time < 100 ? `${time.toFixed(0)} s` : `${(time / 60).toFixed(0)} min`);

function showTiles({ workers: found, counters, num_open: open }) {
  const sum = (of) => found.reduce((total, worker) => total + of(worker), 0);
  const held = sum(({ blocks }) => blocks.used + blocks.reserved);
  const all = sum(({ blocks }) => blocks.total);
  const looked = sum((worker) => worker.prefix_queries);
  const prefills = counters ? counters.prefill_local + counters.prefill_remote : 0;
  const tiles = [
    ["Workers live", count(found.filter((worker) => worker.state === "live").length), `of ${found.length}`],
    ["Running", count(sum((worker) => worker.running)), `${count(sum((worker) => worker.waiting))} waiting`],
    ["KV blocks held", all ? `${((100 * held) / all).toFixed(0)} %` : "–", `of ${count(all)}`],
    ["Prefix cache", looked ? `${((100 * sum((worker) => worker.prefix_hits)) / looked).toFixed(0)} %` : "–", "of tokens found"],
    ["Remote prefill", prefills ? `${((100 * counters.prefill_remote) / prefills).toFixed(0)} %` : "–", `of ${count(prefills)} prompts`],
    ["Your open requests", count(open), counters?.retries ? `${count(counters.retries)} retries in all` : ""],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, more]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, `${value} `, h("small", {}, more)))));
}

/** Shares and sums are those of the tiles. A prefill worker's tokens are not counted as generated. */
function showCurves(found) {
  const now = performance.now();
  const sum = (of) => found.reduce((total, worker) => total + of(worker), 0);
  const all = sum(({ blocks }) => blocks.total);
  curves.rate.add(now, sum(({ incarnation, role }) => (role === "prefill" ? 0 : workers.get(incarnation).rate)));
  curves.running.add(now, sum((worker) => worker.running));
  curves.waiting.add(now, sum((worker) => worker.waiting));
  curves.held.add(now, all ? (100 * sum(({ blocks }) => blocks.used + blocks.reserved)) / all : 0);
}

// --- workers

function showWorkers(found) {
  const now = performance.now();
  for (const worker of found) {
    const isNew = !workers.has(worker.incarnation);
    if (isNew) workers.set(worker.incarnation, card(worker));
    if (isNew && !isFirst) announce(`A ${worker.role} worker has joined.`);
    const shown = workers.get(worker.incarnation);
    if (!isNew && shown.last.state !== worker.state) announce(`The ${worker.role} worker at ${worker.address} is ${worker.state}.`);
    fill(shown, worker, now);
  }
  const there = new Set(found.map((worker) => worker.incarnation));
  for (const [incarnation, shown] of workers) {
    if (there.has(incarnation)) continue;
    if (shown.left === null) {
      shown.left = now;
      shown.element.dataset.state = "gone";
      shown.parts.state.textContent = "gone";
      announce(`The ${shown.last.role} worker at ${shown.last.address} is gone.`);
    } else if (now - shown.left > GONE_MS) {
      shown.element.remove();
      workers.delete(incarnation);
    }
  }
  byId("no-workers").hidden = workers.size > 0;
}

const FIGURES = ["Running", "Waiting", "Tokens/s", "Tokens queued"];

function card(worker) {
  const parts = { state: h("span", { className: "state" }), where: h("p"), said: h("p"), blocks: h("div", { className: "blocks", "aria-hidden": "true" }) };
  for (const name of ["used", "reserved", "cached"]) parts[name] = h("span", { className: name });
  parts.blocks.append(parts.used, parts.reserved, parts.cached);
  parts.figures = FIGURES.map(() => h("dd"));
  const element = h("article", { className: "worker", "aria-label": `${worker.role} worker ${worker.address}` },
    h("div", { className: "worker-head" }, h("h3", {}, worker.role), parts.state),
    parts.where, parts.blocks, parts.said,
    h("dl", { className: "figures" }, ...FIGURES.map((name, at) => h("div", {}, h("dt", {}, name), parts.figures[at]))));
  element.dataset.incarnation = worker.incarnation;
  const later = [...workers.values()].find(({ last }) => last && `${last.role} ${last.address}` > `${worker.role} ${worker.address}`);
  byId("workers").insertBefore(element, later?.element ?? null);
  return { element, parts, last: worker, at: null, rate: 0, left: null };
}

function fill(shown, worker, now) {
  const { parts, element } = shown;
  const { blocks } = worker;
  const computed = worker.role === "prefill" ? "prompt_tokens" : "generation_tokens";
  if (shown.at !== null && now > shown.at) {
    const rate = ((worker[computed] - shown.last[computed]) * 1000) / (now - shown.at);
    shown.rate = rate > 0 ? (shown.rate ? (shown.rate + rate) / 2 : rate) : shown.rate > 1 ? shown.rate / 2 : 0;
  }
  element.dataset.state = worker.state;
  parts.state.textContent = worker.state === "live" ? "live" : `${worker.state}, silent for ${seconds(worker.silent_s)}`;
  parts.where.textContent = `${worker.model} at ${worker.address}`;
  for (const name of ["used", "reserved", "cached"]) parts[name].style.width = `${blocks.total ? (100 * blocks[name]) / blocks.total : 0}%`;
  parts.said.textContent = `KV blocks: ${count(blocks.used)} used, ${blocks.reserved ? `${count(blocks.reserved)} reserved, ` : ""}${count(blocks.cached)} cached, ${count(blocks.free)} free`;
  const values = [worker.running, worker.waiting, Math.round(shown.rate), worker.waiting_tokens];
  values.forEach((value, at) => (parts.figures[at].textContent = count(value)));
  Object.assign(shown, { last: worker, at: now, left: null });
}

// --- open requests

function showOpen({ open, num_open: all }) {
  byId("no-open").hidden = open.length > 0;
  byId("open").parentElement.hidden = open.length === 0;
  byId("open-count").textContent = all > open.length ? `the oldest ${open.length} of ${count(all)}` : "";
  byId("open").tBodies[0].replaceChildren(...open.map((one) => h("tr", {},
    h("td", { className: "id", title: one.id }, one.id),
    h("td", {}, h("span", { className: "phase" }, one.phase)),
    h("td", {}, one.decode_at || "–"),
    h("td", { className: "number" }, count(one.prompt_tokens)),
    h("td", { className: "number" }, count(one.generated_tokens)),
    h("td", { className: "number" }, seconds(one.elapsed_s)))));
}

poll();
