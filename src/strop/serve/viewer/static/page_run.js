// One run: its tabs.

import { get } from "./api.js";
import { curves } from "./curves.js";
import { address, el } from "./dom.js";
import { duration, metric, when } from "./numbers.js";
import { showAlarms } from "./tab_alarms.js";
import { showSteps } from "./tab_steps.js";
import { showSystem } from "./tab_system.js";
import { showTimeline } from "./tab_timeline.js";

const TABS = { curves: "Curves", steps: "Steps and episodes", timeline: "Timeline", alarms: "Alarms", system: "System", config: "Recipe" };

export async function showRun(root, values, visit) {
  const run = values.get("run") ?? "";
  const tab = values.get("tab") ?? "curves";
  const told = await get("run", { run }, visit.signal);
  const head = el("div", { class: "facts" });
  const place = el("section", { class: "tab", "aria-label": TABS[tab] ?? tab });
  const tabs = el("nav", { class: "tabs", "aria-label": "Of this run" }, Object.entries(TABS).map(([name, label]) =>
    el("a", { href: address("run", { run, tab: name }), "aria-current": name === tab ? "page" : null, data: { tab: name } },
      name === "alarms" && told.alarms.length ? `${label} (${told.alarms.length})` : label)));
  root.replaceChildren(el("h1", {}, run), head, tabs, place);
  const facts = (now) => headline(head, now);
  facts(told);
  const shows = { steps: showSteps, timeline: showTimeline, alarms: showAlarms, system: showSystem };
  if (tab in shows) {
    await shows[tab](place, told, visit, values, facts);
  } else if (tab === "config") {
    place.append(el("pre", { class: "code", tabindex: "0", "aria-label": "The resolved recipe" }, (await get("config", { run }, visit.signal)).text));
  } else {
    const update = await curves(place, [run], visit);
    await visit.follow(async () => facts((await update())[0]));
  }
}

function headline(head, told) {
  const manifest = told.manifest;
  const facts = [
    ["state", el("span", { class: `status ${told.status}` }, told.status)],
    ["step", `${told.step}/${told.steps}`],
    [told.headline || "reward", told.headline ? metric(told.headline, told.value) : "–"],
    ["recipe", [told.recipe, told.method].filter(Boolean).join(" · ") || "–"],
    ["time", duration(told.seconds)],
    ["started", when(told.created)],
  ];
  if (told.problem) facts.push(["why", told.problem]);
  if (manifest.best?.metric) facts.push(["best", `step ${manifest.best.step}, ${manifest.best.metric} ${metric(String(manifest.best.metric), manifest.best.score)}`]);
  if (manifest.parent) facts.push(["parent", String(manifest.parent)]);
  const text = facts.map(([name, value]) => `${name}=${value.textContent ?? value}`).join("|");
  if (head.dataset.told === text) return;
  head.dataset.told = text;
  head.replaceChildren(...facts.map(([name, value]) => el("div", { class: "fact", data: { fact: name } }, el("span", { class: "name" }, name), el("span", { class: "value" }, value))));
}
