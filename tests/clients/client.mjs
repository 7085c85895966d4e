// OpenAI's client for Node: node --input-type=module - URL MODEL TOOL < client.mjs

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model, tool] = process.argv.slice(2);
const api = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0 });
const asked = { model, max_tokens: 1500, temperature: 1, seed: 1 };
const messages = [{ role: "user", content: "ride" }];
const tools = [JSON.parse(tool)];

async function joined(stream, piece) {
  let text = "";
  for await (const event of stream) text += piece(event) ?? "";
  return text;
}

const plain = { ...asked, prompt: "on and ", max_tokens: 20 };
const { text } = (await api.completions.create(plain)).choices[0];
assert(text);
const completion = await api.completions.create({ ...plain, stream: true });
assert.equal(await joined(completion, (event) => event.choices[0].text), text);

const answer = (await api.chat.completions.create({ ...asked, messages })).choices[0].message;
assert(answer.content);
const chat = await api.chat.completions.create({ ...asked, messages, stream: true });
assert.equal(await joined(chat, (event) => event.choices[0].delta.content), answer.content);

const forced = { tools, tool_choice: "required", parallel_tool_calls: false };
const called = (await api.chat.completions.create({ ...asked, ...forced, messages })).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const [call] = called.message.tool_calls;
assert(JSON.parse(call.function.arguments).gear);
const helper = api.chat.completions.stream({ ...asked, ...forced, messages });
const streamed = (await helper.finalChatCompletion()).choices[0].message.tool_calls[0];
assert.equal(streamed.function.arguments, call.function.arguments);
const result = { role: "tool", tool_call_id: call.id, content: "done" };
const history = [...messages, called.message, result];
const last = await api.chat.completions.create({ ...asked, tools, tool_choice: "none", messages: history });
assert(last.choices[0].message.content);

const schema = tools[0].function.parameters;
const json_schema = { name: "ride", strict: true, schema };
const structured = await api.chat.completions.parse({
  ...asked,
  messages,
  response_format: { type: "json_schema", json_schema },
});
assert(JSON.parse(structured.choices[0].message.content).gear);

const response = await api.responses.create({
  model,
  input: "ride",
  max_output_tokens: 1500,
  text: { format: { type: "json_schema", ...json_schema } },
});
assert(JSON.parse(response.output_text).gear);

await assert.rejects(api.completions.create({ ...plain, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(api.completions.create({ ...plain, top_p: 7 }), (error) => {
  return error instanceof OpenAI.BadRequestError && error.param === "top_p";
});
