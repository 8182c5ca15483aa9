// The machine, and what the run recorded of it.

import { curves } from "./curves.js";
import { el } from "./dom.js";
import { loadCharts } from "./load.js";

const OF_THE_SYSTEM = /^(memory|system|cpu|gpu|throughput)\//;

export async function showSystem(place, told, visit, values, facts) {
  const manifest = told.manifest;
  const section = (title, found) => {
    const entries = Object.entries(found ?? {});
    if (!entries.length) return null;
    return el("div", { class: "card" }, el("h2", {}, title), el("dl", {}, entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, plain(name, value))])));
  };
  place.append(el("div", { class: "cards" }, ...[
    section("Machine", manifest.platform), section("Versions", manifest.versions), section("Commit", manifest.git),
    section("Model", manifest.model), section("Data", manifest.data), section("Seeds", manifest.seeds), section("Trackers", manifest.trackers),
  ].filter(Boolean)), el("h2", {}, "Load of the machine"));
  const load = loadCharts(place, told.run, visit);
  place.append(el("h2", {}, "What the steps recorded"));
  const update = await curves(place, [told.run], visit, {
    pick: (keys) => new Set(keys.filter((key) => key.startsWith("train|") && OF_THE_SYSTEM.test(key.slice(6)))), choose: false,
  });
  place.append(el("div", { class: "card" }, el("h2", {}, "Command"), el("pre", { class: "code", tabindex: "0" }, manifest.command.map(String).join(" "))));
  await visit.follow(async () => {
    const [[now]] = await Promise.all([update(), load()]);
    facts(now);
  });
}

function plain(name, value) {
  if (name.endsWith("_bytes") && typeof value === "number") return `${(value / 2 ** 30).toFixed(1)} GiB`;
  return typeof value === "string" ? value : JSON.stringify(value);
}
