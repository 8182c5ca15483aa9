// Several runs beside one another: curves, and where their recipes differ.

import { get, Problem } from "./api.js";
import { curves } from "./curves.js";
import { address, el } from "./dom.js";

export async function showCompare(root, values, visit) {
  const runs = [...new Set(values.getAll("run"))].slice(0, 12);
  if (!runs.length) throw new Problem({ what: "no runs were chosen", where: "", mend: "choose them in the list of runs" }, 400);
  const found = (await get("differences", { run: runs }, visit.signal)).differences;
  const table = el("table", { class: "plain differences" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"), runs.map((run) => el("th", { scope: "col" }, el("a", { href: address("run", { run }) }, run))))),
    el("tbody", {}, found.map((one) => el("tr", { data: { key: one.key } }, el("th", { scope: "row" }, one.key),
      runs.map((run) => el("td", {}, one.absent.includes(run) ? el("span", { class: "muted" }, "not there") : shown(one.values[run])))))));
  const place = el("section", { "aria-label": "Curves" });
  root.replaceChildren(el("h1", {}, "Compare"), el("details", { open: true }, el("summary", {}, `Recipes: ${found.length} differences`),
    found.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Differences of the recipes" }, table) : el("p", { class: "muted" }, "the recipes are the same")), place);
  const update = await curves(place, runs, visit);
  await visit.follow(update);
}

function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
