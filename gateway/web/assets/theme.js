// Light or dark, before the page is drawn: the system's choice until a person makes one.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem("pdserve.theme");
    } catch {
      return null; // a browser that keeps nothing
    }
  };
  let chosen = kept();
  const now = () => chosen ?? (dark.matches ? "dark" : "light");

  function show() {
    root.dataset.theme = now();
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      const other = now() === "dark" ? "light" : "dark";
      button.setAttribute("aria-label", `Switch to ${other} colors`);
      button.title = `Switch to ${other} colors`;
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
      svg.setAttribute("aria-hidden", "true");
      use.setAttribute("href", `web/icons.svg#${other === "dark" ? "moon" : "sun"}`);
      svg.append(use);
      button.replaceChildren(svg);
    }
  }

  show();
  dark.addEventListener("change", show);
  addEventListener("storage", () => {
    chosen = kept();
    show();
  });
  addEventListener("DOMContentLoaded", () => {
    show();
    document.addEventListener("click", (event) => {
      if (!event.target.closest("[data-theme-toggle]")) return;
      chosen = now() === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("pdserve.theme", chosen);
      } catch {
        // it lasts as long as the page
      }
      show();
    });
  });
})();
