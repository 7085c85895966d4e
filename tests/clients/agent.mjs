// A task that libraries for agents run to its end by themselves:
// node agent.mjs PACKAGES ai|anthropic URL FILE TASK

import { writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const [packages, kind, url, file, task] = process.argv.slice(2);
const require = createRequire(`${packages}/`);
const load = (name) => import(require.resolve(name));
const fields = { file_path: { type: "string" }, content: { type: "string" } };
const inputSchema = { type: "object", properties: fields, required: Object.keys(fields) };
const write = ({ file_path, content }) => {
  if (file_path !== file) throw new Error(`asked to write ${file_path}`);
  writeFileSync(file_path, content);
  return "written";
};

if (kind === "ai") {
  const { generateText, jsonSchema, stepCountIs, tool } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const model = createOpenAICompatible({ name: "here", baseURL: `${url}/v1` })("mock");
  const write_file = tool({ inputSchema: jsonSchema(inputSchema), execute: write });
  const tools = { write_file };
  const { text } = await generateText({ model, tools, prompt: task, stopWhen: stepCountIs(5) });
  console.log(text);
} else {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const api = new Anthropic({ baseURL: url, apiKey: "any" });
  const tool = { name: "write_file", input_schema: inputSchema, run: write, parse: (input) => input };
  const message = await api.beta.messages.toolRunner({
    model: "mock",
    max_tokens: 1000,
    messages: [{ role: "user", content: task }],
    tools: [tool],
  });
  console.log(message.content.map((block) => block.text ?? "").join(""));
}
