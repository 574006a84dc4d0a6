// The list of conversations, which a phone shows over the page.

import { ask, byId, h, iconButton } from "./dom.js";

export class Sidebar {
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

  show(conversations, current) {
    this.list.replaceChildren(...conversations.map((one) => {
      const isCurrent = one.id === current;
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
        }, title),
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
