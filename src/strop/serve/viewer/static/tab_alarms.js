// Signs of reward hacking, each with what shows it.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { address, el } from "./dom.js";
import { number } from "./numbers.js";
import { Series } from "./series.js";

export async function showAlarms(place, told, visit, values, facts) {
  const run = told.run;
  const watched = (now) => (now.names.train ?? []).filter((name) => name.startsWith("alarms/") && !/_limit$|alarms\/(on|raised)$/.test(name));
  const list = el("ol", { class: "alarms" });
  const none = el("p", { class: "muted" }, "no alarm was raised");
  const grid = el("div", { class: "charts" });
  const charts = new Map();
  let series = null;
  visit.onleave(() => { for (const chart of charts.values()) chart.close(); });
  place.append(el("h2", {}, "Raised"), none, list, el("h2", {}, "What is watched, and its limit"), grid);
  await visit.follow(async () => {
    const now = await get("run", { run }, visit.signal);
    facts(now);
    none.hidden = now.alarms.length > 0;
    const text = JSON.stringify(now.alarms);
    if (list.dataset.told !== text) {
      list.dataset.told = text;
      list.replaceChildren(...now.alarms.map((alarm) => item(run, alarm)));
    }
    const names = watched(now);
    const all = names.flatMap((name) => [name, `${name}_limit`]);
    if (!series || series.names.join() !== all.join()) series = new Series(run, all);
    if (!(await series.refresh(visit.signal))) return;
    for (const name of names) {
      if (!charts.has(name)) {
        const chart = new Chart(name.replace("alarms/", ""), name);
        charts.set(name, chart);
        grid.append(chart.element);
      }
      const points = (which) => series.points("train", which).map(([step, , value]) => [step, value]);
      charts.get(name).set([{ label: "seen", colour: 0, points: points(name) }, { label: "limit", colour: 1, points: points(`${name}_limit`) }].filter((curve) => curve.points.length));
    }
  });
}

function item(run, alarm) {
  const known = Number.isInteger(alarm.group) && Number.isInteger(alarm.sample);
  return el("li", { class: "alarm-item", data: { alarm: String(alarm.name) } },
    el("strong", {}, String(alarm.name ?? "alarm")), ` at step ${number(alarm.step, 9)}: `, el("span", {}, String(alarm.what ?? "")),
    el("span", { class: "muted" }, ` (${number(alarm.value)} against ${number(alarm.limit)})`),
    known ? el("div", {}, el("a", { href: address("episode", { run, step: alarm.step, group: alarm.group, sample: alarm.sample }) },
      `the completion that shows it: group ${alarm.group}, sample ${alarm.sample}`)) : null);
}
