// Asks the model for the next answer of a conversation, and fills a message with it as it comes.

import { events, request } from "./api.js";
import { userText } from "./user_text.js";

const CONTINUED = 256; // tokens that a model without a chat template adds, unless the settings say how many

/** The body of the request for what follows `messages`. */
function chatBody(conversation, messages) {
  const { system, tools, ...numbers } = conversation.options;
  const body = { model: conversation.model, messages: [], stream: true, stream_options: { include_usage: true } };
  if (system) body.messages.push({ role: "system", content: system });
  for (const message of messages) {
    const { role, content, reasoning, tool_calls: calls } = message;
    if (role !== "assistant") {
      body.messages.push({ role, content: userText(message) });
      continue;
    }
    if (!content && !calls?.length) continue; // it failed, or was stopped at once
    const turn = { role, content };
    if (reasoning) turn.reasoning_content = reasoning;
    if (calls?.length) turn.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    body.messages.push(turn);
    for (const call of calls ?? []) {
      body.messages.push({ role: "tool", tool_call_id: call.id, content: call.result ?? "" });
    }
  }
  if (tools?.length) body.tools = tools;
  return Object.assign(body, chosen(numbers));
}

/** The same for a model without a chat template: it continues all texts so far as one. A person's
    text after the model's begins a line. */
function completionBody({ model, options }, messages) {
  const { system, tools, ...numbers } = options;
  const prompt = messages.map((message, at) => (message.role === "user" ? `${at ? "\n" : ""}${userText(message)}` : message.content)).join("");
  return { model, prompt, stream: true, stream_options: { include_usage: true }, max_tokens: CONTINUED, ...chosen(numbers) };
}

function chosen(options) {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== null));
}

/** Fills `message`, and calls `changed` after each piece. `chats`: the model has a chat template.
    Throws ApiError, or AbortError. */
export async function answer(conversation, messages, message, chats, signal, changed) {
  const began = performance.now();
  const seconds = () => (performance.now() - began) / 1000;
  const [path, body] = chats ? ["v1/chat/completions", chatBody] : ["v1/completions", completionBody];
  const response = await request(path, body(conversation, messages), signal);
  for await (const event of events(response)) {
    if (event.usage) message.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta ?? { content: choice.text };
    if (content || thought || calls?.length) message.first_s ??= seconds();
    if (thought) message.reasoning += thought;
    if (content) message.content += content;
    for (const part of calls ?? []) addCall(message.tool_calls, part);
    message.total_s = seconds();
    if (choice.finish_reason) message.finish = choice.finish_reason;
    changed();
  }
}

function addCall(calls, { index, id, function: named }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  const call = calls[index];
  call.id ||= id ?? "";
  call.name += named?.name ?? "";
  call.arguments += named?.arguments ?? "";
}
