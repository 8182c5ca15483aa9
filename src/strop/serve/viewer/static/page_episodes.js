// The episodes of a step, to sort and to open.

import { get } from "./api.js";
import { address, el, visible } from "./dom.js";
import { number } from "./numbers.js";
import { VirtualTable } from "./table.js";

export async function showEpisodes(root, values, visit) {
  const run = values.get("run") ?? "";
  const step = Number(values.get("step"));
  const beside = values.get("beside") === "1";
  const there = await get("steps", { run }, visit.signal);
  const found = await get("episodes", { run, step, beside }, visit.signal);
  const columns = found.rows;
  const rows = columns.index.map((_, at) => Object.fromEntries(Object.entries(columns).map(([name, list]) => [name, list[at]])));
  const numeric = (key, label, extra = {}) => ({ key, label, width: "6.5rem", numeric: true, value: (row) => row[key], show: (row) => number(row[key]), ...extra });
  const table = new VirtualTable({
    label: `Episodes of step ${step}`, key: (row) => String(row.index), height: "72vh",
    open: (row) => address("episode", { run, step, row: row.index, beside: beside ? 1 : null }),
    columns: [
      { key: "id", label: "episode", width: "6.5rem", link: true, value: (row) => row.index, show: (row) => `${row.group}.${row.sample}` },
      numeric("reward", "reward"),
      numeric("tokens", "tokens", { width: "5.5rem" }),
      numeric("advantage", "advantage", { wide: true }),
      numeric("staleness", "staleness", { wide: true }),
      numeric("mismatch", "mismatch", { wide: true }),
      { key: "status", label: "ended", width: "7rem", value: (row) => row.status, show: (row) => row.status ?? "–" },
      { key: "completion", label: "completion", width: "minmax(12rem, 3fr)", wide: true, value: (row) => row.completion,
        show: (row) => el("span", { class: "line-text" }, visible(row.completion).replaceAll("\n", "⏎")) },
    ],
  });
  visit.onleave(() => table.close());
  const steps = beside ? there.beside : there.steps;
  const at = steps.indexOf(step);
  const to = (label, other) => el("a", { class: "button", href: other === undefined ? null : address("episodes", { run, step: other, beside: beside ? 1 : null }), "aria-disabled": other === undefined ? "true" : null }, label);
  const other = (beside ? there.steps : there.beside).includes(step)
    ? el("a", { class: "button", href: address("episodes", { run, step, beside: beside ? null : 1 }) }, beside ? "The step's own" : "Sampled beside") : null;
  root.replaceChildren(el("h1", {}, `Episodes of step ${step}${beside ? ", sampled beside" : ""}`),
    el("div", { class: "bar" }, to("Earlier step", steps[at - 1]), to("Later step", steps[at + 1]), other,
      el("a", { class: "button", href: address("run", { run, tab: "timeline", step }) }, "Timeline")),
    el("p", { class: "muted" }, `${rows.length} rows. Advantage is the mean over sampled tokens, mismatch the mean distance of the trainer's and the sampler's log-probabilities.`), table.element);
  table.setRows(rows);
}
