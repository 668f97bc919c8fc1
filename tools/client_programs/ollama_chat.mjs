// The ollama package of JavaScript, streamed, with a tool.
import { Ollama } from "ollama";

const { TASK_URL: host, TASK_MODEL: model, TASK_INSTRUCTIONS: system, TASK_PIECES: pieces } = process.env;
const client = new Ollama({ host });
const parameters = {
  type: "object", properties: { article: { type: "string" } }, required: ["article"], additionalProperties: false,
};
const description = "Look up how many pieces of an article are in stock.";
const tools = [{ type: "function", function: { name: "stock_level", description, parameters } }];
const calls = [];
const messages = [{ role: "system", content: system }];

async function answer(question) {
  messages.push({ role: "user", content: question });
  for (let turn = 0; turn < 4; turn++) {
    const message = { role: "assistant", content: "", tool_calls: [] };
    for await (const piece of await client.chat({ model, messages, tools, stream: true })) {
      message.content += piece.message.content;
      message.tool_calls.push(...(piece.message.tool_calls ?? []));
    }
    messages.push(message);
    if (message.tool_calls.length === 0) return message.content;
    for (const { function: { name, arguments: { article } } } of message.tool_calls) {
      calls.push(article);
      messages.push({ role: "tool", tool_name: name, content: `${pieces} pieces of ${article} are in stock` });
    }
  }
  throw new Error(`the model calls the tool again and again: ${calls}`);
}

const answers = [await answer(process.env.TASK_FIRST), await answer(process.env.TASK_SECOND)];
console.log(JSON.stringify({ calls, answers }));
