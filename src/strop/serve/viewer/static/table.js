// A table of which only the rows that are seen are in the page, however many there are.

import { el } from "./dom.js";
import { compare } from "./numbers.js";

const MARGIN = 6; // rows beyond the edge that are ready

/**
 * columns: [{ key, label, width, narrow, numeric, wide, value(row), show(row) }]; on narrow screens `wide` ones are left
 * out and `narrow` is the width;
 * `show` gives a text or an element. key(row) names a row across updates. open(row) is its address, or null.
 */
export class VirtualTable {
  constructor({ label, columns, key, open, sort = null, falling = false, height = "60vh", rowHeight = 34 }) {
    this.columns = columns;
    this.link = columns.findIndex((column) => column.link);
    this.key = key;
    this.open = open;
    this.rowHeight = rowHeight;
    this.sort = sort;
    this.falling = falling;
    this.rows = [];
    this.current = 0;
    this.shown = new Map();
    this.head = el("div", { class: "vt-head", role: "row" }, columns.map((column) => this.#heading(column)));
    this.body = el("div", { class: "vt-body", role: "rowgroup" });
    this.scroller = el("div", { class: "vt-scroll" }, el("div", { role: "rowgroup", class: "vt-top" }, this.head), this.body);
    this.scroller.style.maxHeight = height;
    this.empty = el("p", { class: "muted", hidden: true }, "nothing here");
    this.element = el("div", { class: "vt" }, this.scroller, this.empty);
    this.scroller.setAttribute("role", "grid");
    this.scroller.setAttribute("aria-label", label);
    this.#widths();
    let waiting = false;
    this.scroller.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; this.#draw(); });
    }, { passive: true });
    this.body.addEventListener("keydown", (event) => this.#pressed(event));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".vt-row");
      if (row && !event.target.closest("a, input, button, label")) this.#follow(Number(row.dataset.at));
    });
    this.observer = new ResizeObserver(() => this.#draw());
    this.observer.observe(this.scroller);
  }

  /** Show these rows; where the reader is, and what has the focus, stays. */
  setRows(rows) {
    this.given = rows;
    const column = this.columns.find((one) => one.key === this.sort);
    this.rows = column ? [...rows].sort((a, b) => compare(column.value(a), column.value(b), this.falling)) : rows;
    this.current = Math.min(this.current, Math.max(0, this.rows.length - 1));
    this.body.style.height = `${this.rows.length * this.rowHeight}px`;
    this.scroller.setAttribute("aria-rowcount", String(this.rows.length + 1));
    this.empty.hidden = this.rows.length > 0;
    this.#draw();
  }

  /** Take out what watches the page. */
  close() { this.observer.disconnect(); }

  #heading(column) {
    const cell = el("div", { role: "columnheader", class: `vt-cell${column.numeric ? " num" : ""}${column.wide ? " wide" : ""}` });
    if (column.value) {
      cell.append(el("button", { type: "button", class: "sort", onclick: () => this.#sortBy(column) }, column.label, el("span", { class: "arrow", "aria-hidden": "true" })));
      if (this.sort === column.key) this.#mark(cell);
    } else cell.append(column.label);
    cell.dataset.key = column.key;
    return cell;
  }

  #mark(cell) {
    cell.setAttribute("aria-sort", this.falling ? "descending" : "ascending");
    cell.querySelector(".arrow").textContent = this.falling ? " ↓" : " ↑";
  }

  #sortBy(column) {
    this.falling = this.sort === column.key ? !this.falling : Boolean(column.numeric);
    this.sort = column.key;
    for (const cell of this.head.children) {
      cell.removeAttribute("aria-sort");
      const arrow = cell.querySelector(".arrow");
      if (arrow) arrow.textContent = "";
      if (cell.dataset.key === column.key) this.#mark(cell);
    }
    this.current = 0;
    this.scroller.scrollTop = 0;
    this.setRows(this.given ?? []);
  }

  #widths() {
    const of = (columns) => columns.map((column) => column.width ?? "minmax(5rem, 1fr)").join(" ");
    const narrow = this.columns.filter((column) => !column.wide).map((column) => ({ width: column.narrow ?? column.width }));
    this.scroller.style.setProperty("--columns", of(this.columns));
    this.scroller.style.setProperty("--columns-narrow", of(narrow));
  }

  #draw() {
    const head = this.head.offsetHeight;
    const top = this.scroller.scrollTop;
    const seen = Math.min(this.scroller.clientHeight || 600, 4000) - head;
    const first = Math.max(0, Math.floor(top / this.rowHeight) - MARGIN);
    const last = Math.min(this.rows.length, Math.ceil((top + seen) / this.rowHeight) + MARGIN);
    // The row with the focus stays, or the keyboard would lose its place.
    const kept = this.body.contains(document.activeElement) ? this.current : -1;
    const wanted = [];
    for (let at = first; at < last; at += 1) wanted.push(at);
    if (kept >= last && kept < this.rows.length) wanted.push(kept);
    else if (kept >= 0 && kept < first) wanted.unshift(kept);
    for (const [at, row] of this.shown) {
      if ((at < first || at >= last) && (at !== kept || at >= this.rows.length)) { row.remove(); this.shown.delete(at); }
    }
    // From the last to the first, each before the one behind it: in order, for those who hear the page.
    let behind = null;
    for (const at of wanted.reverse()) behind = this.#place(at, behind);
  }

  #place(at, behind) {
    const row = this.rows[at];
    let element = this.shown.get(at);
    if (!element) {
      element = el("div", { role: "row", class: "vt-row", "aria-rowindex": at + 2, data: { at } });
      element.style.transform = `translateY(${at * this.rowHeight}px)`;
      element.style.height = `${this.rowHeight}px`;
      element.addEventListener("focusin", () => this.#moveTo(at, false));
      this.shown.set(at, element);
      this.body.insertBefore(element, behind);
    }
    element.tabIndex = at === this.current ? 0 : -1;
    const signature = JSON.stringify(row);
    if (element.signature === signature) return element;
    element.signature = signature;
    const focused = element.contains(document.activeElement) && document.activeElement !== element
      ? document.activeElement.dataset.focus : null;
    element.dataset.key = this.key(row);
    element.replaceChildren(...this.columns.map((column, index) => {
      const cell = el("div", { role: "gridcell", class: `vt-cell${column.numeric ? " num" : ""}${column.wide ? " wide" : ""}`, data: { column: column.key } });
      const shown = column.show(row);
      const target = index === this.link ? this.open?.(row) : null;
      cell.append(target ? el("a", { href: target, tabindex: "-1" }, shown) : shown);
      return cell;
    }));
    if (focused) element.querySelector(`[data-focus="${focused}"]`)?.focus({ preventScroll: true });
    return element;
  }

  #moveTo(at, focus = true) {
    const before = this.shown.get(this.current);
    if (before) before.tabIndex = -1;
    this.current = at;
    if (focus) {
      const top = at * this.rowHeight;
      const seen = this.scroller.clientHeight - this.head.offsetHeight;
      if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
      else if (top + this.rowHeight > this.scroller.scrollTop + seen) this.scroller.scrollTop = top + this.rowHeight - seen;
      this.#draw();
      this.shown.get(at)?.focus({ preventScroll: true });
      this.#draw();
    } else if (this.shown.get(at)) this.shown.get(at).tabIndex = 0;
  }

  #follow(at) {
    const target = this.rows[at] && this.open?.(this.rows[at]);
    if (target) location.hash = target;
  }

  #pressed(event) {
    if (event.target.matches("input, button")) { if (event.key === "Enter" || event.key === " ") return; }
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps && this.rows.length) {
      event.preventDefault();
      this.#moveTo(Math.min(this.rows.length - 1, Math.max(0, this.current + steps[event.key])));
    } else if (event.key === "Enter" && event.target.matches(".vt-row")) {
      event.preventDefault();
      this.#follow(this.current);
    } else if (event.key === " " && event.target.matches(".vt-row")) {
      const box = event.target.querySelector("input[type=checkbox]");
      if (box) { event.preventDefault(); box.click(); }
    }
  }
}
