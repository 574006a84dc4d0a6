// The server's API: the key, errors in words for people, and streams of events.

/** Begins the name of whatever a browser keeps: servers may share an origin. */
export const SERVER = `pdserve ${new URL(document.baseURI).pathname}`;
const KEY = `${SERVER} key`;
let memory = ""; // in a browser that keeps nothing

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return memory;
  }
}

/** Keeps the key until the tab is closed. */
export function setKey(value) {
  memory = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // `memory` has it
  }
}

/** What the server refused, or that it did not answer (status 0). */
export class ApiError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The Response, if the server has answered well. Throws ApiError; AbortError if it was stopped. */
export async function request(path, body, signal) {
  const headers = {};
  // A header takes no other letters; such a key is no key of the server.
  if (key()) headers.authorization = `Bearer ${/^[\x21-\x7e]+$/.test(key()) ? key() : "?"}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // no JSON: a proxy's own page
  }
  const wait = response.headers.get("retry-after");
  let message = error.message ?? `The server responded with status ${response.status}.`;
  if (wait && response.status !== 401) message += ` Try again in ${wait} s.`;
  return new ApiError(message, response.status, error.code ?? "");
}

/** The data of each server-sent event, parsed, until [DONE]. Throws ApiError. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection was lost before the answer was complete.");
      }
      if (part.done) throw new ApiError("The answer ended early.");
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, 0, event.error.code ?? "");
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
