// The AI SDK: streamed sessions with tools over its providers openai-compatible, openai (chats and
// responses) and anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import fs from "node:fs";
import { z } from "zod";

const { BASE_URL, PROVIDER } = process.env;
const baseURL = `${BASE_URL}/v1`;
const apiKey = "a-key";
const models = {
  "openai-compatible": () => createOpenAICompatible({ name: "pdserve", baseURL, apiKey })("agent"),
  "openai chat": () => createOpenAI({ baseURL, apiKey }).chat("agent"),
  "openai responses": () => createOpenAI({ baseURL, apiKey }).responses("agent"),
  anthropic: () => createAnthropic({ baseURL, apiKey })("agent"),
};
const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
const tools = {
  list_files: tool({
    description: "List the files of a folder.",
    inputSchema: z.object({ folder: z.string() }),
    execute: async ({ folder }) => fs.readdirSync(folder).sort().join("\n"),
  }),
  write_file: tool({
    description: "Write a text file.",
    inputSchema: z.object({ path: z.string(), content: z.string() }),
    execute: async ({ path, content }) => {
      fs.writeFileSync(path, content);
      return { characters: content.length };
    },
  }),
};
const tooLong = "[[recall]]" + " The tide comes in, and the boats rise.".repeat(5000);
let thoughts = "";

async function turn(messages, content) {
  const said = [...messages, { role: "user", content }];
  let failure;
  const result = streamText({
    model: models[PROVIDER](), messages: said, tools, providerOptions,
    system: "You are brief.",
    stopWhen: stepCountIs(5), maxRetries: 0, timeout: { chunkMs: 3000 },
    onError: ({ error }) => { failure = error; },
  });
  for await (const part of result.fullStream) {
    if (part.type === "reasoning-delta") thoughts += part.text;
  }
  if (failure) throw failure;
  const answered = (await result.steps).flatMap((step) => step.response.messages);
  return [await result.text, [...said, ...answered]];
}

let [listed, messages] = await turn([], "[[list .]]");
assert.match(listed, /The tool has answered: harbour-lights.txt/);
[, messages] = await turn(messages, "[[write long.txt]]");
let recalled;
[recalled, messages] = await turn(messages, "[[recall]]");
assert.match(recalled, /turn 3 with 2 results/);
// OpenAI's own provider reads no reasoning of chats, and of responses only its summary.
if (!PROVIDER.startsWith("openai ")) assert.match(thoughts, /I look at what was said/);
await assert.rejects(turn(messages, tooLong), /context length|too long/);
[recalled] = await turn(messages, "[[recall]]");
assert.match(recalled, /turn 4/);
