// The chat page: one conversation at a time, its answer as it comes, and where both are kept.
//
// `current` is the conversation that is shown; `going` is the one answer that is on its way, which
// belongs to a conversation and is saved there though another one is shown.

import { answer } from "./answer.js";
import { ApiError, key, request, setKey } from "./api.js";
import { Attachments } from "./attachments.js";
import { announce, ask, byId, h, warn } from "./dom.js";
import { addExport } from "./export_dialog.js";
import { MessageView } from "./message_view.js";
import { NO_OPTIONS, Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { keep, kept, Store } from "./store.js";
import { TokenMeter } from "./token_meter.js";
import { userText } from "./user_text.js";

const SAVE_MS = 1000; // an answer that is on its way
const RETRY_MS = 3000; // while there is no model
const SPOKEN = 500; // characters of an answer that are read out
const scroll = byId("scroll");
const field = byId("prompt");
const picker = byId("model");
const store = await Store.open();
let current = fresh();
let going = null; // {conversation, message, stop}
let views = [];
let followsEnd = true;

let models = new Map(); // those that generate text, as /v1/models describes them, by name

const settings = new Settings(
  (options) => {
    current.options = options;
    keep("options", options);
    if (current.messages.length) save(current);
  },
  () => loadModels(),
);
const sidebar = new Sidebar({ choose, begin, rename, remove });
const attachments = new Attachments(countDraft);
const meter = new TokenMeter();
addExport(() => current, () => store.all());

store.onchange = async ({ id, isFinal }) => {
  if (!isFinal) return; // folds and a name that is being typed would be lost with each part of an answer
  const found = await store.get(id);
  const isMine = going?.conversation === current || document.querySelector(".edit"); // kept as it is here
  if (!found || id !== current.id || isMine) return showList();
  current = found;
  settings.show(current.options);
  showMessages(followsEnd);
  showState();
  return showList();
};

function fresh() {
  return { id: newId(), title: "", named: false, updated: Date.now(), model: kept("model", ""), options: { ...NO_OPTIONS, ...kept("options", {}) }, messages: [] };
}

function newId() {
  // crypto.randomUUID is for pages with https only.
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function save(conversation) {
  try {
    await store.put(conversation, going?.conversation !== conversation);
  } catch {
    warn("This conversation cannot be saved: the browser's storage is full.");
  }
}

async function showList() {
  sidebar.show(await store.all(), current.id);
}

// --- which conversation

function show(conversation) {
  current = conversation;
  keep("current", conversation.id);
  settings.show(conversation.options);
  if (models.has(conversation.model)) picker.value = conversation.model;
  showMessages();
  showState();
  return showList();
}

async function choose(id) {
  const found = going?.conversation.id === id ? going.conversation : await store.get(id);
  if (!found) return;
  restore(found);
  return show(found);
}

/** An answer that was on its way when its page was closed has been stopped. */
function restore(conversation) {
  for (const message of conversation.messages) {
    if (message.role === "assistant" && !message.finish && going?.message !== message) message.finish = "stopped";
  }
}

function begin() {
  show(fresh());
  field.focus();
}

async function rename(id, title) {
  const found = id === current.id ? current : await store.get(id);
  if (!found) return;
  Object.assign(found, { title, named: true });
  await save(found);
  await showList();
}

async function remove(id) {
  if (going?.conversation.id === id) await stop();
  await store.delete(id);
  if (id === current.id) await show(fresh());
  else await showList();
  announce("Deleted.");
}

// --- what is shown

function showMessages(follows = true) {
  views = current.messages.map((message, place) => view(message, place));
  byId("messages").replaceChildren(...views.map((one) => one.element));
  followsEnd = follows;
  toEnd();
}

function view(message, place) {
  const made = new MessageView(message, {
    edit: (text) => isReady() && send(text, message.files, place),
    regenerate: () => isReady() && askAgain(place),
    results: () => isReady() && sendResults(message),
    wantsResults: () => message.finish === "tool_calls" && place === current.messages.length - 1,
    drawn: toEnd,
  });
  if (going?.message === message) made.going = true;
  return made;
}

function showState() {
  const isGoing = going !== null;
  const model = models.get(picker.value);
  const chats = isForChat(model);
  byId("welcome").hidden = current.messages.length > 0;
  byId("welcome-title").textContent = chats ? "What can I help with?" : "How does your text begin?";
  byId("no-chat").hidden = chats;
  byId("no-chat").textContent = chats ? "" : `${model.id} has no chat template, so it cannot chat. It continues your text instead; the system message and tools are ignored.`;
  field.placeholder = chats ? "Message" : "Text to continue";
  settings.recommend(model?.default_sampling_params);
  meter.show(current, model);
  if (!isGoing && document.activeElement === byId("stop")) field.focus(); // it is about to go
  byId("stop").hidden = !isGoing;
  byId("send").hidden = isGoing;
  document.title = `${current.title || "Chat"} · pdserve`;
}

function toEnd() {
  if (followsEnd) scroll.scrollTop = scroll.scrollHeight;
  byId("to-end").hidden = followsEnd;
}

scroll.addEventListener("scroll", () => {
  followsEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  byId("to-end").hidden = followsEnd;
});
new ResizeObserver(toEnd).observe(scroll);
byId("to-end").onclick = () => {
  followsEnd = true;
  toEnd();
  field.focus();
};

// --- asking

/** Whether a message can be sent; if not, the page shows what to do. */
function isReady() {
  if (!settings.read()) {
    settings.toggle(true);
    return false;
  }
  if (picker.value) return true;
  warn("No model is available.");
  loadModels();
  return false;
}

/** A new message at the end, or at `place` instead of what is there and follows. */
async function send(text, files, place = current.messages.length) {
  await stop();
  current.messages.splice(place, Infinity, { role: "user", content: text, ...(files?.length && { files }) });
  const [first] = current.messages;
  if (!current.named) current.title = (first.content || first.files[0].name).split("\n")[0].slice(0, 60);
  await respond();
}

/** The answer at `place` once more, without what follows it. */
async function askAgain(place) {
  await stop();
  current.messages.splice(place);
  await respond();
}

async function sendResults(message) {
  await stop();
  for (const call of message.tool_calls) {
    call.result = call.draft ?? "";
    delete call.draft;
  }
  await respond();
}

async function respond() {
  const conversation = current;
  conversation.model = picker.value;
  conversation.updated = Date.now();
  const model = models.get(picker.value); // the list may change while the model answers
  const before = [...conversation.messages];
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], model: conversation.model };
  conversation.messages.push(message);
  const controller = new AbortController();
  let ended;
  const done = new Promise((resolve) => (ended = resolve));
  const mine = { conversation, message, done, stop: () => controller.abort() };
  going = mine;
  const shown = () => (current === conversation ? views.find((one) => one.message === message) : null);
  try {
    warn("");
    showMessages();
    showState();
    await save(conversation);
    await showList();
    announce("The model is answering.");
    let saved = performance.now();
    await answer(conversation, before, message, isForChat(model), controller.signal, () => {
      shown()?.grow();
      if (performance.now() - saved < SAVE_MS) return;
      saved = performance.now();
      save(conversation);
    });
    announce(message.content ? `Answer: ${message.content.slice(0, SPOKEN)}` : "The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      message.finish = "stopped";
      announce("Stopped.");
    } else {
      message.finish = "error";
      message.error = words(error);
      announce(message.error);
    }
  }
  message.finish ??= "stop";
  if (going === mine) going = null;
  try {
    const its = shown();
    if (its) its.going = false;
    showState();
    if (model?.default_sampling_params === null) loadModels(); // they are known from the first answer on
    await save(conversation);
  } finally {
    ended();
  }
}

/** What went wrong, for a person. A server that asks for a key gets one. */
function words(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return "Something went wrong on this page. See the browser's console for details.";
  }
  if (error.status === 401) setTimeout(() => askKey(), 0);
  if (error.code === "context_length_exceeded") return `${error.message} Start a new chat, or edit an earlier message.`;
  return error.message;
}

async function stop() {
  if (!going) return;
  const { done, stop: abort } = going;
  abort();
  await done;
}

// --- the server

let retry = null;

async function loadModels() {
  clearTimeout(retry);
  let found;
  try {
    found = await (await request("v1/models")).json();
  } catch (error) {
    picker.replaceChildren(h("option", { value: "" }, "No model"));
    if (error.status === 401) askKey();
    else {
      warn(error.message);
      retry = setTimeout(loadModels, RETRY_MS);
    }
    return;
  }
  const usable = found.data.filter(({ capabilities }) => capabilities?.completion !== false);
  usable.sort((a, b) => isForChat(b) - isForChat(a)); // the first is chosen for a new conversation
  models = new Map(usable.map((one) => [one.id, one]));
  const names = [...models.keys()];
  picker.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (!names.length) {
    picker.append(h("option", { value: "" }, "No model yet"));
    retry = setTimeout(loadModels, RETRY_MS);
  }
  warn(names.length ? "" : "No model that generates text is available yet.");
  picker.value = [current.model, kept("model", "")].find((name) => names.includes(name)) ?? names[0] ?? "";
  showState();
}

/** Whether a model, or one that is not in the list any more, can chat. */
function isForChat(model) {
  return model?.capabilities?.chat !== false;
}

let asking = false;

async function askKey() {
  if (asking) return;
  asking = true;
  byId("key-error").textContent = key() ? "The API key is not valid for this server." : "";
  byId("api-key").value = "";
  const isGiven = await ask(byId("key-dialog"));
  asking = false;
  if (!isGiven) return;
  setKey(byId("api-key").value.trim());
  await loadModels();
  field.focus();
}

picker.addEventListener("change", () => {
  current.model = picker.value;
  keep("model", picker.value);
  showState();
  countDraft();
});

// --- the keyboard

function grow() {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, innerHeight * 0.4)}px`;
}

function countDraft() {
  meter.draft(userText({ content: field.value, files: attachments.files }));
}

field.addEventListener("input", () => {
  grow();
  countDraft();
});
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = field.value.trim();
  if (!(text || attachments.files.length) || going || !isReady()) return;
  field.value = "";
  grow();
  send(text, attachments.take());
});
byId("stop").onclick = stop;
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && going && !document.querySelector("dialog[open]")) stop();
});
byId("skip").onclick = (event) => {
  event.preventDefault(); // the page's base is not its address
  field.focus();
};

if (kept("current", "")) await choose(kept("current", ""));
await show(current);
await loadModels();
