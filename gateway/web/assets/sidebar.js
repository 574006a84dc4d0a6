// The list of conversations, which a phone shows over the page.

import { ask, byId, h, iconButton } from "./dom.js";
import { find } from "./search.js";

export class Sidebar {
  #conversations = [];
  #current = "";

  /** `actions`: choose(id), rename(id, title), remove(id), begin(). */
  constructor(actions) {
    this.actions = actions;
    this.panel = byId("sidebar");
    this.opener = byId("open-sidebar");
    this.list = byId("conversations");
    this.narrow = matchMedia("(max-width: 800px)");
    this.opener.onclick = () => this.toggle(true);
    byId("close-sidebar").onclick = () => this.toggle(false);
    byId("new").onclick = () => {
      actions.begin();
      this.#leave();
    };
    byId("search").addEventListener("input", () => this.#draw());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.narrow.matches) return;
      event.stopPropagation();
      this.toggle(false);
    });
    this.narrow.addEventListener("change", () => this.toggle(false, false));
    this.toggle(false, false);
  }

  /** Only a narrow page hides it. */
  toggle(isOpen, moveFocus = true) {
    this.panel.classList.toggle("open", isOpen);
    this.panel.inert = this.narrow.matches && !isOpen;
    document.querySelector("main").inert = this.narrow.matches && isOpen;
    this.opener.setAttribute("aria-expanded", isOpen);
    if (moveFocus) (isOpen ? byId("close-sidebar") : this.opener).focus();
  }

  #leave() {
    if (this.narrow.matches) this.toggle(false, false);
    byId("prompt").focus();
  }

  /** `current`: the id of the conversation that is shown. */
  show(conversations, current) {
    this.#conversations = conversations;
    this.#current = current;
    this.#draw();
  }

  #draw() {
    const query = byId("search").value;
    const found = this.#conversations.map((one) => [one, find(one, query)]).filter(([, where]) => where !== null);
    byId("nothing-found").hidden = !query.trim() || found.length > 0;
    this.list.replaceChildren(...found.map(([one, where]) => {
      const isCurrent = one.id === this.#current;
      const title = one.title || "New chat";
      return h("li", { className: isCurrent ? "current" : "" },
        h("button", {
          type: "button",
          className: "conversation",
          title,
          "aria-current": isCurrent ? "true" : null,
          onclick: () => {
            this.actions.choose(one.id);
            this.#leave();
          },
        }, title, where && h("small", {}, where)),
        iconButton("edit", `Rename ${title}`, () => this.#rename(one)),
        iconButton("delete", `Delete ${title}`, () => this.#remove(one)));
    }));
  }

  async #rename({ id, title }) {
    byId("title").value = title;
    const isConfirmed = await ask(byId("rename-dialog"));
    const name = byId("title").value.trim();
    if (isConfirmed && name) this.actions.rename(id, name);
  }

  async #remove({ id, title }) {
    byId("delete-name").textContent = title || "New chat";
    if (await ask(byId("delete-dialog"))) this.actions.remove(id);
  }
}
