// Curves of one or several runs: which metrics, how smooth, over what.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { el } from "./dom.js";
import { Series } from "./series.js";

const FIRST = ["train|reward/mean", "train|accuracy", "eval|eval/accuracy", "eval|eval/reward", "train|loss", "train|loss/nll",
  "eval|eval/loss", "train|completion/length_mean", "train|policy/entropy", "train|grad_norm", "train|mismatch/mean", "train|time/step"];
const MOST_FIRST = 8;
const KINDS = { train: "", eval: "", warmup: "warm-up: " };

/** Whether a key is one of those shown at first. */
export function firstKeys(keys) {
  const known = FIRST.filter((key) => keys.includes(key));
  return new Set((known.length ? known : keys).slice(0, MOST_FIRST));
}

/**
 * Controls and charts that stay current. runs: names. pick(keys): the metrics shown at first, all of `kind|name`.
 * lines(key): other metrics drawn into the same chart.
 */
export async function curves(root, runs, visit, { pick = firstKeys, choose = true } = {}) {
  const series = runs.map((run) => new Series(run, []));
  const charts = new Map();
  const grid = el("div", { class: "charts" });
  const weight = el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", id: "smooth", oninput: () => redraw() });
  const amount = el("output", { for: "smooth" }, "0");
  const axis = el("select", { id: "axis", onchange: () => redraw() }, el("option", { value: "step" }, "step"), el("option", { value: "time" }, "time since the first line"));
  const list = el("div", { class: "checks" });
  const search = el("input", { type: "search", id: "metric-filter", oninput: () => filterList() });
  let keys = [];
  let wanted = null;

  const redraw = () => {
    amount.textContent = weight.value;
    const time = axis.value === "time";
    for (const [key, chart] of charts) {
      const [kind, name] = key.split("|");
      chart.set(series.map((one, at) => {
        const points = one.points(kind, name);
        const start = points.length ? points[0][1] : 0;
        return { label: one.run, colour: at % 8, points: points.map(([step, when, value]) => [time ? when - start : step, value]) };
      }).filter((curve) => curve.points.length || runs.length === 1), { weight: Number(weight.value), time });
    }
  };
  const filterList = () => {
    for (const label of list.children) label.hidden = !label.textContent.includes(search.value.toLowerCase());
  };
  const choices = () => {
    for (const key of keys) {
      if (list.querySelector(`[data-key="${CSS.escape(key)}"]`)) continue;
      const [kind, name] = key.split("|");
      const box = el("input", { type: "checkbox", checked: wanted.has(key), onchange: async (event) => {
        if (event.target.checked) wanted.add(key); else wanted.delete(key);
        try { await arrange(); } catch (error) { visit.problem(error); }
      } });
      list.append(el("label", { data: { key } }, box, `${KINDS[kind] ?? `${kind}: `}${name}`));
    }
  };
  // Charts for what is wanted; a metric that was not asked for before is asked for from the beginning.
  const arrange = async () => {
    for (const [key, chart] of charts) if (!wanted.has(key)) { chart.close(); chart.element.remove(); charts.delete(key); }
    for (const key of wanted) {
      if (charts.has(key)) continue;
      const [kind, name] = key.split("|");
      const chart = new Chart(`${KINDS[kind] ?? ""}${name}`, name);
      charts.set(key, chart);
      grid.append(chart.element);
    }
    const names = [...new Set([...wanted].map((key) => key.split("|")[1]))].sort();
    for (const one of series) {
      if (one.names.join() !== names.join()) { one.names = names; one.cursor = ""; }
    }
    await Promise.all(series.map((one) => one.refresh(visit.signal)));
    redraw();
  };
  visit.onleave(() => { for (const chart of charts.values()) chart.close(); });

  const legend = runs.length > 1
    ? el("ul", { class: "legend" }, runs.map((run, at) => el("li", {}, el("span", { class: `swatch k${at % 8}`, "aria-hidden": "true" }), run))) : null;
  root.append(el("div", { class: "bar" }, el("label", { for: "smooth" }, "Smoothing"), weight, amount, el("label", { for: "axis" }, "Over"), axis),
    ...[legend].filter(Boolean),
    ...(choose ? [el("details", { class: "choose" }, el("summary", {}, "Metrics"), el("label", { for: "metric-filter" }, "Filter "), search, list)] : []), grid);

  let known = "";
  return async () => {
    const told = await Promise.all(runs.map((run) => get("run", { run }, visit.signal)));
    const found = [...new Set(told.flatMap((one) => Object.entries(one.names).flatMap(([kind, names]) => names.map((name) => `${kind}|${name}`))))];
    if (found.join() !== known) {
      known = found.join();
      // Until there are steps, what is shown is a guess, which those steps replace.
      const settled = wanted && keys.some((key) => key.startsWith("train|"));
      keys = found;
      if (!settled) {
        wanted = pick(keys);
        list.replaceChildren();
      }
      choices();
      await arrange();
    } else {
      const news = await Promise.all(series.map((one) => one.refresh(visit.signal)));
      if (news.some(Boolean)) redraw();
    }
    return told;
  };
}
