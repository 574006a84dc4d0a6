// Text files that a person adds to the next message, shown as chips above its field.

import { announce, byId, h, icon, iconButton, warn } from "./dom.js";

const MAX_BYTES = 256 * 1024; // of one file
const MAX_FILES = 10;

export class Attachments {
  files = []; // {name, text}

  /** `changed()` is called when a file has come or gone. */
  constructor(changed) {
    this.changed = changed;
    const picker = byId("files");
    byId("attach").onclick = () => picker.click();
    picker.onchange = () => {
      this.#add([...picker.files]);
      picker.value = ""; // the same file may be chosen again
    };
    for (const [target, kind, source] of [[document.querySelector("main"), "drop", "dataTransfer"], [byId("prompt"), "paste", "clipboardData"]]) {
      target.addEventListener(kind, (event) => {
        if (!event[source].files.length) return;
        event.preventDefault();
        this.#add([...event[source].files]);
      });
    }
    document.querySelector("main").addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
  }

  /** Hands over the files: none is attached any more. */
  take() {
    const { files } = this;
    this.files = [];
    this.#show();
    return files;
  }

  async #add(chosen) {
    const wrong = [];
    for (const file of chosen) {
      const text = file.size <= MAX_BYTES ? await textOf(file) : null;
      // After the wait: others may be added at the same time.
      if (this.files.length >= MAX_FILES) {
        wrong.push(`A message can have at most ${MAX_FILES} files.`);
        break;
      }
      if (text !== null) this.files.push({ name: file.name, text });
      else if (file.size > MAX_BYTES) wrong.push(`${file.name} is larger than ${size(MAX_BYTES)}.`);
      else wrong.push(`${file.name} is not a UTF-8 text file.`);
    }
    this.#show();
    warn(wrong.join(" "));
    if (!wrong.length) announce(`${this.files.length} file${this.files.length === 1 ? "" : "s"} attached.`);
    byId("prompt").focus();
  }

  #show() {
    byId("chips").replaceChildren(...this.files.map((file) => h("li", {}, chip(file, iconButton("close", `Remove ${file.name}`, () => {
      this.files.splice(this.files.indexOf(file), 1);
      this.#show();
      byId("prompt").focus();
    })))));
    this.changed();
  }
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null; // other bytes, or a folder
  }
}

const size = (bytes) => (bytes < 1024 ? `${bytes} B` : `${Math.round(bytes / 1024)} KiB`);

/** The name and the size of a text file. */
export function chip({ name, text }, ...buttons) {
  return h("span", { className: "chip" }, icon("file"), h("span", { className: "chip-name", title: name }, name), h("span", { className: "hint" }, size(new Blob([text]).size)), ...buttons);
}
