// One episode, token by token.

import { get, Problem } from "./api.js";
import { TokenView } from "./token_view.js";
import { address, el, visible } from "./dom.js";
import { number } from "./numbers.js";
import { colouring, QUANTITIES } from "./quantities.js";

export async function showEpisode(root, values, visit) {
  const run = values.get("run") ?? "";
  const step = Number(values.get("step"));
  const beside = values.get("beside") === "1";
  const group = values.get("tree") === "group";
  const row = values.has("row") ? Number(values.get("row")) : await rowOf(run, step, beside, values, visit);
  const told = await get("episode", { run, step, row, beside, group }, visit.signal);
  const here = (changes) => address("episode", { run, step, row, beside: beside ? 1 : null, tree: group ? "group" : null, ...changes });
  const stream = told.streams[told.shown];
  const tokens = told.nodes.flatMap(tokensOf);
  const chosen = el("select", { id: "quantity" }, Object.entries(QUANTITIES).map(([name, quantity]) => el("option", { value: name }, quantity.label)));
  chosen.value = recall();
  const legend = el("ul", { class: "legend", "aria-label": "Colours" });
  const numbers = el("div", { class: "numbers", "aria-live": "polite", id: "token-numbers" });
  const view = new TokenView(tokens, (token) => tell(numbers, token, step));
  const paint = () => {
    const { colour, legend: words } = colouring(chosen.value, tokens);
    view.colour(colour);
    legend.replaceChildren(...words.map(([kind, text]) => el("li", {}, el("span", { class: `tok ${kind}` }, text))));
    remember(chosen.value);
  };
  chosen.addEventListener("change", paint);
  visit.onleave(() => view.close());
  tell(numbers, null, step);
  const siblings = told.siblings;
  const at = siblings.findIndex((one) => one.index === row);
  const to = (label, other) => el("a", { class: "button", href: other === undefined ? null : here({ row: other.index }), "aria-disabled": other === undefined ? "true" : null }, label);
  root.replaceChildren(
    el("h1", {}, `Episode ${stream.group}.${stream.sample} of step ${step}`),
    el("div", { class: "bar" }, to("Earlier sample", siblings[at - 1]), to("Later sample", siblings[at + 1]),
      el("a", { class: "button", href: here({ tree: group ? null : "group" }) }, group ? "This episode only" : "All samples of the prompt"),
      el("label", { for: "quantity" }, "Colour by"), chosen),
    legend,
    el("div", { class: "episode" },
      el("section", { class: "conversation", "aria-label": "Conversation" },
        told.has_texts ? null : el("p", { class: "muted" }, "The run keeps no tokenizer beside a checkpoint: tokens are shown by their numbers."),
        tree(told, view)),
      el("aside", { "aria-label": "Numbers, reward and verifiers" }, numbers, facts(stream, told), ...texts(stream))));
  paint();
}

async function rowOf(run, step, beside, values, visit) {
  const { rows } = await get("episodes", { run, step, beside }, visit.signal);
  const found = rows.index.find((at) => rows.group[at] === Number(values.get("group")) && rows.sample[at] === Number(values.get("sample")));
  if (found === undefined) {
    throw new Problem({ what: `step ${step} has no episode ${values.get("group")}.${values.get("sample")}`, where: run, mend: "open the episodes of the step" }, 404);
  }
  return found;
}

function tokensOf(node, turn) {
  return node.tokens.map((id, at) => ({
    id, turn, kind: node.kind, sampled: node.kind === "sampled", text: node.texts[at], position: node.start + at,
    sampler_logprobs: node.sampler_logprobs?.[at] ?? null, trainer_logprobs: node.trainer_logprobs?.[at] ?? null,
    advantages: node.advantages?.[at] ?? null, versions: node.versions?.[at] ?? null,
  }));
}

const WORDS = { prompt: "Prompt", sampled: "Sampled", observation: "Observation" };

/** Turns one after another; where paths part, each in a list of its own. */
function tree(told, view) {
  const children = told.nodes.map(() => []);
  told.nodes.forEach((node, at) => { if (node.parent >= 0) children[node.parent].push(at); });
  const starts = [];
  let start = 0;
  for (const node of told.nodes) { starts.push(start); start += node.tokens.length; }
  const top = el("div", { class: "turns" });
  const waiting = told.nodes.flatMap((node, at) => (node.parent < 0 ? [[at, top]] : [])).reverse();
  while (waiting.length) {
    const [at, place] = waiting.pop();
    const node = told.nodes[at];
    const body = view.part(starts[at], starts[at] + node.tokens.length);
    const versions = [...new Set(node.versions ?? [])].filter((version) => version >= 0);
    const head = [`${node.tokens.length} tokens`, versions.length ? `weights ${versions.join(", ")}` : ""].filter(Boolean).join(" · ");
    const fold = el("button", { type: "button", class: "fold", "aria-expanded": "true", onclick: () => {
      body.hidden = !body.hidden;
      fold.setAttribute("aria-expanded", String(!body.hidden));
    } }, WORDS[node.kind] ?? node.kind);
    place.append(el("section", { class: `turn ${node.kind}`, "aria-label": `${WORDS[node.kind]}, ${head}`, data: { node: at } },
      el("h2", {}, fold, el("span", { class: "muted" }, ` ${head}`)), body));
    if (children[at].length === 1) waiting.push([children[at][0], place]);
    else if (children[at].length) {
      const branches = children[at].map((child, number) => {
        const ends = told.nodes[child].streams.map((one) => told.streams[one]);
        const item = el("li", { class: "branch" }, el("p", { class: "muted" }, `branch ${number + 1} of ${children[at].length}: ${ends.slice(0, 6).map((one) => `sample ${one.sample}, reward ${number_(one.reward)}`).join("; ")}${ends.length > 6 ? " …" : ""}`));
        return [child, item];
      });
      place.append(el("ol", { class: "branches" }, branches.map(([, item]) => item)));
      waiting.push(...branches.reverse());
    }
  }
  return top;
}

const number_ = (value) => number(value);

function tell(place, token, step) {
  if (!token) {
    place.replaceChildren(el("h2", {}, "Token"), el("p", { class: "muted" }, "Point at a token, or go to it with the arrow keys."));
    return;
  }
  const exact = (value) => (value === null || value === undefined ? "–" : String(value));
  const chance = typeof token.sampler_logprobs === "number" ? Math.exp(token.sampler_logprobs) : null;
  const stale = token.versions !== null && token.versions >= 0 ? step - 1 - token.versions : null;
  const lines = [
    ["text", "text", token.text === null ? "unknown" : JSON.stringify(visible(token.text))], ["id", "token id", token.id], ["position", "position", token.position],
    ["mask", "mask", token.sampled ? "trained" : "context"],
    ["sampler_logprobs", "sampler log-probability", exact(token.sampler_logprobs)], ["trainer_logprobs", "trainer log-probability", exact(token.trainer_logprobs)],
    ["difference", "difference", number(QUANTITIES.difference.of(token), 6)], ["ratio", "ratio", number(QUANTITIES.ratio.of(token), 8)],
    ["probability", "sampler probability", number(chance, 4)], ["advantages", "advantage", exact(token.advantages)],
    ["versions", "weight version", exact(token.versions)], ["staleness", "staleness", exact(stale)],
  ];
  place.replaceChildren(el("h2", {}, "Token"), el("dl", {}, lines.flatMap(([name, label, value]) => [el("dt", {}, label), el("dd", { data: { name } }, String(value))])));
}

function facts(stream, told) {
  const correct = stream.correct === null ? "not known" : stream.correct ? "yes" : "no";
  const lines = [["reward", number(stream.reward)], ["correct", correct], ["answer", stream.answer ?? "–"], ["ended", stream.status || "–"], ["prompt", stream.prompt_id || "–"], ["paths", String(told.streams.length)]];
  const components = Object.entries(stream.components);
  return el("div", { class: "card" }, el("h2", {}, "Reward"),
    el("dl", { class: "reward" }, lines.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { data: { fact: name } }, visible(String(value)))])),
    components.length ? el("h3", {}, "Components") : null,
    components.length ? el("dl", { class: "components" }, components.flatMap(([name, score]) => [el("dt", {}, visible(name)), el("dd", { data: { component: name } }, number(score))])) : null,
    el("h3", {}, "What the verifier said"), el("pre", { class: "code detail", tabindex: "0" }, visible(stream.detail) || "nothing"));
}

function texts(stream) {
  const parts = [["Prompt as text", stream.prompt_text, false], ["Completion as text", stream.completion_text, false], ["Data row", stream.row, false]];
  return parts.map(([title, text, open]) => el("details", { class: "card", open }, el("summary", {}, title), el("pre", { class: "code", tabindex: "0" }, visible(text))));
}

function recall() {
  try { const kept = sessionStorage.getItem("strop-quantity"); return kept in QUANTITIES ? kept : "sampler_logprobs"; } catch { return "sampler_logprobs"; }
}

function remember(name) {
  try { sessionStorage.setItem("strop-quantity", name); } catch { /* It is asked for again. */ }
}
