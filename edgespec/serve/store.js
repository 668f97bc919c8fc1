// Chats that are kept in this browser: each under a key of its own, so that two tabs do not undo each other's.

const PREFIX = "edgespec-chat-";
const LARGEST = 2 ** 19; // characters of a picture: browsers keep some five million in all

/** Whether a file is a picture that is too large to be kept. */
export const isLarge = ({ data }) => data === "" || data?.length > LARGEST;

/** A chat without messages, which is kept once it has some. */
export function fresh() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, changed: 0, messages: [] };
}

/** All that are kept, the latest first; what is no chat is left out. */
export function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const chats = keys.map((key) => load(key.slice(PREFIX.length))).filter(Boolean);
  return chats.sort((a, b) => b.changed - a.changed);
}

export function load(id) {
  try {
    const chat = JSON.parse(localStorage.getItem(PREFIX + id));
    return chat.messages.length && chat.messages.every(whole) ? { ...chat, id } : null;
  } catch {
    return null;
  }
}

/** Whether it is a message as the page keeps it: other pages of this address have the same storage. */
function whole({ role, text, files, ends, sources }) {
  const more = role === "user" ? [files] : [ends, sources];
  const known = (file) => typeof (file?.text ?? file?.data) === "string";
  return typeof text === "string" && more.every(Array.isArray) && (files ?? []).every(known);
}

/** Keeps a chat; an error says that the browser does not. */
export async function save(chat) {
  if (chat.deleted) return;
  chat.changed = Date.now();
  try {
    const kept = (key, value) => (key === "data" && isLarge({ data: value }) ? "" : value);
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat, kept));
  } catch {
    throw new Error("This browser has no room for this chat, so it ends with the tab: delete others under Chats.");
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Its first words. */
export function title({ messages: [{ text, files }] }) {
  return (text || files?.[0]?.name || "Chat").replace(/\s+/g, " ").slice(0, 60);
}
