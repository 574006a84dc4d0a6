// Formulas in TeX: where they are in Markdown, and their pictures by KaTeX, which is loaded at the
// first formula. KaTeX makes MathML, which browsers draw without a style sheet or fonts.

import { library } from "./library.js";

// The bounds keep text with many beginnings and no end from costing quadratic time.
const DISPLAY = /^(?:\$\$([^$]{1,4000}?)\$\$|\\\[([^]{1,4000}?)\\\])/;
// As pandoc: no space inside the dollars and no letter or digit after them, so "$5 or $6" is text.
const INLINE = /^(?:\\\(([^]{1,2000}?)\\\)|\$(?![\s$])((?:\\[^\n]|[^\\$\n]){1,500}?)(?<!\s)\$(?![\w$]))/;
const MAX_TEX = 4000; // also of a formula that the text states as HTML
const BLOCK = new RegExp(`^ {0,3}(?:${DISPLAY.source.slice(1)})[ \\t]*(?:\\n|$)`);
const BLOCK_START = /\n {0,3}(?:\$\$|\\\[)/;
const INLINE_START = /\$|\\[[(]/;
const RULES = { output: "mathml", throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 1000 };

const katex = library(async () => {
  await import("./katex.min.js"); // a classic script: it defines a global
  return globalThis.katex;
});

/** Extensions of marked; `escaped` makes text harmless in HTML. */
export function formulaRules(escaped) {
  const rule = (name, level, start, pattern, isDisplay) => ({
    name,
    level,
    start: (text) => text.search(start),
    tokenizer(text) {
      const found = pattern.exec(text);
      const tex = (found?.[1] ?? found?.[2])?.trim();
      return tex ? { type: name, raw: found[0], tex } : undefined;
    },
    renderer: ({ raw, tex }) => `<span data-math="${isDisplay ? "block" : "inline"}" data-tex="${escaped(tex)}">${escaped(raw.trim())}</span>`,
  });
  return [
    rule("formulaBlock", "block", BLOCK_START, BLOCK, true),
    rule("formulaDisplay", "inline", INLINE_START, DISPLAY, true),
    rule("formula", "inline", INLINE_START, INLINE, false),
  ];
}

/** Draws a formula into its element, which shows its source while KaTeX loads and if it is wrong. */
export function drawFormula(place, ready) {
  if (place.dataset.tex?.length > MAX_TEX) return;
  const made = katex(ready);
  if (!made) return;
  const drawn = new DocumentFragment();
  const isDisplay = place.dataset.math === "block";
  try {
    made.render(place.dataset.tex, drawn, { ...RULES, displayMode: isDisplay });
  } catch {
    return; // no TeX, or an unknown command
  }
  place.replaceChildren(drawn);
}
