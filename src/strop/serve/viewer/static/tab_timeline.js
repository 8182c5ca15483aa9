// What each part of the run did during a step.

import { get } from "./api.js";
import { el } from "./dom.js";
import { seconds } from "./numbers.js";

const COLOURS = { sampling: 0, verifying: 1, scoring: 2, training: 3, publishing: 4, alarms: 5, evaluating: 5, rest: 7, preparing: 6 };
const RECORDED = "When phases ran, as the run recorded it; hatched is waiting. What an engine samples beyond the step's end is for later steps; what was done between two steps, evaluations and checkpoints, is left of the line where the step starts.";
const LAID_OUT = "This run recorded how long each phase took, and not when; they are drawn in the order of the loop. Verifying is what was left of it after the last completion.";

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
      el("label", {}, latest, "follow the newest")), drawing);
  await visit.follow(async () => {
    const now = await get("run", { run }, visit.signal);
    facts(now);
    told = now;
    if (follow && now.step !== step) { step = now.step; input.value = String(step); }
    await draw();
  });
}

function lanes(found) {
  const whole = found.end - found.begin || 1;
  const share = (value) => `${((100 * value) / whole).toFixed(1)} %`;
  const at = (moment) => `${(100 * (moment - found.begin)) / whole}%`;
  const rows = found.lanes.map((lane) => {
    const track = el("div", { class: "track" });
    for (const span of lane.spans) {
      const part = el("div", { class: `span ${colour(span)}`, tabindex: "0", role: "img", data: { phase: span.phase },
        title: `${span.name}: ${seconds(span.seconds)}, ${share(span.seconds)}`, "aria-label": `${span.name}: ${seconds(span.seconds)}, from ${moment(span.start)}` });
      part.style.left = at(span.start);
      part.style.width = `${Math.max(0.3, (100 * span.seconds) / whole)}%`;
      track.append(part);
    }
    if (found.begin < 0) {
      const mark = el("div", { class: "mark", "aria-hidden": "true" });
      mark.style.left = at(0);
      track.append(mark);
    }
    return el("div", { class: "lane", data: { lane: lane.name } },
      el("div", { class: "who" }, el("strong", {}, lane.name), el("span", { class: "muted" }, lane.device)), track);
  });
  const lines = found.lanes.flatMap((lane) => [
    ...byName(lane.spans.filter((span) => !span.waits)).map(([name, time, shown]) => [lane.name, name, time, shown]),
    [lane.name, "waiting", Math.max(0, whole - lane.busy), "waiting"],
  ]);
  const table = el("table", { class: "plain" },
    el("thead", {}, el("tr", {}, ["who", "what", "time", "share"].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, lines.map(([who, what, time, shown]) => el("tr", { data: { phase: what } }, el("td", {}, who),
      el("td", {}, el("span", { class: `swatch ${shown}`, "aria-hidden": "true" }), what),
      el("td", { class: "num" }, seconds(time)), el("td", { class: "num" }, share(time))))));
  const other = Object.entries(found.other);
  const between = found.begin < 0 ? `, and ${seconds(-found.begin)} between it and the step before` : "";
  const begun = found.started === null ? "" : `, from ${new Date(1000 * found.started).toLocaleTimeString()}`;
  return [el("p", {}, `Step ${found.step}: ${seconds(found.seconds)}${begun}${between}`), ...rows,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Phases in numbers" }, table),
    ...(other.length ? [el("p", {}, `Beside the step: ${other.map(([name, time]) => `${name} ${seconds(time)}`).join(", ")}`)] : []),
    el("p", { class: "muted" }, found.recorded ? RECORDED : LAID_OUT)];
}

function colour(span) { return span.waits ? "waits" : `p${COLOURS[span.phase] ?? 6}`; }

function moment(start) { return start < 0 ? `${seconds(-start)} before the step` : seconds(start); }

/** What was done how long in all: [[name, seconds, colour], …]. */
function byName(spans) {
  const found = new Map();
  for (const span of spans) {
    const [time] = found.get(span.name) ?? [0];
    found.set(span.name, [time + span.seconds, colour(span)]);
  }
  return [...found].map(([name, [time, shown]]) => [name, time, shown]);
}
