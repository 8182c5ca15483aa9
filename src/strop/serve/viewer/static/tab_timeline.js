// What each part of the run did during a step.

import { get } from "./api.js";
import { el } from "./dom.js";
import { seconds } from "./numbers.js";

const COLOURS = { sampling: 0, verifying: 1, scoring: 2, training: 3, publishing: 4, alarms: 5, rest: 7, preparing: 6 };

export async function showTimeline(place, told, visit, values, facts) {
  const run = told.run;
  let follow = !values.get("step");
  let step = Number(values.get("step")) || told.step;
  const input = el("input", { type: "number", id: "step", min: "1", value: String(step), onchange: () => go(Number(input.value)) });
  const latest = el("input", { type: "checkbox", id: "latest", checked: follow, onchange: () => { follow = latest.checked; if (follow) go(told.step, true); } });
  const drawing = el("div", { class: "timeline" });
  const go = async (to, keep = false) => {
    step = to;
    follow = keep;
    latest.checked = keep;
    input.value = String(step);
    try { await draw(); } catch (error) { if (!visit.signal.aborted) visit.problem(error); }
  };
  const draw = async () => {
    if (!step) { drawing.replaceChildren(el("p", { class: "muted" }, "no step yet")); return; }
    const found = await get("timeline", { run, step }, visit.signal);
    const text = JSON.stringify(found);
    if (drawing.dataset.told === text) return;
    drawing.dataset.told = text;
    drawing.replaceChildren(...lanes(found));
  };
  place.append(
    el("div", { class: "bar" }, el("button", { type: "button", onclick: () => go(Math.max(1, step - 1)) }, "Earlier"),
      el("label", { for: "step" }, "Step"), input, el("button", { type: "button", onclick: () => go(step + 1) }, "Later"),
      el("label", {}, latest, "follow the newest")), drawing,
    el("p", { class: "muted" }, "The run records how long each phase took; they are drawn in the order of the loop. Verifying is what was left of it after the last completion."));
  await visit.follow(async () => {
    const now = await get("run", { run }, visit.signal);
    facts(now);
    told = now;
    if (follow && now.step !== step) { step = now.step; input.value = String(step); }
    await draw();
  });
}

function lanes(found) {
  const whole = found.seconds || 1;
  const share = (value) => `${((100 * value) / whole).toFixed(1)} %`;
  const rows = found.lanes.map((lane) => {
    const track = el("div", { class: "track" });
    for (const span of lane.spans) {
      const part = el("div", { class: `span p${COLOURS[span.phase] ?? 6}`, tabindex: "0", role: "img",
        title: `${span.name}: ${seconds(span.seconds)}, ${share(span.seconds)}`, "aria-label": `${span.name}: ${seconds(span.seconds)}, from ${seconds(span.start)}` });
      part.style.left = `${(100 * span.start) / whole}%`;
      part.style.width = `${Math.max(0.3, (100 * span.seconds) / whole)}%`;
      track.append(part);
    }
    return el("div", { class: "lane", data: { lane: lane.name } },
      el("div", { class: "who" }, el("strong", {}, lane.name), el("span", { class: "muted" }, lane.device)), track);
  });
  const lines = found.lanes.flatMap((lane) => [
    ...lane.spans.map((span) => [lane.name, span.name, span.seconds, COLOURS[span.phase] ?? 6]),
    [lane.name, "waiting", Math.max(0, whole - lane.busy), null],
  ]);
  const table = el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, ["who", "what", "time", "share"].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, lines.map(([who, what, time, colour]) => el("tr", { data: { phase: what } }, el("td", {}, who),
      el("td", {}, el("span", { class: `swatch ${colour === null ? "waiting" : `p${colour}`}`, "aria-hidden": "true" }), what),
      el("td", { class: "num" }, seconds(time)), el("td", { class: "num" }, share(time))))));
  const other = Object.entries(found.other);
  return [el("p", {}, `Step ${found.step}: ${seconds(found.seconds)}`), ...rows,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Phases in numbers" }, table),
    ...(other.length ? [el("p", {}, `Beside the step: ${other.map(([name, time]) => `${name} ${seconds(time)}`).join(", ")}`)] : [])];
}
