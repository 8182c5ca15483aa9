// The steps of a run, each with its numbers and its episodes.

import { get } from "./api.js";
import { address, el } from "./dom.js";
import { metric, seconds } from "./numbers.js";
import { Series } from "./series.js";
import { VirtualTable } from "./table.js";

const NAMES = ["reward/mean", "accuracy", "loss", "completion/length_mean", "staleness/max", "mismatch/mean", "token_accuracy", "alarms/on", "time/step"];
const LABELS = { "reward/mean": "reward", "completion/length_mean": "length", "staleness/max": "staleness", "mismatch/mean": "mismatch", "token_accuracy": "tokens right", "alarms/on": "alarms", "time/step": "time" };

export async function showSteps(place, told, visit, values, facts) {
  const run = told.run;
  const series = new Series(run, NAMES);
  let stepsWith = new Set();
  const numbers = told.supervised ? ["loss", "token_accuracy", "accuracy", "time/step"] : NAMES.filter((name) => name !== "token_accuracy");
  const table = new VirtualTable({
    label: "Steps", key: (row) => String(row.step), height: "70vh", sort: "step", falling: true,
    open: (row) => (row.episodes ? address("episodes", { run, step: row.step }) : null),
    columns: [
      { key: "step", label: "step", width: "5rem", numeric: true, link: true, value: (row) => row.step, show: (row) => String(row.step) },
      { key: "episodes", label: "episodes", width: "6rem", wide: told.supervised, value: (row) => (row.episodes ? 1 : 0), show: (row) => (row.episodes ? "open" : "–") },
      ...numbers.map((name) => ({
        key: name, label: LABELS[name] ?? name, width: "minmax(5.5rem, 1fr)", numeric: true, wide: !["reward/mean", "loss", "accuracy"].includes(name),
        value: (row) => row[name], show: (row) => (name === "time/step" ? seconds(row[name]) : metric(name, row[name])),
      })),
    ],
  });
  visit.onleave(() => table.close());
  const note = el("p", { class: "muted", role: "status" });
  place.append(note, table.element);
  await visit.follow(async () => {
    const [there, , now] = await Promise.all([get("steps", { run }, visit.signal), series.refresh(visit.signal), get("run", { run }, visit.signal)]);
    facts(now);
    stepsWith = new Set(there.steps);
    const lines = series.lines("train").map((line) => ({ ...line, episodes: stepsWith.has(line.step) }));
    table.setRows(lines);
    const text = `${lines.length} steps, ${stepsWith.size} with episodes${told.supervised ? " (a run that learns from examples has none)" : ""}`;
    if (note.textContent !== text) note.textContent = text;
  });
}
