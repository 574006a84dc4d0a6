// The panel of settings: sampling, the system message, tools, and the API key.

import { key, setKey } from "./api.js";
import { byId } from "./dom.js";

export const NO_OPTIONS = { system: "", temperature: null, top_p: null, max_tokens: null, seed: null, tools: null };
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

export class Settings {
  /** `changed(options)` is called with what a person has set; `keyChanged()` after a new key. */
  constructor(changed, keyChanged) {
    this.panel = byId("settings");
    this.opener = byId("open-settings");
    this.opener.onclick = () => this.toggle(this.panel.hidden);
    byId("close-settings").onclick = () => this.toggle(false);
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.toggle(false);
    });
    for (const name of [...NUMBERS, "system", "tools"]) {
      byId(name).addEventListener("change", () => {
        const options = this.read();
        if (options) changed(options);
      });
    }
    byId("key").addEventListener("change", () => {
      setKey(byId("key").value.trim());
      keyChanged();
    });
  }

  toggle(isOpen) {
    this.panel.hidden = !isOpen;
    this.opener.setAttribute("aria-expanded", isOpen);
    if (isOpen) byId("key").value = key();
    (isOpen ? byId("close-settings") : this.opener).focus();
  }

  /** Shows options, except in the field that has the focus: a person may be typing there. */
  show(options) {
    const tools = options.tools && JSON.stringify(options.tools, null, 2);
    for (const [name, value] of Object.entries({ ...NO_OPTIONS, ...options, tools })) {
      const field = byId(name);
      if (field !== document.activeElement) field.value = value ?? "";
    }
    this.read();
  }

  /** What the model recommends is shown where a person has set nothing. */
  recommend(params) {
    for (const name of NUMBERS) byId(name).placeholder = params?.[name] ?? "";
  }

  /** The options, or null while something is wrong, which is said. */
  read() {
    const options = { ...NO_OPTIONS, system: byId("system").value.trim() };
    const wrong = [];
    for (const name of NUMBERS) {
      const field = byId(name);
      const isRight = field.checkValidity() && !(name === "top_p" && field.value !== "" && Number(field.value) === 0);
      field.setAttribute("aria-invalid", !isRight);
      if (!isRight) wrong.push(`${field.labels[0].firstChild.textContent.trim()} is out of its range.`);
      else if (field.value !== "") options[name] = Number(field.value);
    }
    const text = byId("tools").value.trim();
    if (text) {
      const tools = parsed(text);
      if (Array.isArray(tools)) options.tools = tools;
      else wrong.push("Tools must be a JSON array.");
      byId("tools").setAttribute("aria-invalid", !Array.isArray(tools));
    }
    byId("settings-error").textContent = wrong.join(" ");
    return wrong.length ? null : options;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
