// Tokens in the page: those near what is seen, in chunks, however many there are.

import { el, visibleToken } from "./dom.js";

const CHUNK = 400;
const NEAR = "800px";

export class TokenView {
  /** tokens: all of them. tell(token): called with the one under the mouse or the focus. */
  constructor(tokens, tell) {
    this.tokens = tokens;
    this.tell = tell;
    this.of = () => "";
    this.chunks = [];
    this.current = Math.max(0, tokens.findIndex((token) => token.sampled));
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) this.#fill(entry.target);
        else this.#empty(entry.target);
      }
    }, { rootMargin: NEAR });
  }

  /** The tokens from start to end, as an element. */
  part(start, end) {
    const body = el("div", { class: "tokens" });
    for (let at = start; at < end; at += CHUNK) {
      const chunk = el("span", { class: "chunk" });
      [chunk.from, chunk.until] = [at, Math.min(end, at + CHUNK)];
      this.chunks.push(chunk);
      body.append(chunk);
      // The first ones at once, for a page that is all there when it is there; the others when they come near.
      if (at < 2 * CHUNK) this.#fill(chunk); else this.#guess(chunk);
      this.observer.observe(chunk);
    }
    body.addEventListener("pointerover", (event) => this.#seen(event.target));
    body.addEventListener("focusin", (event) => this.#seen(event.target, true));
    body.addEventListener("click", (event) => { if (event.target.matches(".tok")) event.target.focus(); });
    body.addEventListener("keydown", (event) => this.#pressed(event));
    return body;
  }

  /** Colour all tokens: a function from a token to a class. */
  colour(of) {
    this.of = of;
    for (const chunk of this.chunks) for (const token of chunk.children) token.className = this.#kind(this.tokens[Number(token.dataset.at)]);
  }

  close() { this.observer.disconnect(); }

  #kind(token) {
    const colour = this.of(token);
    return `tok ${token.sampled ? "own" : "context"} ${colour || "plain"}`;
  }

  #fill(chunk) {
    if (chunk.firstChild) return;
    chunk.style.minHeight = "";
    chunk.classList.remove("far");
    for (let at = chunk.from; at < chunk.until; at += 1) {
      const token = this.tokens[at];
      const text = token.text === null ? `#${token.id} ` : token.text === "" ? "·" : visibleToken(token.text);
      chunk.append(el("span", { class: this.#kind(token), tabindex: at === this.current ? "0" : "-1", "aria-describedby": "token-numbers", data: { at } }, text));
    }
  }

  #empty(chunk) {
    if (!chunk.firstChild || chunk.contains(document.activeElement)) return;
    // An element that is hidden has no height to keep.
    if (!chunk.offsetParent) return;
    const height = chunk.offsetHeight;
    chunk.replaceChildren();
    chunk.classList.add("far");
    chunk.style.minHeight = `${height}px`;
  }

  #guess(chunk) {
    chunk.classList.add("far");
    chunk.style.minHeight = `${Math.ceil((chunk.until - chunk.from) / 16) * 24}px`;
  }

  #seen(target, focused = false) {
    if (!target.matches?.(".tok")) return;
    const at = Number(target.dataset.at);
    if (focused && at !== this.current) {
      const before = this.#element(this.current, false);
      if (before) before.tabIndex = -1;
      this.current = at;
      target.tabIndex = 0;
    }
    this.tell(this.tokens[at]);
  }

  #element(at, fill = true) {
    const chunk = this.chunks.find((one) => one.from <= at && at < one.until);
    if (chunk && fill) this.#fill(chunk);
    return chunk?.children[at - chunk.from] ?? null;
  }

  #pressed(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const at = Math.min(this.tokens.length - 1, Math.max(0, this.current + steps[event.key]));
    const element = this.#element(at);
    element?.scrollIntoView({ block: "nearest" });
    element?.focus({ preventScroll: true });
  }
}
