// A chart of curves that can be read with the mouse, with the keyboard, and in words.

import { el, svg } from "./dom.js";
import { metric, number } from "./numbers.js";

const HEIGHT = 160;
const EDGE = 20; // room above and below for what the ends of the axis are

/** Exponential mean of values, without the pull towards the first. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** At most two points for each pixel: the lowest and the highest, so that peaks stay. */
export function thinned(points, pixels) {
  if (points.length <= 2 * pixels) return points;
  const found = [];
  for (let part = 0; part < pixels; part += 1) {
    const start = Math.floor((part * points.length) / pixels);
    const end = Math.floor(((part + 1) * points.length) / pixels);
    let low = start;
    let high = start;
    for (let at = start; at < end; at += 1) {
      if (points[at][1] < points[low][1]) low = at;
      if (points[at][1] > points[high][1]) high = at;
    }
    found.push(points[Math.min(low, high)]);
    if (low !== high) found.push(points[Math.max(low, high)]);
  }
  return found;
}

export class Chart {
  /** title: what is drawn; name: the metric, for its unit. */
  constructor(title, name) {
    this.title = title;
    this.name = name;
    this.curves = [];
    this.at = null;
    this.drawing = svg("svg", { class: "plot", "aria-hidden": "true", focusable: "false" });
    this.high = el("span", { class: "axis high" });
    this.low = el("span", { class: "axis low" });
    this.first = el("span", { class: "axis" });
    this.last = el("span", { class: "axis" });
    this.field = el("div", { class: "field", tabindex: "0", role: "group", "aria-label": `${title}: arrow keys read the curve` }, this.drawing, this.high, this.low);
    this.readout = el("output", { class: "readout" });
    this.element = el("figure", { class: "chart", data: { name } },
      el("figcaption", {}, title), this.field, el("div", { class: "xaxis" }, this.first, this.last), this.readout);
    this.field.addEventListener("pointermove", (event) => this.#point(event));
    this.field.addEventListener("pointerleave", () => this.#read(null));
    this.field.addEventListener("keydown", (event) => this.#pressed(event));
    this.field.addEventListener("blur", () => this.#read(null));
    this.observer = new ResizeObserver(() => this.#draw());
    this.observer.observe(this.field);
  }

  /** curves: [{ label, colour (0 to 7), points: [[x, y], …] }]; weight: of the smoothing; time: whether x is seconds. */
  set(curves, { weight = 0, time = false } = {}) {
    this.time = time;
    this.curves = curves.map((curve) => {
      const smooth = smoothed(curve.points.map((point) => point[1]), weight);
      return { ...curve, smooth: curve.points.map((point, at) => [point[0], smooth[at]]), raw: weight ? curve.points : null };
    });
    this.#draw();
  }

  close() { this.observer.disconnect(); }

  #draw() {
    const width = Math.round(this.field.clientWidth);
    if (!width) return;
    const all = this.curves.flatMap((curve) => (curve.raw ?? curve.smooth));
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const [x, y] of all) {
      x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    }
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.element.classList.toggle("empty", !all.length);
    if (!all.length) { this.drawing.replaceChildren(); this.readout.textContent = "no numbers yet"; return; }
    [this.high.textContent, this.low.textContent] = [metric(this.name, y1), y1 === y0 ? "" : metric(this.name, y0)];
    [this.first.textContent, this.last.textContent] = [this.#x(x0), x1 === x0 ? "" : this.#x(x1)];
    if (y1 === y0) { y0 -= 1; y1 += 1; }
    if (x1 === x0) { x0 -= 1; x1 += 1; }
    const place = ([x, y]) => [((x - x0) / (x1 - x0)) * (width - 8) + 4, HEIGHT - EDGE - ((y - y0) / (y1 - y0)) * (HEIGHT - 2 * EDGE)];
    this.place = place;
    const lines = [];
    for (const curve of this.curves) {
      if (curve.raw) lines.push(this.#line(curve.raw, place, width, `line faint k${curve.colour}`));
      lines.push(this.#line(curve.smooth, place, width, `line k${curve.colour}`));
      if (curve.smooth.length && curve.smooth.length < 40) {
        for (const point of curve.smooth) {
          const [x, y] = place(point);
          lines.push(svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 2, class: `dot k${curve.colour}` }));
        }
      }
    }
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: -9, x2: -9 });
    this.drawing.replaceChildren(...lines, this.cursor);
    this.#read(this.at);
  }

  #line(points, place, width, kind) {
    const path = thinned(points, width).map((point) => place(point).map((one) => one.toFixed(1)).join(" ")).join("L");
    return svg("path", { d: path ? `M${path}` : "", class: kind });
  }

  #x(value) { return this.time ? `${number(value / 60)} min` : `step ${number(value, 7)}`; }

  #point(event) {
    if (!this.place) return;
    const box = this.field.getBoundingClientRect();
    let best = null;
    for (const curve of this.curves) {
      for (const point of curve.smooth) {
        const distance = Math.abs(this.place(point)[0] - (event.clientX - box.left));
        if (best === null || distance < best[0]) best = [distance, point[0]];
      }
    }
    this.#read(best && best[1]);
  }

  #pressed(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const xs = [...new Set(this.curves.flatMap((curve) => curve.smooth.map((point) => point[0])))].sort((a, b) => a - b);
    const now = this.at === null ? (steps[event.key] > 0 ? -1 : xs.length) : xs.indexOf(this.at);
    this.#read(xs[Math.min(xs.length - 1, Math.max(0, now + steps[event.key]))] ?? null);
  }

  #read(x) {
    this.at = x;
    const ends = x === null;
    this.cursor?.setAttribute("x1", "-9");
    this.cursor?.setAttribute("x2", "-9");
    const parts = [];
    for (const curve of this.curves) {
      const at = ends ? curve.smooth.length - 1 : curve.smooth.findIndex((point) => point[0] === x);
      if (at < 0) continue;
      const [px] = this.place(curve.smooth[at]);
      if (!ends) { this.cursor.setAttribute("x1", px); this.cursor.setAttribute("x2", px); }
      const raw = curve.raw ? ` (${metric(this.name, curve.raw[at][1])})` : "";
      parts.push(el("span", { class: "read" }, el("span", { class: `swatch k${curve.colour}`, "aria-hidden": "true" }),
        `${this.curves.length > 1 ? `${curve.label}: ` : ""}${metric(this.name, curve.smooth[at][1])}${raw}`));
      if (ends && this.curves.length > 1) continue;
    }
    this.readout.replaceChildren(el("span", { class: "read" }, ends ? "last:" : `${this.#x(x)}:`), ...parts);
  }
}

/** A small curve without axes, for a row of a table; the number beside it says it in words. */
export function spark(values, width = 96, height = 22) {
  const known = values.filter((value) => typeof value === "number");
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
  if (known.length < 2) return drawing;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const path = [];
  values.forEach((value, at) => {
    if (typeof value !== "number") return;
    const x = (at / (values.length - 1)) * (width - 2) + 1;
    const y = height - 2 - (high === low ? 0.5 : (value - low) / (high - low)) * (height - 4);
    path.push(`${x.toFixed(1)} ${y.toFixed(1)}`);
  });
  drawing.append(svg("path", { d: `M${path.join("L")}`, class: "line k0" }));
  return drawing;
}
