// The page of `edgespec serve`: one conversation, kept in this tab alone. Text is only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const NAMES = {
  target: "by the target itself",
  model: "drafted by the drafter",
  ngram: "drafted from this text",
  history: "drafted from what was learned",
  grammar: "forced by the format, or by the budget of thoughts",
};
const state = { model: null, messages: [], stop: null, plain: 0, measured: false };

// ---- the server ----------------------------------------------------------------------------------------

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem("edgespec-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401) {
    await askForKey();
    return ask(path, options);
  }
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function askForKey() {
  return new Promise((done) => {
    $("key").showModal();
    $("key").onclose = () => {
      sessionStorage.setItem("edgespec-key", $("key-text").value.trim());
      done();
    };
  });
}

/** The events of a streamed answer, parsed; of comments their text. */
async function* events(response) {
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

// ---- an answer: its text, and the token that each character belongs to ------------------------------------

class Answer {
  constructor(parent) {
    this.text = "";
    this.ends = [];
    this.sources = [];
    this.blocks = []; // what is shown: {start, end, kind, node}
    this.parent = parent;
    this.scheduled = false;
  }

  add(tokens) {
    for (const { text, source, reasoning } of tokens) {
      if (reasoning) this.thoughts().append(text);
      else this.text += text;
      this.ends.push(this.text.length);
      this.sources.push(source);
    }
    if (!this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(() => this.show());
    }
  }

  /** Where thoughts are shown: folded, before the text. */
  thoughts() {
    if (!this.folded) {
      const details = document.createElement("details");
      details.appendChild(document.createElement("summary")).textContent = "Thoughts";
      this.folded = details.appendChild(document.createElement("p"));
      this.folded.className = "quiet";
      this.parent.prepend(details);
    }
    return this.folded;
  }

  /** Renders the blocks that changed: while an answer grows, that is the last. */
  show() {
    this.scheduled = false;
    const blocks = blocksOf(this.text);
    let same = 0;
    const alike = (a, b) => a && a.start === b.start && a.end === b.end && a.kind === b.kind;
    while (same < blocks.length && alike(this.blocks[same], blocks[same])) same++;
    for (const old of this.blocks.splice(same)) old.node.remove();
    for (const block of blocks.slice(same)) {
      block.node = this.node(block);
      this.parent.append(block.node);
      this.blocks.push(block);
    }
    follow();
  }

  node({ kind, start, end, level }) {
    if (kind === "code") {
      const pre = document.createElement("pre");
      this.range(pre.appendChild(document.createElement("code")), start, end);
      return pre;
    }
    const node = document.createElement(kind === "heading" ? `h${Math.min(level + 1, 4)}` : "p");
    if (kind === "item") node.classList.add("item", ...(level ? ["deep"] : []));
    this.inline(node, start, end);
    return node;
  }

  /** Text with `code`, **strong** and *emphasised* parts. */
  inline(node, start, end) {
    const marks = /(`+)([^`\n]+)\1|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
    const text = this.text.slice(start, end);
    let at = 0;
    for (const found of text.matchAll(marks)) {
      this.range(node, start + at, start + found.index);
      const inner = found[2] ?? found[3] ?? found[4];
      const side = (found[0].length - inner.length) / 2;
      const kind = found[2] !== undefined ? "code" : found[3] !== undefined ? "strong" : "em";
      const from = start + found.index + side;
      this.range(node.appendChild(document.createElement(kind)), from, from + inner.length);
      at = found.index + found[0].length;
    }
    this.range(node, start + at, end);
  }

  /** Characters from start to end, cut at tokens; drafted ones are marked with their source. */
  range(node, start, end) {
    let index = this.ends.findIndex((end) => end > start);
    while (start < end) {
      const stop = Math.min(this.ends[index] ?? end, end);
      const text = this.text.slice(start, stop);
      const source = this.sources[index];
      if (source === undefined || source === "target") {
        node.append(text);
      } else {
        const span = document.createElement("span");
        span.dataset.source = source;
        span.title = nameOf(source);
        span.textContent = text;
        node.append(span);
      }
      start = stop;
      index++;
    }
  }

  counts() {
    const counts = {};
    for (const source of this.sources) counts[source] = (counts[source] ?? 0) + 1;
    return counts;
  }
}

/** Paragraphs, headings, items of lists, and code, as ranges of the text. */
function blocksOf(text) {
  const blocks = [];
  let open = null; // the fence of a code block that has not ended
  let at = 0;
  for (const line of text.split("\n")) {
    const start = at;
    const end = start + line.length;
    at = end + 1;
    const last = blocks.at(-1);
    const fence = /^ {0,8}(```+|~~~+)/.exec(line);
    if (open) {
      if (fence && fence[1].startsWith(open)) open = null;
      else last.end = end;
      continue;
    }
    const heading = /^(#{1,6})\s+/.exec(line);
    const item = /^(\s*)(?:[-*+]|\d+[.)])\s+/.exec(line);
    if (fence) {
      open = fence[1];
      blocks.push({ kind: "code", start: Math.min(at, text.length), end: Math.min(at, text.length) });
    } else if (heading) {
      blocks.push({ kind: "heading", start: start + heading[0].length, end, level: heading[1].length });
    } else if (item) {
      blocks.push({ kind: "item", start: start + item[1].length, end, level: item[1].length > 1 ? 1 : 0 });
    } else if (/^\s*\|/.test(line)) {
      if (last?.kind === "code" && last.table && last.end === start - 1) last.end = end;
      else blocks.push({ kind: "code", table: true, start, end });
    } else if (line.trim()) {
      const goesOn = last && last.end === start - 1 && (last.kind === "paragraph" || last.kind === "item");
      if (goesOn) last.end = end;
      else blocks.push({ kind: "paragraph", start, end });
    }
  }
  return blocks;
}

// ---- the conversation --------------------------------------------------------------------------------------

function turn(kind, who) {
  $("hint")?.remove();
  const node = document.createElement("article");
  node.className = `turn ${kind}`;
  for (const [name, text] of [["who", who], ["said", ""], ["cost quiet", ""]]) {
    const part = document.createElement("div");
    part.className = name;
    part.textContent = text;
    node.append(part);
  }
  $("log").append(node);
  follow(true);
  return node;
}

const said = (node) => node.querySelector(".said");

/** Keeps the end in view for whoever was there. */
function follow(always = false) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

async function send(question) {
  said(turn("user", "You")).textContent = question;
  state.messages.push({ role: "user", content: question });
  const node = turn("assistant", state.model.id);
  const answer = new Answer(said(node));
  working(true);
  try {
    await read(answer, node, await request());
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    else node.querySelector(".cost").textContent = "stopped";
  }
  answer.show();
  if (answer.text) state.messages.push({ role: "assistant", content: answer.text });
  else state.messages.pop(); // an unanswered question is asked again, not piled up
  if (!answer.text && !answer.folded) node.remove();
  working(false);
  refreshLearned().catch(tell);
}

function request() {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...state.messages] : state.messages;
  state.stop = new AbortController();
  const body = {
    model: state.model.id,
    messages,
    stream: true,
    return_progress: true,
    temperature: Number($("temperature").value) || 0,
    max_tokens: Number($("limit").value) || 1024,
    speculate: !$("without").checked,
  };
  return ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: state.stop.signal });
}

async function read(answer, node, response) {
  let began = 0;
  let before = 0; // tokens of the first piece, which prefill paid for
  const cost = node.querySelector(".cost");
  for await (const event of events(response)) {
    const progress = event.prompt_progress;
    if (event.comment) cost.textContent = event.comment;
    if (progress) cost.textContent = `reading the prompt, ${progress.processed} of ${progress.total} tokens`;
    const extension = event.choices?.[0]?.edgespec;
    if (!extension) continue;
    if (extension.tokens?.length) {
      if (!began) cost.textContent = "";
      answer.add(extension.tokens);
      if (began) showSpeed((answer.ends.length - before) / ((performance.now() - began) / 1000));
      else [began, before] = [performance.now(), answer.ends.length];
      showLegend(answer.counts());
    }
    if (extension.stats) showCost(node, extension);
  }
}

function showCost(node, { stats, finish_reason: why, plain_tokens_per_second: plain }) {
  const plainly = $("without").checked;
  if (plainly && stats.tokens_per_second > 0) {
    state.measured = true;
    state.plain = stats.tokens_per_second;
  } else if (!state.measured) {
    state.plain = plain;
  }
  showSpeed(stats.tokens_per_second);
  const parts = [`${stats.new_tokens} tokens`, `${stats.tokens_per_second.toFixed(1)} tokens/s`];
  if (!plainly) {
    parts.push(`${(stats.tokens_per_second / state.plain).toFixed(2)} times plain decoding`);
    parts.push(`${stats.accepted} of ${stats.drafted} drafted tokens accepted`);
  }
  parts.push(`first token after ${Math.round(stats.ttft_ms)} ms`);
  if (why === "length") parts.push("ended at the limit of tokens");
  if (why === "timeout") parts.push("ended at the limit of time");
  node.querySelector(".cost").textContent = parts.join(" · ");
  follow();
}

function showSpeed(now) {
  const most = Math.max(now, state.plain) || 1;
  $("now").textContent = now ? `${now.toFixed(1)} tokens/s` : "–";
  $("plain").textContent = `${state.plain.toFixed(1)} tokens/s`;
  $("plain").title = state.measured ? "measured on the last plain answer" : "estimated from the cost of a pass";
  $("now-bar").style.width = `${(100 * now) / most}%`;
  $("plain-bar").style.width = `${(100 * state.plain) / most}%`;
}

function showLegend(counts) {
  const all = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const order = Object.keys(NAMES).filter((source) => counts[source]);
  const rows = order.map((source) => {
    const row = document.createElement("li");
    const mark = document.createElement("b");
    if (source !== "target") mark.dataset.source = source;
    mark.textContent = `${counts[source]}`;
    const share = Math.round((100 * counts[source]) / all);
    row.append(mark, ` ${nameOf(source)} (${share} %)`);
    return row;
  });
  $("legend").replaceChildren(...rows);
}

function nameOf(source) {
  const drafter = state.model?.edgespec.drafter;
  return source === "model" && drafter ? `drafted by ${drafter}` : (NAMES[source] ?? `drafted by ${source}`);
}

function working(busy) {
  $("log").setAttribute("aria-busy", String(busy)); // read out when it is whole
  $("stop").hidden = !busy;
  $("send").hidden = busy;
  if (!busy) state.stop = null;
  $("question").focus();
}

function fail(error) {
  const message = error instanceof TypeError ? "the server cannot be reached" : error.message;
  said(turn("error", "Error")).textContent = message;
}

// ---- what was learned ----------------------------------------------------------------------------------------

async function refreshLearned() {
  if (!state.model.edgespec.history) return;
  const learned = await (await ask("edgespec/history")).json();
  const taught = learned.corrections.map((each) => each.drafter).join(", ");
  $("learned-summary").textContent =
    `The history “${learned.name}” holds ${learned.passages} passages` +
    (taught ? `, and corrections for ${taught}.` : ".");
  const rows = learned.shown.map((passage) => {
    const row = document.createElement("li");
    const text = document.createElement("pre");
    text.textContent = passage.text.trim();
    text.title = `${passage.tokens} tokens, ${passage.right} of ${passage.right + passage.wrong} proposals right`;
    row.append(text);
    return row;
  });
  $("passages").replaceChildren(...rows);
}

async function forget(what) {
  const body = JSON.stringify(what);
  const forgotten = await (await ask("edgespec/history/forget", { method: "POST", body })).json();
  await refreshLearned();
  const count = forgotten.passages;
  $("status").textContent = count === 1 ? "One passage is forgotten." : `${count} passages are forgotten.`;
}

/** What went wrong with the history stands below the buttons. */
function tell(error) {
  $("status").textContent = error.message;
}

// ---- controls ------------------------------------------------------------------------------------------------

function grow() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function controls() {
  $("question").addEventListener("input", grow);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = $("question").value.trim();
    if (!question || state.stop || !state.model) return;
    $("question").value = "";
    $("status").textContent = "";
    grow();
    send(question);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    for (const panel of document.querySelectorAll("details[open]")) panel.open = false;
    state.stop?.abort();
  });
  $("stop").addEventListener("click", () => state.stop?.abort());
  $("marks").addEventListener("click", () => {
    const on = document.body.classList.toggle("marked");
    $("marks").setAttribute("aria-pressed", String(on));
  });
  $("anew").addEventListener("click", () => {
    state.stop?.abort();
    state.messages = [];
    $("log").replaceChildren();
    $("legend").replaceChildren();
    $("question").focus();
  });
  $("theme").textContent = dark() ? "Light" : "Dark";
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    $("theme").textContent = dark() ? "Light" : "Dark";
  });
  $("forget").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("forget-text").value;
    if (text.trim()) forget({ text }).catch(tell);
    $("forget-text").value = "";
  });
  $("forget-all").addEventListener("click", () => $("sure").showModal());
  $("sure").addEventListener("close", () => {
    if ($("sure").returnValue === "yes") forget({ everything: true }).catch(tell);
    $("sure").returnValue = "no";
  });
}

async function begin() {
  controls();
  try {
    const models = await (await ask("v1/models")).json();
    state.model = models.data[0];
    const { drafter, history, plain_tokens_per_second: plain } = state.model.edgespec;
    state.plain = plain;
    $("model").textContent = `${state.model.id}, ${drafter ? `drafts by ${drafter}` : "without a drafter"}`;
    document.title = `${state.model.id} – edgespec`;
    $("learned").hidden = !history;
    showSpeed(0);
    refreshLearned().catch(tell);
  } catch (error) {
    fail(error);
  }
}

begin();
