// Shows one message: its Markdown, its reasoning, its tool calls, and what can be done with it.

import { chip } from "./attachments.js";
import { copyButton, h, icon, iconButton } from "./dom.js";
import { rendered } from "./markdown.js";

const LEAST_MS = 50; // between two drawings of an answer that grows

export class MessageView {
  #drawn = 0; // when, and how long it took
  #cost = 0;
  #timer = null;
  #shown = {}; // what each part shows now
  #again = () => {
    this.#shown.thought = this.#shown.text = undefined;
    this.draw();
  };

  /** `actions`: edit(text), regenerate(), results(). */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.isGoing = false;
    this.element = h("article", { className: `message ${message.role}`, "aria-label": message.role === "user" ? "You" : "Answer" });
    if (message.role === "user") this.#showQuestion();
    else this.#makeAnswer();
  }

  // --- of the person

  #showQuestion() {
    const { content, files } = this.message;
    this.element.replaceChildren(
      ...(files ?? []).map((file) => chip(file)),
      h("div", { className: "bubble", hidden: !content }, content),
      h("div", { className: "actions" },
        copyButton("Copy the message", () => content),
        iconButton("edit", "Edit the message", () => this.#edit())));
  }

  #edit() {
    const field = h("textarea", { value: this.message.content, "aria-label": "Edit the message", rows: Math.min(12, this.message.content.split("\n").length + 1) });
    const close = () => {
      this.#showQuestion();
      this.element.querySelector("[aria-label='Edit the message']").focus();
    };
    const send = () => (field.value.trim() || this.message.files?.length) && this.actions.edit(field.value.trim());
    const form = h("form", { className: "edit", onsubmit: (event) => (event.preventDefault(), send()) },
      field,
      h("div", { className: "dialog-buttons" },
        h("button", { type: "button", className: "button", onclick: close }, "Cancel"),
        h("button", { type: "submit", className: "button primary" }, "Send")));
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.element.replaceChildren(form);
    field.focus();
  }

  // --- of the model

  #makeAnswer() {
    this.thought = h("div", { className: "markdown" });
    this.summary = h("summary", {}, "Reasoning");
    this.fold = h("details", { className: "reasoning", hidden: true }, this.summary, this.thought);
    this.text = h("div", { className: "markdown answer" });
    this.waiting = h("p", { className: "waiting", hidden: true }, h("span"), h("span"), h("span"), h("span", { className: "hidden" }, "Waiting for the answer"));
    this.cards = h("div", { className: "cards" });
    this.error = h("p", { className: "error", hidden: true });
    this.facts = h("span", { className: "facts" });
    this.buttons = h("div", { className: "actions" },
      copyButton("Copy the answer", () => this.message.content),
      iconButton("again", "Answer again", () => this.actions.regenerate()),
      this.facts);
    this.element.setAttribute("aria-busy", false);
    this.element.append(this.fold, this.text, this.waiting, this.cards, this.error, this.buttons);
    this.draw();
  }

  /** The answer grows (`isGoing`), or has ended. */
  set going(isGoing) {
    this.isGoing = isGoing;
    this.element.setAttribute("aria-busy", isGoing);
    this.draw();
  }

  /** Draws the answer soon; more calls until then count as one. */
  grow() {
    this.#timer ??= setTimeout(() => this.draw(), Math.max(LEAST_MS, 4 * this.#cost - (performance.now() - this.#drawn)));
  }

  draw() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const began = performance.now();
    const { content, reasoning, error } = this.message;
    this.#markdown("thought", reasoning ?? "");
    this.#markdown("text", content);
    this.fold.hidden = !reasoning;
    this.summary.textContent = this.isGoing && !content ? "Thinking …" : "Reasoning";
    this.waiting.hidden = !this.isGoing || Boolean(content || reasoning || this.message.tool_calls?.length);
    this.#drawCards();
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.buttons.hidden = this.isGoing;
    this.facts.textContent = facts(this.message);
    this.#drawn = performance.now();
    this.#cost = this.#drawn - began;
    this.actions.drawn?.();
  }

  /** Draws from the first block that differs, so that what a person has selected stays. */
  #markdown(name, text) {
    if (this.#shown[name] === text) return;
    this.#shown[name] = text;
    const place = this[name];
    const made = [...rendered(text, this.#again).childNodes];
    let same = 0;
    while (same < made.length && same < place.childNodes.length && made[same].isEqualNode(place.childNodes[same])) same++;
    while (place.childNodes.length > same) place.lastChild.remove();
    place.append(...made.slice(same));
  }

  #drawCards() {
    const calls = this.message.tool_calls ?? [];
    const wants = !this.isGoing && this.actions.wantsResults?.(this.message);
    const shown = JSON.stringify([calls, wants]);
    if (this.#shown.cards === shown) return;
    this.#shown.cards = shown;
    this.cards.replaceChildren(...calls.map((call) => card(call, wants)));
    if (!calls.length || !wants) return;
    this.cards.append(h("button", { type: "button", className: "button primary", onclick: () => this.actions.results() }, "Send the results"));
  }
}

/** A call of a tool: its name, its arguments, and its result, which a person may write. */
function card(call, isWritable) {
  const made = h("section", { className: "card", "aria-label": `Call of the tool ${call.name}` },
    h("div", { className: "card-head" }, icon("tool"), h("strong", {}, call.name), h("span", { className: "hint" }, call.result === undefined ? "called" : "answered")),
    h("pre", { tabIndex: 0, role: "group", "aria-label": "Arguments" }, pretty(call.arguments)));
  if (isWritable) {
    const field = h("textarea", { rows: 2, value: call.draft ?? "" });
    field.addEventListener("input", () => (call.draft = field.value));
    made.append(h("label", { className: "card-result" }, "Result", field));
  } else if (call.result !== undefined) {
    made.append(h("div", { className: "card-result" }, "Result", h("pre", { tabIndex: 0, role: "group", "aria-label": "Result" }, call.result)));
  }
  return made;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}

/** What an answer took, in words. */
function facts({ model, usage, first_s: first, total_s: total, finish }) {
  const tokens = usage?.completion_tokens;
  const said = [model];
  if (tokens) said.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (tokens > 1 && total - first > 0.05) said.push(`${((tokens - 1) / (total - first)).toFixed(0)}/s`);
  if (first !== undefined) said.push(`first after ${first.toFixed(2)} s`);
  if (finish === "length") said.push("cut at its token limit");
  if (finish === "stopped") said.push("stopped");
  return said.filter(Boolean).join(" · ");
}
