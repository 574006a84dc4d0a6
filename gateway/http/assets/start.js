// The page of the API: asks for a key if the server wants one, then shows the OpenAPI document with
// requests that can be tried. The key is kept as on the other pages, until the tab is closed.
"use strict";
(() => {
  const KEY = `pdserve ${location.pathname.replace(/docs$/, "")} key`;
  const field = document.getElementById("key");
  const state = document.getElementById("key-state");
  const file = document.getElementById("document");
  let key = stored(() => sessionStorage.getItem(KEY));

  /** What the browser has kept, if it keeps anything. */
  function stored(read) {
    try {
      return read() ?? "";
    } catch {
      return "";
    }
  }

  /** A header takes no other letters; such a key is no key of the server. */
  const bearer = () => `Bearer ${/^[\x21-\x7e]+$/.test(key) ? key : "?"}`;

  /** A plug-in of Swagger UI: the path of a route is no link, because it is inside of a button. */
  const withoutNestedLinks = ({ React }) => ({
    components: { DeepLink: ({ text }) => React.createElement("span", null, text) },
  });

  async function load() {
    let spec;
    try {
      const answer = await fetch("openapi.json", { headers: key ? { authorization: bearer() } : {}, cache: "no-store" });
      if (answer.status === 401) {
        state.textContent = key ? "The API key is not valid for this server." : "This server asks for an API key.";
        field.focus();
        return;
      }
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      spec = JSON.parse(text);
      // A link to the route would go without the key.
      file.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
      file.hidden = false;
    } catch {
      state.textContent = "The server cannot be reached.";
      return;
    }
    state.textContent = key ? "The key is used for all requests of this page." : "";
    SwaggerUIBundle({
      spec,
      dom_id: "#api",
      deepLinking: true,
      validatorUrl: null,
      docExpansion: "list",
      defaultModelsExpandDepth: 0,
      plugins: [withoutNestedLinks],
      requestInterceptor: (request) => {
        if (key && !request.headers.Authorization) request.headers.authorization = bearer();
        return request;
      },
    });
  }

  document.getElementById("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = field.value.trim();
    stored(() => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)));
    load();
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => stored(() => localStorage.getItem("pdserve.theme"));
  const color = () => document.documentElement.classList.toggle("dark-mode", (chosen() || (dark.matches ? "dark" : "light")) === "dark");
  dark.addEventListener("change", color);
  addEventListener("storage", color);
  color();
  field.value = key;
  load();
})();
