// The load of the machines of a run, over time.

import { Chart } from "./chart.js";
import { el } from "./dom.js";
import { Series } from "./series.js";

// Each: what it is called, its unit as `metric` knows it, and the columns with the words for each.
const CHARTS = [
  { title: "Processors", name: "load/cpu_percent", columns: { cpu_percent: "machine", run_cpu_percent: "this run" } },
  { title: "Memory", name: "load/memory_gib", columns: { memory_gib: "machine", run_memory_gib: "this run" } },
  { title: "Cards: busy", name: "load/gpu_percent", each: "gpu_percent" },
  { title: "Cards: memory", name: "load/gpu_memory_gib", each: "gpu_memory_gib" },
  { title: "Cards: power", name: "load/gpu_watts", each: "gpu_watts" },
  { title: "Cards: temperature", name: "load/gpu_celsius", each: "gpu_celsius" },
];

/** Charts that stay current, for each machine; returns what refreshes them. */
export function loadCharts(root, run, visit) {
  const series = new Series(run, [], "load");
  const place = el("div", { class: "load" });
  const nothing = el("p", { class: "muted" }, "The run recorded no load of its machines (yet); tracking.load_every says how often it does.");
  const charts = new Map();
  root.append(nothing, place);
  visit.onleave(() => { for (const chart of charts.values()) chart.close(); });

  const gridOf = (node, several) => {
    const known = [...place.children].find((one) => one.dataset.node === node);
    if (known) return known.querySelector(".charts");
    const grid = el("div", { class: "charts" });
    const first = !place.children.length;
    // Of many machines only the first is open, and what is closed is not drawn.
    const section = several ? el("details", { data: { node }, open: first }, el("summary", {}, node), grid) : el("div", { data: { node } }, grid);
    place.append(section);
    return grid;
  };
  const draw = () => {
    const nodes = Object.keys(series.kinds);
    nothing.hidden = nodes.length > 0;
    const start = Math.min(...nodes.map((node) => series.kinds[node].time[0]));
    // A machine that comes later makes several of one.
    if (nodes.length > 1 && place.firstChild?.tagName === "DIV") { for (const chart of charts.values()) chart.close(); charts.clear(); place.replaceChildren(); }
    for (const node of nodes) {
      const grid = gridOf(node, nodes.length > 1);
      for (const kind of CHARTS) {
        const found = Object.keys(series.kinds[node].values);
        const columns = kind.columns ?? Object.fromEntries(found.filter((name) => name.startsWith(`${kind.each}/`)).map((name) => [name, `card ${name.split("/")[1]}`]));
        if (!Object.keys(columns).some((name) => found.includes(name))) continue;
        const key = `${node}|${kind.name}`;
        if (!charts.has(key)) { charts.set(key, new Chart(kind.title, kind.name)); grid.append(charts.get(key).element); }
        charts.get(key).set(Object.entries(columns).map(([name, label], at) => (
          { label, colour: at % 8, points: series.points(node, name).map(([, time, value]) => [time - start, value]) })), { time: true });
      }
    }
  };
  return async () => { if (await series.refresh(visit.signal)) draw(); };
}
