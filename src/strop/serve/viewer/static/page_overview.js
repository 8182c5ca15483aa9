// All runs, as they stand now.

import { get } from "./api.js";
import { spark } from "./chart.js";
import { address, el } from "./dom.js";
import { duration, metric, when } from "./numbers.js";
import { VirtualTable } from "./table.js";

export async function showOverview(root, values, visit) {
  const chosen = new Set();
  let runs = [];
  const compare = el("a", { class: "button", "aria-disabled": "true" }, "Compare");
  const filter = el("input", { type: "search", id: "filter", oninput: () => update() });
  const choose = (run, on) => {
    if (on) chosen.add(run); else chosen.delete(run);
    const ready = chosen.size > 1;
    compare.textContent = ready ? `Compare ${chosen.size}` : "Compare (choose two or more)";
    compare.setAttribute("aria-disabled", String(!ready));
    if (ready) compare.setAttribute("href", address("compare", { run: [...chosen] })); else compare.removeAttribute("href");
  };
  const table = new VirtualTable({
    label: "Runs", key: (row) => row.run, open: (row) => (row.status === "unreadable" ? null : address("run", { run: row.run })),
    height: "75vh", rowHeight: 40,
    columns: [
      { key: "choose", label: "", width: "1.6rem", show: (row) => el("input", {
        type: "checkbox", tabindex: "-1", checked: chosen.has(row.run), disabled: row.status === "unreadable",
        "aria-label": `compare ${row.run}`, data: { focus: "choose" }, onchange: (event) => choose(row.run, event.target.checked) }) },
      { key: "run", label: "run", width: "minmax(8rem, 2fr)", narrow: "minmax(4.5rem, 2fr)", link: true, value: (row) => row.run, show: (row) => row.run },
      { key: "status", label: "state", width: "minmax(6rem, 1fr)", narrow: "5.6rem", value: (row) => row.status,
        show: (row) => el("span", { class: `status ${row.status}`, title: row.problem || undefined }, row.status) },
      { key: "step", label: "step", width: "6rem", narrow: "4.6rem", numeric: true, value: (row) => row.step ?? null, show: (row) => steps(row) },
      { key: "value", label: "reward", width: "minmax(8rem, 1fr)", narrow: "4.2rem", numeric: true, value: (row) => row.value ?? null,
        show: (row) => (row.headline ? el("span", {}, el("span", { class: "wide" }, `${short(row.headline)} `), metric(row.headline, row.value)) : "–") },
      { key: "spark", label: "curve", width: "7rem", wide: true, show: (row) => spark(row.spark ?? []) },
      { key: "method", label: "recipe", width: "minmax(7rem, 1fr)", wide: true, value: (row) => row.recipe || row.method,
        show: (row) => [row.recipe, row.method].filter(Boolean).join(" · ") || "–" },
      { key: "alarms", label: "alarms", width: "5rem", numeric: true, wide: true, value: (row) => row.alarms ?? 0,
        show: (row) => (row.alarms ? el("a", { class: "alarm", href: address("run", { run: row.run, tab: "alarms" }), tabindex: "-1" }, String(row.alarms)) : "0") },
      { key: "seconds", label: "time", width: "5rem", numeric: true, wide: true, value: (row) => row.seconds ?? null, show: (row) => duration(row.seconds) },
      { key: "created", label: "started", width: "10rem", wide: true, value: (row) => row.created ?? "", show: (row) => (row.created ? when(row.created) : "–") },
    ],
  });
  const count = el("p", { class: "muted", role: "status" });
  const update = () => {
    const wanted = filter.value.toLowerCase();
    const rows = runs.filter((row) => [row.run, row.status, row.recipe, row.method].join(" ").toLowerCase().includes(wanted));
    table.setRows(rows);
    const running = runs.filter((row) => row.status === "running").length;
    const text = runs.length ? `${runs.length} ${runs.length === 1 ? "run" : "runs"}, ${running} running` : "no runs here yet; `strop train RECIPE` makes one";
    if (count.textContent !== text) count.textContent = text;
  };
  choose("", false);
  visit.onleave(() => table.close());
  const problems = el("ul", { class: "problems" });
  let built = false;
  await visit.follow(async () => {
    runs = (await get("runs", {}, visit.signal)).runs;
    if (!built) {
      built = true;
      root.replaceChildren(el("h1", {}, "Runs"), count,
        el("div", { class: "bar" }, el("label", { for: "filter" }, "Filter"), filter, compare), table.element, problems);
    }
    update();
    const told = runs.filter((row) => row.problem).map((row) => `${row.run}: ${row.problem}`);
    if (problems.dataset.told !== told.join("\n")) {
      problems.dataset.told = told.join("\n");
      problems.replaceChildren(...told.slice(0, 20).map((text) => el("li", {}, text)));
    }
    return runs.some((row) => row.pending);
  });
}

function steps(row) {
  if (row.status === "unreadable") return "–";
  if (row.pending) return "…";
  return row.warmup ? el("span", {}, "warm-up", el("span", { class: "wide" }, ` ${row.warmup}`)) : `${row.step}/${row.steps}`;
}

function short(name) {
  return { "reward/mean": "reward", "loss/nll": "loss", "eval/accuracy": "accuracy" }[name] ?? name;
}
