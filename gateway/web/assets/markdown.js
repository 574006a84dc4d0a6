// Text of a model as Markdown, harmless: whatever it says, nothing runs and nothing foreign is fetched.

import { colored } from "./code_colors.js";
import { copyButton, h } from "./dom.js";
import { drawFormula, formulaRules } from "./formulas.js";
import { Marked } from "./marked.esm.js";
import DOMPurify from "./purify.es.js";

const TAGS = [
  "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
  "kbd", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th",
  "thead", "tr", "ul",
];
const PLAIN = ["align", "start", "data-lang", "data-math", "data-tex"]; // attributes that are no address
const SAFE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", ...PLAIN],
  ADD_URI_SAFE_ATTR: PLAIN, // the pattern below is for links alone
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) =>
  text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: formulaRules(escaped),
  renderer: {
    // An image would tell its server who reads this: a link instead.
    image({ href, text }) {
      return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
    code({ text, lang }) {
      const name = escaped((lang ?? "").trim().split(/\s/)[0]);
      return `<pre data-lang="${name}"><code>${escaped(text)}\n</code></pre>\n`;
    },
  },
});

/** A DocumentFragment. What needs a library that is not loaded yet is plain text: then `ready` is
    called when it is worth rendering the text again. */
export function rendered(text, ready) {
  const made = DOMPurify.sanitize(marked.parse(text), SAFE);
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of made.querySelectorAll("table")) {
    const box = h("div", { className: "wide-content", tabIndex: 0, role: "group", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const pre of made.querySelectorAll("pre")) {
    const name = pre.dataset.lang || "text";
    const code = pre.textContent;
    const colors = colored(code, name, ready);
    if (colors) (pre.querySelector("code") ?? pre).replaceChildren(colors);
    const box = h("div", { className: "code-block" },
      h("div", { className: "code-head" }, h("span", {}, name), copyButton("Copy the code", () => code)));
    pre.tabIndex = 0; // one that is wide is scrolled with the keyboard
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", `Code, ${name}`);
    pre.replaceWith(box);
    box.append(pre);
  }
  for (const formula of made.querySelectorAll("[data-math]")) {
    drawFormula(formula, ready);
    if (formula.dataset.math !== "block") continue;
    formula.tabIndex = 0; // a wide one is scrolled, too
    formula.setAttribute("role", "group");
    formula.setAttribute("aria-label", "Formula");
  }
  return made;
}
