// A run's metrics, followed: only what is new is asked for and sent.

import { get } from "./api.js";

export class Series {
  /** from: what is asked; of `load` all names come. */
  constructor(run, names, from = "series") {
    this.run = run;
    this.names = names;
    this.from = from;
    this.cursor = "";
    this.kinds = {};
  }

  /** Ask for what is new; true if there was anything. */
  async refresh(signal) {
    const news = await get(this.from, { run: this.run, names: this.names.join(","), since: this.cursor }, signal);
    this.cursor = news.cursor;
    if (news.reset) this.kinds = {};
    let some = news.reset;
    for (const [kind, part] of Object.entries(news.kinds)) {
      if (!part.step.length) continue;
      some = true;
      const kept = (this.kinds[kind] ??= { step: [], time: [], values: {} });
      const before = kept.step.length;
      append(kept.step, part.step);
      append(kept.time, part.time);
      for (const name of new Set([...Object.keys(kept.values), ...Object.keys(part.values)])) {
        const column = (kept.values[name] ??= new Array(before).fill(null));
        append(column, part.values[name] ?? new Array(part.step.length).fill(null));
      }
    }
    return some;
  }

  /** Points of a metric: [[step, time, value], …], those that are numbers. */
  points(kind, name) {
    const part = this.kinds[kind];
    const values = part?.values[name];
    if (!values) return [];
    const found = [];
    for (let at = 0; at < values.length; at += 1) {
      if (typeof values[at] === "number") found.push([part.step[at], part.time[at], values[at]]);
    }
    return found;
  }

  /** One object for each line of a kind. */
  lines(kind) {
    const part = this.kinds[kind];
    if (!part) return [];
    return part.step.map((step, at) => {
      const line = { step, time: part.time[at] };
      for (const name of this.names) line[name] = part.values[name]?.[at] ?? null;
      return line;
    });
  }
}

function append(to, more) {
  for (const one of more) to.push(one);
}
