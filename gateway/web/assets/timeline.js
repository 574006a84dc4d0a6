// The phases of finished requests, each a row from its arrival; one scale for all rows.

import { h } from "./dom.js";

const MAX_ROWS = 60;

/** In the order in which they follow each other; `of` gives seconds. */
export const PHASES = [
  { name: "prepare", label: "tokenize", of: (one) => one.prepared_s ?? 0 },
  { name: "queue", label: "queue", of: (one) => one.queue_s },
  { name: "prefill", label: "prefill", of: (one) => one.prefill_s },
  { name: "transfer", label: "KV transfer", of: (one) => one.transfer_s },
  { name: "first", label: "first token", of: (one) => one.first_step_s },
  { name: "rest", label: "other", of: unaccounted },
  { name: "decode", label: "decode", of: (one) => (one.first_token_s === null ? 0 : one.elapsed_s - one.first_token_s) },
];

/** Seconds until the first token that belong to no other phase. */
function unaccounted(one) {
  const first = one.first_token_s ?? one.elapsed_s;
  const known = (one.prepared_s ?? 0) + one.queue_s + one.prefill_s + one.transfer_s + one.first_step_s;
  return Math.max(0, first - known);
}

const GOOD = new Set(["stop", "length", "tool_calls"]);
export const time = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(2)} s`);
const ago = (seconds) => (seconds < 60 ? `${seconds.toFixed(0)} s ago` : `${(seconds / 60).toFixed(0)} min ago`);

export class Timeline {
  #rows = new Map(); // by what tells requests apart: one that has ended changes no more
  #scale = 0;

  /** `open(id)` is called with the request that a person wants to see. */
  constructor(body, axis, open) {
    this.body = body;
    this.axis = axis;
    this.open = open;
  }

  /** Latest first. */
  show(ended) {
    const shown = ended.slice(0, MAX_ROWS);
    const scale = round(Math.max(0.01, ...shown.map((one) => one.elapsed_s)));
    if (scale !== this.#scale) {
      this.#scale = scale;
      this.axis.replaceChildren(...[0, 0.5, 1].map((part) => h("span", {}, part ? time(part * scale) : "0")));
      this.#rows.clear();
    }
    const rows = new Map();
    for (const one of shown) {
      const name = `${one.id} ${one.elapsed_s}`;
      const row = this.#rows.get(name) ?? this.#row(one);
      row.cells[0].textContent = ago(one.ended_s);
      rows.set(name, row);
    }
    this.#rows = rows;
    const wanted = [...rows.values()];
    if (wanted.length !== this.body.rows.length || wanted.some((row, at) => row !== this.body.rows[at])) this.body.replaceChildren(...wanted);
  }

  #row(one) {
    const parts = PHASES.map(({ name, label, of }) => ({ name, label, took: of(one) })).filter(({ took }) => took > 0);
    const words = parts.map(({ label, took }) => `${label} ${time(took)}`).join(", ");
    const bars = parts.map(({ name, took }) => {
      const bar = h("span", { className: name });
      bar.style.width = `${(100 * took) / this.#scale}%`;
      return bar;
    });
    const isGood = one.finish.split(",").every((finish) => GOOD.has(finish));
    return h("tr", {},
      h("td"),
      h("td", { className: "id", title: one.id }, h("button", { type: "button", className: "link", "aria-haspopup": "dialog", onclick: () => this.open(one.id) }, one.id)),
      h("td", {}, isGood ? one.prefill_at || "–" : h("span", { className: "failed" }, one.finish.toLowerCase().replaceAll("_", " "))),
      h("td", { className: "number" }, `${one.prompt_tokens} → ${one.generated_tokens}`),
      h("td", { title: words }, h("div", { className: "timeline", "aria-hidden": "true" }, ...bars), h("span", { className: "hidden" }, words)),
      h("td", { className: "number" }, time(one.elapsed_s)));
  }
}

/** The next of 1, 2, 5, 10, ... that is not smaller. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
