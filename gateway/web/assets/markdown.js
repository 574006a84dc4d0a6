// Text of a model as Markdown, harmless: whatever it says, nothing runs and nothing is fetched.

import { copyButton, h } from "./dom.js";
import { Marked } from "./marked.esm.js";
import DOMPurify from "./purify.es.js";

const TAGS = [
  "a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i",
  "kbd", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th",
  "thead", "tr", "ul",
];
const SAFE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "align", "start", "data-lang"],
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

/** A DocumentFragment. */
export function rendered(text) {
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
    const box = h("div", { className: "code-block" },
      h("div", { className: "code-head" }, h("span", {}, name), copyButton("Copy the code", () => code)));
    pre.tabIndex = 0; // one that is wide is scrolled with the keyboard
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", `Code, ${name}`);
    pre.replaceWith(box);
    box.append(pre);
  }
  return made;
}
