// Conversations as files: Markdown to read, JSON with all that the browser stores.

import { fileText } from "./user_text.js";

export function asMarkdown(conversations) {
  return conversations.map((one) => [`# ${one.title || "New chat"}`, ...one.messages.map(message)].join("\n\n")).join("\n\n---\n\n") + "\n";
}

function message({ role, content, files, reasoning, tool_calls: calls, model, error }) {
  if (role === "user") return ["## You", ...(files ?? []).map(fileText), content].filter(Boolean).join("\n\n");
  const parts = [`## ${model || "Answer"}`];
  if (reasoning) parts.push(reasoning.trim().split("\n").map((line) => `> ${line}`.trimEnd()).join("\n"));
  if (content) parts.push(content.trim());
  for (const call of calls ?? []) {
    parts.push(fileText({ name: `Call of the tool ${call.name}`, text: call.arguments }));
    if (call.result !== undefined) parts.push(fileText({ name: "Result", text: call.result }));
  }
  if (error) parts.push(`Error: ${error}`);
  return parts.join("\n\n");
}

export function asJson(conversations) {
  return `${JSON.stringify({ version: 1, conversations }, null, 2)}\n`;
}

/** A name for the file of one conversation, or of several. */
export function fileName(conversations, ending) {
  const [{ title }] = conversations;
  const name = conversations.length > 1 ? "conversations" : title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  return `${name || "chat"}.${ending}`;
}
