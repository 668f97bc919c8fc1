// The page of `edgespec serve`: chats, which are kept in this browser.

import { $, Answer, make } from "./answer.js";
import { Figures } from "./figures.js";
import { all, fresh, isLarge, load, remove, save, title } from "./store.js";
import { ask, closed, contentOf, events, wired } from "./wire.js";

const state = { models: [], figures: new Figures(), chat: fresh(), attached: [], following: true, top: 0 };
const hint = $("hint");

// ---- the conversation --------------------------------------------------------------------------------------

function turn(kind, who) {
  hint.remove();
  const named = make("div", { className: "who" }, who);
  const rest = ["said", "cost quiet"].map((className) => make("div", { className }));
  const node = make("article", { className: `turn ${kind}`, ariaLabel: who }, named, ...rest);
  $("log").append(node);
  follow(true);
  return node;
}

const said = (node) => node.querySelector(".said");
const cost = (node) => node.querySelector(".cost");
const answerIn = (node, kept) => new Answer(said(node), (source) => state.figures.nameOf(source), follow, kept);

function button(textContent, onclick, ariaLabel = null) {
  return make("button", { type: "button", textContent, onclick, ariaLabel });
}

/** Keeps the end in view, unless the reader has scrolled up. */
function follow(always = false) {
  state.following ||= always;
  if (state.following) $("log").scrollTop = $("log").scrollHeight;
  $("down").hidden = state.following;
}

/** Only the reader scrolls up: what grows leaves the place as it is. */
function scrolled() {
  const { scrollTop, scrollHeight, clientHeight } = $("log");
  if (scrollHeight - scrollTop - clientHeight < 8) state.following = true;
  else if (scrollTop < state.top) state.following = false;
  state.top = scrollTop;
  follow();
}

/** Shows a question, the chat's message `index`. */
function asked({ text, files }, index) {
  const node = turn("user", "You");
  said(node).replaceChildren(...files.flatMap(thumbnail), text);
  cost(node).textContent = files.map(described).join(" · ");
  const edit = () => {
    stopEditing();
    state.editing = { node, index };
    node.classList.add("edited");
    compose(text, files);
    $("status").textContent = "Sending this cuts off what follows, and answers anew. Escape leaves it as it was.";
  };
  node.append(button("Edit", edit));
}

function stopEditing() {
  if (!state.editing) return;
  state.editing.node.classList.remove("edited");
  state.editing = null;
  compose("", []);
}

/** What may be sent next. */
function compose(text, files) {
  const rows = files.map((file) => {
    const gone = () => compose($("question").value, files.filter((each) => each !== file));
    return make("li", {}, ...thumbnail(file), described(file), button("×", gone, `Remove ${file.name}`));
  });
  $("attached").replaceChildren(...rows);
  $("status").textContent = "";
  $("question").value = text;
  state.attached = files;
  grow();
  $("question").focus();
}

async function send(text, files) {
  const { chat, model } = state;
  const index = chat.messages.length;
  chat.messages.push({ role: "user", text, files });
  asked(chat.messages[index], index);
  const node = turn("assistant", model.id);
  const answer = answerIn(node);
  working(true);
  try {
    await read(answer, node, await request());
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    else cost(node).textContent = "stopped";
  }
  answer.show();
  if (answer.text) {
    const { text, thoughts, ends, sources } = answer;
    const kept = { text, thoughts, ends, sources, who: model.id, cost: cost(node).textContent };
    chat.messages.push({ role: "assistant", ...kept });
    save(chat).catch(tell);
  } else {
    chat.messages.length = index; // an unanswered question is asked again, not piled up
    if (!answer.folded) node.remove();
  }
  working(false);
  (model.loaded === false ? refreshModels() : refreshLearned()).catch(tell);
}

function request() {
  const system = $("system").value.trim();
  const messages = wired(state.chat.messages);
  if (system) messages.unshift({ role: "system", content: system });
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
  const { figures } = state;
  let began = 0;
  let before = 0; // tokens of the first piece, which prefill paid for
  const told = cost(node);
  for await (const event of events(response)) {
    const progress = event.prompt_progress;
    if (event.comment) told.textContent = event.comment;
    if (progress) told.textContent = `reading the prompt, ${progress.processed} of ${progress.total} tokens`;
    const extension = event.choices?.[0]?.edgespec;
    if (extension?.tokens?.length) {
      if (!began) told.textContent = "";
      answer.add(extension.tokens);
      if (began) figures.showSpeed((answer.ends.length - before) / ((performance.now() - began) / 1000));
      else [began, before] = [performance.now(), answer.ends.length];
      figures.showLegend(answer.sources);
    }
    if (extension?.stats) told.textContent = figures.cost(extension, $("without").checked);
  }
}

function working(busy) {
  $("log").setAttribute("aria-busy", String(busy));
  $("heard").textContent = busy ? "The model writes." : "The answer has ended.";
  $("stop").hidden = !busy;
  $("send").hidden = busy;
  if (!busy) state.stop = null;
  $("question").focus();
}

function fail(error) {
  const message = error instanceof TypeError ? "the server cannot be reached" : error.message;
  said(turn("error", "Error")).append(message);
}

/** What goes wrong beside a conversation stands below the buttons. */
function tell(error) {
  $("status").textContent = error.message;
}

const described = (file) =>
  `${file.name}, ${file.tokens} tokens${isLarge(file) ? ", too large to be kept with the chat" : ""}`;
const thumbnail = ({ name, data }) => (data ? [make("img", { src: data, alt: name })] : []);

async function attach(files) {
  const problems = [];
  for (const file of files) {
    $("status").textContent = `Reading ${file.name}.`;
    const add = (taken) => compose($("question").value, [...state.attached, taken]);
    await counted(file).then(add, (error) => problems.push(error.message));
  }
  $("status").textContent = problems.join(" ");
}

/** A file with its tokens: those that the next prompt has more with it. */
async function counted(file) {
  const { name } = file;
  const held = { name, ...(await contentOf(file)) };
  const without = await count(state.attached);
  const tokens = (await count([...state.attached, held])) - without;
  const left = (state.model.edgespec?.context_length ?? Infinity) - without;
  if (tokens >= left) throw new Error(`${name} has ${tokens} tokens, and the model can read ${left} more here.`);
  return { ...held, tokens };
}

async function count(files) {
  const before = state.chat.messages.slice(0, state.editing?.index);
  const picture = (url) => ({ type: "image", source: { type: "url", url } });
  const messages = wired([...before, { role: "user", text: $("question").value, files }], picture);
  const body = JSON.stringify({ model: state.model.id, system: $("system").value.trim(), messages });
  return (await (await ask("v1/messages/count_tokens", { method: "POST", body })).json()).input_tokens;
}

// ---- the chats that are kept -------------------------------------------------------------------------------

function open(chat) {
  show(chat);
  $("chats").open = false;
  $("question").focus();
}

function show(chat) {
  state.stop?.abort();
  stopEditing();
  state.chat = chat;
  sessionStorage.setItem("edgespec-chat", chat.id); // for who loads the page again
  $("log").replaceChildren(hint);
  $("legend").replaceChildren();
  for (const [index, message] of chat.messages.entries()) {
    if (message.role === "user") asked(message, index);
    else answered(message);
  }
  follow(true);
}

function answered(message) {
  const node = turn("assistant", message.who);
  answerIn(node, message).show();
  cost(node).textContent = message.cost;
  state.figures.showLegend(message.sources);
}

function showChats() {
  const rows = all().map((chat) => {
    const name = title(chat);
    const chosen = button(name, () => open(chat));
    chosen.ariaCurrent = String(chat.id === state.chat.id);
    return make("li", {}, chosen, button("Delete", () => discard([chat]), `Delete “${name}”`));
  });
  $("kept").replaceChildren(...rows);
  $("delete-all").hidden = !rows.length;
}

function discard(chats) {
  for (const { id } of chats) remove(id);
  if (chats.some(({ id }) => id === state.chat.id)) {
    state.chat.deleted = true;
    open(fresh());
  }
  showChats();
  $("chats").firstElementChild.focus();
}

/** Whether something is to be deleted, "yes" or not. */
function sure(question, text, yes) {
  $("sure-title").textContent = question;
  $("sure-text").textContent = text;
  $("sure-yes").textContent = yes;
  return closed($("sure"));
}

// ---- what was learned ----------------------------------------------------------------------------------------

async function refreshLearned() {
  if (!state.model.edgespec?.history) return;
  const learned = await (await ask("edgespec/history")).json();
  $("learned-summary").textContent = `The history “${learned.name}” holds ${learned.passages} passages.`;
  const rows = learned.shown.map(({ text, tokens, right, wrong }) => {
    const title = `${tokens} tokens, ${right} of ${right + wrong} proposals right`;
    return make("li", {}, make("pre", { title }, text.trim()));
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

function writing() {
  $("question").addEventListener("input", grow);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const [question, files] = [$("question").value.trim(), state.attached];
    if (!(question || files.length) || state.stop || !state.model) return;
    if (state.editing) {
      state.chat.messages.length = state.editing.index;
      open(state.chat);
    }
    compose("", []);
    send(question, files);
  });
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", async () => {
    await attach([...$("files").files]);
    $("files").value = ""; // the same file may be chosen again
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    if (!files.length || types.includes("text/plain")) return; // office programs add a picture of a text
    event.preventDefault();
    attach([...files]);
  });
}

function controls() {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    for (const panel of document.querySelectorAll("#tools details[open]")) panel.open = false;
    stopEditing();
    state.stop?.abort();
  });
  $("stop").addEventListener("click", () => state.stop?.abort());
  $("log").addEventListener("scroll", scrolled);
  new ResizeObserver(() => follow()).observe($("log"));
  $("down").addEventListener("click", () => follow(true));
  $("models").addEventListener("change", () => choose($("models").value));
  $("marks").addEventListener("click", () => ($("marks").ariaPressed = document.body.classList.toggle("marked")));
  $("theme").textContent = dark() ? "Light" : "Dark";
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    $("theme").textContent = dark() ? "Light" : "Dark";
  });
  $("anew").addEventListener("click", () => open(fresh()));
  $("chats").addEventListener("toggle", showChats);
  $("delete-all").addEventListener("click", async () => {
    const chats = all();
    const what = `This browser keeps ${chats.length}.`;
    if ((await sure("Delete all chats?", what, "Delete all")) === "yes") discard(chats);
  });
  $("forget").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("forget-text").value;
    if (text.trim()) forget({ text }).catch(tell);
    $("forget-text").value = "";
  });
  $("forget-all").addEventListener("click", async () => {
    const what = "Answers stay the same; until it has learned anew, the model drafts less.";
    const agreed = await sure("Forget everything that was learned?", what, "Forget it");
    if (agreed === "yes") forget({ everything: true }).catch(tell);
  });
}

async function refreshModels() {
  state.models = (await (await ask("v1/models")).json()).data;
  const named = ({ id, loaded }) => new Option(loaded === false ? `${id} (not loaded)` : id, id);
  $("models").replaceChildren(...state.models.map(named));
  $("models").hidden = state.models.length < 2;
  choose(state.model?.id);
}

function choose(id) {
  const before = state.model?.id;
  state.model = state.models.find((model) => model.id === id) ?? state.models[0];
  const { drafter, history, plain_tokens_per_second: plain } = state.model.edgespec ?? {};
  if (state.model.id !== before) state.figures = new Figures(drafter, plain);
  state.figures.showSpeed(0);
  const drafts = drafter ? `drafts by ${drafter}` : "without a drafter";
  $("model").textContent = state.models.length > 1 ? drafts : `${state.model.id}\n${drafts}`;
  $("models").value = state.model.id;
  document.title = `${state.model.id} – edgespec`;
  $("learned").hidden = !history;
  refreshLearned().catch(tell);
}

async function begin() {
  writing();
  controls();
  const problem = await refreshModels().catch((error) => error);
  show(load(sessionStorage.getItem("edgespec-chat")) ?? fresh());
  if (problem) fail(problem);
}

begin();
