// Colors of code, by highlight.js, which is loaded at the first code block that names a language.

import { library } from "./library.js";
import DOMPurify from "./purify.es.js";

const MAX_CHARS = 50000; // longer code stays plain
const SPANS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

const highlighter = library(async () => (await import("./highlight.min.js")).default);

/** A DocumentFragment, or null if the code stays plain: for now, until `ready` is called, or
    because its language is unknown. */
export function colored(code, language, ready) {
  if (language === "text" || code.length > MAX_CHARS) return null;
  const made = highlighter(ready);
  if (!made?.getLanguage(language)) return null;
  return DOMPurify.sanitize(made.highlight(code, { language, ignoreIllegals: true }).value, SPANS);
}
