// What answers cost, and where their tokens came from, for one model.

import { $, make } from "./answer.js";

const NAMES = {
  target: "by the target itself",
  model: "drafted by the drafter",
  ngram: "drafted from this text",
  history: "drafted from what was learned",
  grammar: "forced by the format, or by the budget of thoughts",
};

export class Figures {
  /** `plain` is what plain decoding is believed to write, in tokens/s. */
  constructor(drafter, plain) {
    Object.assign(this, { drafter, plain: plain ?? 0, measured: false });
  }

  nameOf(source) {
    return source === "model" && this.drafter ? `drafted by ${this.drafter}` : (NAMES[source] ?? `drafted by ${source}`);
  }

  showSpeed(now) {
    const most = Math.max(now, this.plain) || 1;
    const told = (speed) => (speed ? `${speed.toFixed(1)} tokens/s` : "–");
    $("now").textContent = told(now);
    $("plain").textContent = told(this.plain);
    $("plain").title = this.measured ? "measured on the last plain answer" : "estimated from the cost of a pass";
    $("now-bar").style.width = `${(100 * now) / most}%`;
    $("plain-bar").style.width = `${(100 * this.plain) / most}%`;
  }

  showLegend(sources) {
    const counts = {};
    for (const source of sources) counts[source] = (counts[source] ?? 0) + 1;
    const order = Object.keys(NAMES).filter((source) => counts[source]);
    const rows = order.map((source) => {
      const mark = make("b", {}, `${counts[source]}`);
      if (source !== "target") mark.dataset.source = source;
      const share = Math.round((100 * counts[source]) / sources.length);
      return make("li", {}, mark, ` ${this.nameOf(source)} (${share} %)`);
    });
    $("legend").replaceChildren(...rows);
  }

  /** Takes in what an answer cost, and says it; `plainly` means without drafts. */
  cost({ stats, finish_reason: why, plain_tokens_per_second: plain }, plainly) {
    if (plainly && stats.tokens_per_second > 0) [this.plain, this.measured] = [stats.tokens_per_second, true];
    else if (!this.measured) this.plain = plain;
    this.showSpeed(stats.tokens_per_second);
    const parts = [`${stats.new_tokens} tokens`, `${stats.tokens_per_second.toFixed(1)} tokens/s`];
    if (!plainly) {
      parts.push(`${(stats.tokens_per_second / this.plain).toFixed(2)} times plain decoding`);
      parts.push(`${stats.accepted} of ${stats.drafted} drafted tokens accepted`);
    }
    parts.push(`first token after ${Math.round(stats.ttft_ms)} ms`);
    if (why === "length") parts.push("ended at the limit of tokens");
    if (why === "timeout") parts.push("ended at the limit of time");
    return parts.join(" · ");
  }
}
