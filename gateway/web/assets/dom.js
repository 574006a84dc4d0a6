// Makes elements, and copies text.

/** An element; `props` are properties, or attributes where the name has a dash or is "role". */
export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** An element of a drawing, with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** One of icons.svg. */
export function icon(name) {
  return svg("svg", { "aria-hidden": "true" }, svg("use", { href: `web/icons.svg#${name}` }));
}

/** A button that shows an icon alone. */
export function iconButton(name, label, onclick, props = {}) {
  return h("button", { type: "button", className: "icon-button", title: label, "aria-label": label, onclick, ...props }, icon(name));
}

export const byId = (id) => document.getElementById(id);

/** Says something to those who hear the page. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Shows and says what went wrong; an empty text takes it away. */
export function warn(text) {
  byId("warning").textContent = text;
  if (text) announce(text);
}

/** Copies text; pages without https have only the old way. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = h("textarea", { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies what `text` gives, and says that it has. */
export function copyButton(label, text, props = {}) {
  const button = iconButton("copy", label, async () => {
    try {
      await copy(text());
    } catch {
      warn("The browser does not allow this page to copy text.");
      return;
    }
    announce("Copied.");
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  }, props);
  return button;
}

/** Shows a dialog; true if it was confirmed. */
export function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.querySelector("[data-cancel]").onclick = () => dialog.close("");
    dialog.querySelector("form").onsubmit = () => (dialog.returnValue = "confirmed");
    dialog.onclose = () => resolve(dialog.returnValue === "confirmed");
    dialog.querySelector("[type=submit]").value = "confirmed";
    dialog.showModal();
  });
}
