// What goes over the wire: requests to the server, with its key if it wants one, and streamed answers.

import { $ } from "./answer.js";

export async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem("edgespec-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    await closed($("key"));
    sessionStorage.setItem("edgespec-key", $("key-text").value.trim());
    return ask(path, options);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answered ${response.status}`);
}

/** Shows a dialog; the value of the button that closes it. */
export function closed(dialog) {
  dialog.returnValue = ""; // Escape says nothing
  dialog.showModal();
  return new Promise((done) => (dialog.onclose = () => done(dialog.returnValue)));
}

/** The events of a streamed answer, parsed; of comments their text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) {
        yield { comment: part.slice(2) };
        continue;
      }
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

/** Messages as the server takes them: files stand before the text, each in a fence that it does not have. */
export function wired(messages) {
  return messages.map(({ role, text, files = [] }) => {
    const parts = files.map(({ name, text }) => {
      let fence = "```";
      while (text.includes(fence)) fence += "`";
      return `${name}:\n${fence}\n${text}\n${fence}`;
    });
    return { role, content: [...parts, text].filter(Boolean).join("\n\n") };
  });
}

/** What a file holds; an error says why it cannot be sent. */
export async function textOf(file) {
  if (file.size > 3 * 2 ** 20) throw new Error(`${file.name} is too large: 3 MiB is the most.`); // a request may have 4
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const text = await file.arrayBuffer().then((data) => decoder.decode(data)).catch(() => "\0");
  if (text.includes("\0")) throw new Error(`${file.name} is no text in UTF-8, and only texts can be attached.`);
  return text;
}
