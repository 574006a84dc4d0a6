// How much of the model's context a conversation takes: what the last answer's usage says, and the
// draft if it is long, which the server counts.

import { request } from "./api.js";
import { byId } from "./dom.js";

const LONG = 500; // characters of a draft that are worth a request
const PAUSE_MS = 600; // after the last change of a draft

export class TokenMeter {
  #used = { tokens: 0, isAll: true };
  #draft = 0;
  #counting = null; // {timer, controller} of the draft's count
  #model = { id: "", max_model_len: 0 };

  /** `model`: an entry of /v1/models, if there is one. */
  show(conversation, model) {
    const last = conversation.messages.findLastIndex(({ usage }) => usage);
    const usage = conversation.messages[last]?.usage;
    this.#used = { tokens: usage ? usage.prompt_tokens + usage.completion_tokens : 0, isAll: last === conversation.messages.length - 1 };
    this.#model = model ?? { id: "", max_model_len: 0 };
    this.#draw();
  }

  /** Counts a draft, attached files included. */
  draft(text) {
    clearTimeout(this.#counting?.timer);
    this.#counting?.controller.abort();
    this.#counting = null;
    if (text.length < LONG || !this.#model.id) {
      this.#draft = 0;
      return this.#draw();
    }
    const controller = new AbortController();
    this.#counting = { controller, timer: setTimeout(() => this.#count(text, controller.signal), PAUSE_MS) };
  }

  async #count(text, signal) {
    try {
      const answer = await request("tokenize", { model: this.#model.id, prompt: text, add_special_tokens: false }, signal);
      this.#draft = (await answer.json()).count;
    } catch {
      return; // a newer draft, or a server that does not answer: sending says so
    }
    if (!signal.aborted) this.#draw();
  }

  #draw() {
    const most = this.#model.max_model_len;
    const tokens = this.#used.tokens + this.#draft;
    byId("tokens").hidden = !tokens || !most;
    byId("tokens").classList.toggle("full", tokens > most);
    Object.assign(byId("tokens-meter"), { max: most || 1, high: 0.8 * most || 1, value: tokens });
    const words = `${this.#used.isAll ? "" : "over "}${tokens.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
    byId("tokens-text").textContent = `${words}${this.#draft ? " with this message" : ""}`;
  }
}
