// The dialog that saves this conversation, or all, as a file.

import { ask, byId, h, warn } from "./dom.js";
import { asJson, asMarkdown, fileName } from "./export.js";

const FORMATS = { md: [asMarkdown, "text/markdown"], json: [asJson, "application/json"] };

/** `current()` and `all()` give conversations. */
export function addExport(current, all) {
  byId("open-export").onclick = async () => {
    const dialog = byId("export-dialog");
    byId("export-this").disabled = !current().messages.length;
    byId(current().messages.length ? "export-this" : "export-all").checked = true;
    if (!(await ask(dialog))) return;
    const { scope, format } = Object.fromEntries(new FormData(dialog.querySelector("form")));
    const conversations = scope === "all" ? await all() : [current()];
    if (!conversations.length) return warn("There is no conversation to export.");
    const [write, type] = FORMATS[format];
    save(fileName(conversations, format), new Blob([write(conversations)], { type }));
  };
}

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000); // a browser may ask first where to save it
}
