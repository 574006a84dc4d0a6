// One request's path through the roles, as a picture: a lane for each role, and time to the right.
//
// Until the first token and after it time has two scales, since an answer takes much longer than
// what comes before it.

import { request } from "./api.js";
import { byId, h, svg } from "./dom.js";
import { time } from "./timeline.js";

const LANE_PX = 46;
const BAR_PX = 18;
const NAMES_PX = 92; // for the names of the lanes
const LEAST_PX = 2; // of a bar
const FIRST_PART = 0.7; // of the width, until the first token
const LANES = ["gateway", "router", "prefill", "transfer", "decode"];

/** The lane and the color of a phase, by its name in /v1/traces. */
const PHASES = {
  receive: { color: "prepare", label: "receive the body", lane: () => "gateway" },
  prepare: { color: "prepare", label: "template and tokens", lane: () => "gateway" },
  wait: { color: "queue", label: "wait", lane: () => "router" },
  route: { color: "queue", label: "choose workers", lane: () => "router" },
  queue: { color: "queue", label: "queue", lane: computedAt },
  prefill: { color: "prefill", label: "compute the prompt", lane: computedAt },
  transfer: { color: "transfer", label: "keys and values", lane: () => "transfer" },
  first_token: { color: "first", label: "first token", lane: () => "decode" },
  return: { color: "rest", label: "way back", lane: () => "gateway" },
  decode: { color: "decode", label: "further tokens", lane: () => "decode" },
};

/** The role that computes the prompt. */
function computedAt({ attempts }) {
  return attempts.at(-1)?.prefill ? "prefill" : "decode";
}

/** Shows the path of a request in the dialog. */
export async function showTrace(id) {
  byId("trace-id").textContent = id;
  byId("trace-facts").textContent = "Looking for it …";
  byId("trace-picture").replaceChildren();
  byId("trace-phases").hidden = true;
  byId("trace-dialog").showModal();
  const isShown = () => byId("trace-id").textContent === id; // the dialog may show another one by now
  try {
    const trace = await (await request(`v1/traces/${encodeURIComponent(id)}`)).json();
    if (isShown()) draw(trace);
  } catch (error) {
    if (isShown()) byId("trace-facts").textContent = error.message;
  }
}

function draw(trace) {
  const known = trace.phases.filter(({ name }) => Object.hasOwn(PHASES, name)); // a newer gateway may have more
  const phases = known.map(({ name, start_ms: start, duration_ms: took }) => ({ ...PHASES[name], lane: PHASES[name].lane(trace), start, took }));
  byId("trace-facts").textContent = facts(trace);
  byId("trace-picture").replaceChildren(picture(phases, trace, byId("trace-picture").clientWidth));
  byId("trace-phases").hidden = false;
  byId("trace-phases").tBodies[0].replaceChildren(...phases.filter(({ took }) => took > 0).map(({ color, label, lane, start, took }) => h("tr", {},
    h("td", {}, h("i", { className: color }), label),
    h("td", {}, lane),
    h("td", { className: "number" }, time(start / 1000)),
    h("td", { className: "number" }, time(took / 1000)))));
}

function facts({ model, attempts, prompt_tokens: prompt, completion_tokens: answer, transport, finish_reason: finish, total_ms: total }) {
  const last = attempts.at(-1);
  return [
    model,
    `${prompt} → ${answer} tokens`,
    last && `decode at ${last.decode}`,
    last?.prefill && `prefill at ${last.prefill}`,
    transport && `over ${transport}`,
    attempts.length > 1 && `${attempts.length} attempts, the last is shown`,
    finish,
    `${time(total / 1000)} in all`,
  ].filter(Boolean).join(" · ");
}

function picture(phases, { time_to_first_token_ms: first, total_ms: total }, width) {
  const lanes = LANES.filter((lane) => phases.some((phase) => phase.lane === lane));
  const wide = width - NAMES_PX;
  const hasRest = first !== null && total > first;
  const turn = hasRest ? FIRST_PART * wide : wide;
  const until = Math.max(first ?? total, 0.001);
  const x = (ms) => NAMES_PX + Math.min(wide, ms <= until || !hasRest ? (turn * ms) / until : turn + ((wide - turn) * (ms - until)) / (total - until));
  const middle = (lane) => (lanes.indexOf(lane) + 0.5) * LANE_PX;
  const height = lanes.length * LANE_PX + 22;
  const made = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words(phases) });
  for (const lane of lanes) {
    const took = phases.filter((phase) => phase.lane === lane).reduce((sum, phase) => sum + phase.took, 0);
    made.append(
      svg("line", { class: "lane", x1: NAMES_PX, x2: width, y1: middle(lane), y2: middle(lane) }),
      svg("text", { class: "lane-name", x: 0, y: middle(lane) - 2 }, lane),
      svg("text", { class: "lane-time", x: 0, y: middle(lane) + 14 }, time(took / 1000)));
  }
  if (hasRest) made.append(svg("line", { class: "turn", x1: x(until), x2: x(until), y1: 0, y2: height - 20 }));
  let before = null;
  for (const { lane, color, label, start, took } of phases.filter((phase) => phase.took > 0)) {
    if (before && before !== lane) made.append(arrow(x(start), middle(before), middle(lane)));
    before = lane;
    const bar = svg("rect", { class: color, x: x(start), y: middle(lane) - BAR_PX / 2, width: Math.max(LEAST_PX, x(start + took) - x(start)), height: BAR_PX, rx: 3 });
    bar.append(svg("title", {}, `${label}: ${time(took / 1000)}`));
    made.append(bar);
  }
  const mark = (at, anchor, text) => svg("text", { class: "lane-time", x: at, y: height - 4, "text-anchor": anchor }, text);
  made.append(mark(NAMES_PX, "start", "0"));
  if (hasRest) made.append(mark(x(until), "end", `first token ${time(until / 1000)}`));
  if (hasRest || first === null) made.append(mark(width, "end", time(total / 1000)));
  return made;
}

/** From one lane to another, at the edge of the bar there. */
function arrow(x, from, to) {
  const down = to > from ? 1 : -1;
  const tip = to - (down * BAR_PX) / 2;
  return svg("path", { class: "handover", d: `M${x} ${from + (down * BAR_PX) / 2}V${tip}M${x - 4} ${tip - 5 * down}L${x} ${tip}L${x + 4} ${tip - 5 * down}` });
}

function words(phases) {
  return phases.filter(({ took }) => took > 0).map(({ lane, label, took }) => `${lane}: ${label} ${time(took / 1000)}`).join(", ");
}
