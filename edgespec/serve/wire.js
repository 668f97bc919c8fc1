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

/**
 * Messages as the server takes them: files stand before the text, each text in a fence that it does not have.
 * `picture` makes a part of a data URL.
 */
export function wired(messages, picture = (url) => ({ type: "image_url", image_url: { url } })) {
  return messages.map(({ role, text, files = [] }) => {
    const pictures = files.filter(({ data }) => data).map(({ data }) => picture(data));
    const others = files.filter(({ data }) => !data);
    const parts = others.map(({ name, text }) => {
      if (text === undefined) return `(The picture ${name} is no longer here.)`;
      let fence = "```";
      while (text.includes(fence)) fence += "`";
      return `${name}:\n${fence}\n${text}\n${fence}`;
    });
    const content = [...parts, text].filter(Boolean).join("\n\n");
    return { role, content: pictures.length ? [...pictures, { type: "text", text: content }] : content };
  });
}

/** What a file holds, a text or a picture's data URL; an error says why it cannot be sent. */
export async function contentOf(file) {
  const isPicture = /^image\/(png|jpeg|webp|gif)$/.test(file.type);
  const most = isPicture ? 20 : 3; // a request may have 32 MiB, and pictures grow by a third
  if (file.size > most * 2 ** 20) throw new Error(`${file.name} is too large: ${most} MiB is the most.`);
  if (isPicture) {
    const reader = new FileReader();
    reader.readAsDataURL(file);
    await new Promise((done) => (reader.onloadend = done));
    if (reader.error) throw new Error(`${file.name} cannot be read.`);
    return { data: reader.result };
  }
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const text = await file.arrayBuffer().then((data) => decoder.decode(data)).catch(() => "\0");
  if (text.includes("\0")) throw new Error(`${file.name} is no text in UTF-8, nor a PNG, JPEG, WebP or GIF picture.`);
  return { text };
}
