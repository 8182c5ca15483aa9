// Which page is shown, and how it stays current.

import { Problem } from "./api.js";
import { address, el } from "./dom.js";
import { showCompare } from "./page_compare.js";
import { showEpisode } from "./page_episode.js";
import { showEpisodes } from "./page_episodes.js";
import { showOverview } from "./page_overview.js";
import { showRun } from "./page_run.js";

const PAGES = { "": showOverview, run: showRun, compare: showCompare, episodes: showEpisodes, episode: showEpisode };
const EVERY = 2000;
const SOON = 50;

/** What a page is given: a signal that it has been left, and ways to be told and to tell. */
class Visit {
  constructor() {
    this.controller = new AbortController();
    this.signal = this.controller.signal;
    this.closing = [];
  }

  /** Do something now, and again and again while the page is seen. Problems are shown and it goes on. What returns
   *  true has not been told everything yet, and is asked again soon. */
  async follow(work) {
    let soon = false;
    const again = async () => {
      if (this.signal.aborted) return;
      if (!document.hidden) {
        try {
          soon = (await work()) === true;
          tell("");
        } catch (error) {
          if (this.signal.aborted) return;
          soon = false;
          this.problem(error);
        }
      }
      if (!this.signal.aborted) setTimeout(again, soon ? SOON : EVERY);
    };
    soon = (await work()) === true;
    tell("");
    if (!this.signal.aborted) setTimeout(again, soon ? SOON : EVERY);
  }

  /** Say what went wrong, beside what is shown. */
  problem(error) {
    if (!(error instanceof Problem)) throw error;
    tell(error.told.what);
  }

  /** Do something when the page is left. */
  onleave(work) { this.closing.push(work); }

  close() {
    this.controller.abort();
    for (const work of this.closing) work();
  }
}

let visit = null;
let shown = null;

function tell(text) {
  const live = document.getElementById("live");
  const now = text || "live";
  if (live.textContent !== now) live.textContent = now;
  live.classList.toggle("bad", Boolean(text));
}

function crumbs(name, values) {
  const run = values.get("run");
  const parts = [el("a", { href: address("") }, "Runs")];
  if (name === "compare") parts.push(el("span", {}, "Compare"));
  if (run && name !== "compare") parts.push(el("a", { href: address("run", { run }) }, run));
  if (name === "episodes" || name === "episode") {
    const step = values.get("step");
    parts.push(el("a", { href: address("episodes", { run, step }) }, `step ${step}`));
  }
  if (name === "episode") parts.push(el("span", {}, "episode"));
  document.getElementById("crumbs").replaceChildren(...parts);
  document.title = `${[run, name === "compare" ? "compare" : ""].filter(Boolean).join(" ") || "runs"} · strop`;
}

async function show() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  if (location.hash === "#page") return;
  const values = new URLSearchParams(query);
  visit?.close();
  visit = new Visit();
  const mine = visit;
  const root = document.getElementById("page");
  const page = PAGES[path];
  crumbs(path, values);
  delete root.dataset.shown;
  root.replaceChildren(el("p", { class: "muted" }, "reading …"));
  // Reached by a link within the page: whoever hears it should be at its beginning.
  if (shown !== null) root.focus({ preventScroll: true });
  shown = path;
  scrollTo(0, 0);
  try {
    if (!page) throw new Problem({ what: "there is no such page", where: location.hash, mend: "go to the list of runs" }, 404);
    await page(root, values, mine);
  } catch (error) {
    if (mine.signal.aborted) return;
    if (!(error instanceof Problem)) throw error;
    root.replaceChildren(el("div", { class: "problem", role: "alert" }, el("h1", {}, error.told.what),
      error.told.where ? el("p", {}, error.told.where) : null, error.told.mend ? el("p", {}, error.told.mend) : null,
      el("p", {}, el("a", { href: address("") }, "all runs"))));
  }
  if (!mine.signal.aborted) root.dataset.shown = location.hash;
}

function theme() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("strop-theme"); } catch { return null; } };
  const apply = () => {
    const now = kept() ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now;
    button.textContent = now === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  button.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("strop-theme", next); } catch { document.documentElement.dataset.theme = next; }
    apply();
  });
  dark.addEventListener("change", apply);
  apply();
}

theme();
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("page").focus();
});
addEventListener("hashchange", show);
show();
