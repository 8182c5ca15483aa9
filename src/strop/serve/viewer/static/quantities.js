// What tokens can be coloured by, and what is said of one.

import { number } from "./numbers.js";

const LIKELY = [0.9, 0.7, 0.5, 0.25, 0.1, 0.01];
const LEAST = 0.01; // a difference below this has no colour, or rounding would look like an error

/** Each: label, of(token) -> number or null, and a scale. Tokens are objects with the names of the file's columns. */
export const QUANTITIES = {
  sampler_logprobs: { label: "sampler log-probability", of: (token) => token.sampler_logprobs, scale: "likely" },
  trainer_logprobs: { label: "trainer log-probability", of: (token) => token.trainer_logprobs, scale: "likely" },
  difference: { label: "difference (trainer − sampler)", of: difference, scale: "both", least: LEAST },
  ratio: { label: "ratio (trainer / sampler)", of: ratio, scale: "both", least: LEAST, centre: 1 },
  advantages: { label: "advantage", of: (token) => token.advantages, scale: "both", least: 0 },
  mask: { label: "mask (what is trained)", of: (token) => (token.sampled ? 1 : 0), scale: "each" },
  versions: { label: "weight version", of: (token) => token.versions, scale: "each" },
};

function difference(token) {
  const { trainer_logprobs: trainer, sampler_logprobs: sampler } = token;
  return typeof trainer === "number" && typeof sampler === "number" ? trainer - sampler : null;
}

function ratio(token) {
  const found = difference(token);
  return found === null ? null : Math.exp(found);
}

/** A function from a token to the class of its colour, with a legend: [[class, words], …]. */
export function colouring(name, tokens) {
  const quantity = QUANTITIES[name];
  const values = tokens.map(quantity.of).filter((value) => typeof value === "number");
  if (quantity.scale === "likely") {
    const colour = (value) => `s${LIKELY.filter((bound) => Math.exp(value) < bound).length}`;
    const words = ["p ≥ 0.9", "≥ 0.7", "≥ 0.5", "≥ 0.25", "≥ 0.1", "≥ 0.01", "< 0.01"];
    return { colour: of(quantity, colour), legend: words.map((text, at) => [`s${at}`, text]) };
  }
  if (quantity.scale === "each") {
    const known = [...new Set(values)].sort((a, b) => a - b);
    const colour = (value) => `c${(value < 0 ? 6 : value % 6)}`;
    const words = (value) => (name === "mask" ? (value ? "trained" : "context") : `version ${value}`);
    return { colour: of(quantity, colour), legend: known.slice(0, 24).map((value) => [colour(value), words(value)]) };
  }
  const centre = quantity.centre ?? 0;
  // A ratio of 2 is as far as one of 1/2.
  const away = (value) => (centre ? Math.log(value) : value);
  const far = values.reduce((most, value) => Math.max(most, Number.isFinite(away(value)) ? Math.abs(away(value)) : 0), quantity.least) || 1;
  const colour = (value) => `d${4 + Math.max(-4, Math.min(4, Math.round((4 * away(value)) / far)))}`;
  const back = (value) => number(centre ? Math.exp(value) : value, 3);
  return { colour: of(quantity, colour), legend: [["d0", back(-far)], ["d2", back(-far / 2)], ["d4", back(0)], ["d6", back(far / 2)], ["d8", back(far)]] };
}

function of(quantity, colour) {
  return (token) => {
    const value = quantity.of(token);
    return typeof value === "number" && !Number.isNaN(value) ? colour(value) : "";
  };
}
