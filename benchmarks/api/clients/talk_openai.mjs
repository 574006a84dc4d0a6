// openai (npm): chat with streaming, tools and a JSON schema.
import OpenAI from "openai";

const env = process.env;
const client = new OpenAI({ baseURL: `${env.BASE_URL}/v1`, apiKey: env.API_KEY ?? "none" });
const model = env.MODEL;
const { WEATHER, CITY, QUESTION } = JSON.parse(env.CONVERSATION);
const tools = [{ type: "function", function: { name: "get_weather", parameters: WEATHER } }];

async function streaming() {
  const stream = await client.chat.completions.create({
    model, stream: true, max_tokens: 30,
    messages: [{ role: "user", content: "Name three rivers." }],
  });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text.length > 0;
}

async function toolsStreamed() {
  const runner = client.chat.completions.stream({
    model, tools, tool_choice: "required", max_tokens: 400,
    messages: [{ role: "user", content: QUESTION }],
  });
  const done = await runner.finalChatCompletion();
  const message = done.choices[0].message;
  const call = message.tool_calls[0];
  const found = JSON.parse(call.function.arguments);
  const answer = await client.chat.completions.create({
    model, tools, tool_choice: "none", max_tokens: 30,
    messages: [
      { role: "user", content: QUESTION },
      message,
      { role: "tool", tool_call_id: call.id, content: "18 degrees" },
    ],
  });
  return "city" in found && "unit" in found && answer.choices[0].message.content.length > 0;
}

async function schema() {
  const answer = await client.chat.completions.create({
    model, max_tokens: 400,
    messages: [{ role: "user", content: "Describe Paris as JSON." }],
    response_format: { type: "json_schema", json_schema: { name: "city", schema: CITY, strict: true } },
  });
  const found = JSON.parse(answer.choices[0].message.content);
  return Number.isInteger(found.inhabitants) && typeof found.name === "string";
}

const found = {};
for (const check of [streaming, toolsStreamed, schema]) {
  try {
    found[check.name] = await check();
  } catch (error) {
    found[check.name] = String(error).slice(0, 300);
  }
}
const ok = Object.values(found).every((value) => value === true);
console.log(JSON.stringify({ ok, ...found }));
process.exit(ok ? 0 : 1);
