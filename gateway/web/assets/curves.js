// Curves of the fleet's figures over the last minutes, as this page has seen them.

import { h, svg } from "./dom.js";

const SPAN_MS = 5 * 60 * 1000;
const LEAST_MS = 60 * 1000; // of the width, while the page is new
const GAP_MS = 5000; // a longer silence interrupts the curve
const WIDTH = 300; // of the drawing, in its own units
const HEIGHT = 50;

export class Curve {
  #points = []; // {at, value}, oldest first
  #line = svg("path", { class: "curve-line" });
  #area = svg("path", { class: "curve-area" });
  #picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.#area, this.#line);
  #now = h("dd");

  /** `words(value)` is a value for people; `most`: the top of the scale, by default the highest value. */
  constructor(name, words, most = null) {
    this.name = name;
    this.words = words;
    this.most = most;
    this.element = h("div", { className: "curve" }, h("dl", {}, h("dt", {}, name), this.#now), this.#picture);
  }

  /** Adds a value at a time in milliseconds, and draws. */
  add(at, value) {
    this.#points.push({ at, value });
    while (this.#points[0].at < at - SPAN_MS) this.#points.shift();
    const highest = Math.max(...this.#points.map((one) => one.value));
    const top = this.most ?? Math.max(1, highest);
    const span = Math.max(LEAST_MS, at - this.#points[0].at);
    const x = (one) => (WIDTH * (1 - (at - one.at) / span)).toFixed(1);
    const y = (one) => (HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, one.value / top)).toFixed(1);
    let line = "";
    let area = "";
    let last = null;
    for (const one of this.#points) {
      const isNew = !last || one.at - last.at > GAP_MS;
      if (isNew && last) area += `V${HEIGHT}Z`;
      line += `${isNew ? "M" : "L"}${x(one)} ${y(one)}`;
      area += isNew ? `M${x(one)} ${HEIGHT}L${x(one)} ${y(one)}` : `L${x(one)} ${y(one)}`;
      last = one;
    }
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", `${area}V${HEIGHT}Z`);
    this.#now.replaceChildren(`${this.words(value)} `, h("small", {}, `highest ${this.words(highest)}`));
    this.#picture.setAttribute("aria-label", `${this.name} over the last 5 minutes: now ${this.words(value)}, highest ${this.words(highest)}`);
  }
}
