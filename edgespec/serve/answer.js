// An answer as it is drawn: its text, and the token that each character belongs to. Text is only ever set as text.

export const $ = (id) => document.getElementById(id);

/** A node with these properties, which holds the others. */
export function make(tag, properties = {}, ...held) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...held);
  return node;
}

export class Answer {
  /** Drawn into `parent`; `nameOf` says a source in words, `shown` is called when there is more to see. */
  constructor(parent, nameOf, shown, { text = "", thoughts = "", ends = [], sources = [] } = {}) {
    Object.assign(this, { parent, nameOf, shown, text, thoughts: "", ends, sources });
    this.blocks = []; // what is drawn: {start, end, kind, node}
    this.scheduled = false;
    if (thoughts) this.think(thoughts);
  }

  add(tokens) {
    for (const { text, source, reasoning } of tokens) {
      if (reasoning) this.think(text);
      else this.text += text;
      this.ends.push(this.text.length);
      this.sources.push(source);
    }
    if (!this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(() => this.show());
    }
  }

  /** Thoughts are folded, before the text. */
  think(text) {
    if (!this.folded) {
      this.folded = make("p", { className: "quiet" });
      this.parent.prepend(make("details", {}, make("summary", {}, "Thoughts"), this.folded));
    }
    this.folded.append(text);
    this.thoughts += text;
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
    this.shown();
  }

  node({ kind, start, end, level }) {
    if (kind === "code") {
      const code = make("code");
      this.range(code, start, end);
      return make("pre", {}, code);
    }
    const node = make(kind === "heading" ? `h${Math.min(level + 1, 4)}` : "p");
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
      this.range(node.appendChild(make(kind)), from, from + inner.length);
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
        const span = make("span", { title: this.nameOf(source) }, text);
        span.dataset.source = source;
        node.append(span);
      }
      start = stop;
      index++;
    }
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
