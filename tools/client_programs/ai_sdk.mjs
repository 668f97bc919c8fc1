// AI SDK, streamed, with a tool in a loop. The argument is the model's kind.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, stepCountIs, streamText, tool } from "ai";

const { TASK_URL: url, TASK_MODEL: name, TASK_INSTRUCTIONS: system, TASK_PIECES: pieces } = process.env;
const at = { baseURL: `${url}/v1`, apiKey: "none" };
const kinds = {
  responses: () => createOpenAI(at)(name),
  unstored: () => createOpenAI(at)(name),
  chat: () => createOpenAI(at).chat(name),
  compatible: () => createOpenAICompatible({ ...at, name: "local" })(name),
  anthropic: () => createAnthropic(at)(name),
};
const kind = process.argv[2];
const providerOptions = kind === "unstored" ? { openai: { store: false } } : undefined;
const calls = [];
const stock_level = tool({
  description: "Look up how many pieces of an article are in stock.",
  inputSchema: jsonSchema({
    type: "object", properties: { article: { type: "string" } }, required: ["article"], additionalProperties: false,
  }),
  execute: ({ article }) => {
    calls.push(article);
    return `${pieces} pieces of ${article} are in stock`;
  },
});

const messages = [];
const answers = [];
for (const content of [process.env.TASK_FIRST, process.env.TASK_SECOND]) {
  messages.push({ role: "user", content });
  const result = streamText({
    model: kinds[kind](), system, messages, tools: { stock_level }, stopWhen: stepCountIs(4), maxRetries: 0,
    maxOutputTokens: 300, providerOptions, onError: ({ error }) => { throw error; },
  });
  answers.push(await result.text);
  messages.push(...(await result.response).messages);
}
console.log(JSON.stringify({ calls, answers }));
