"""Draw what `staleness.py` measured: `docs/staleness.svg`, without any library that draws.

On the left how runs learn whose every token is S versions old, corrected and not; on the right what they end with, and
what runs as they are end with, the lines of each dot reaching over its seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

TARGET = measure.ROOT / "docs" / "staleness.svg"
COLOURS = {0: "#1b1b1b", 1: "#0072b2", 2: "#009e73", 4: "#d55e00"}
GREY, FAINT = "#555555", "#dddddd"
WIDTH, HEIGHT = 910, 380
FONT = "font-family='sans-serif' font-size='12'"


@dataclass(frozen=True)
class Panel:
    """A square of the page with axes. left, top, width, height: in pixels; low, high: of each axis."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a point."""
        right = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.left + right * self.width, 1), round(self.top + (1 - up) * self.height, 1)

    def axes(self, xs: dict[float, str], ys: Sequence[float], title: str, below: str) -> list[str]:
        """Frame, grid and words."""
        found = [text(self.left, self.top - 14, title, "start", bold=True)]
        for y in ys:
            found.append(line([self.at(self.x[0], y), self.at(self.x[1], y)], FAINT, 1))
            left, middle = self.at(self.x[0], y)
            found.append(text(left - 6, middle + 4, f"{y:g} %", "end"))
        for x, name in xs.items():
            middle, bottom = self.at(x, self.y[0])
            found.append(text(middle, bottom + 18, name, "middle"))
        middle, bottom = self.at(sum(self.x) / 2, self.y[0])
        return [*found, text(middle, bottom + 38, below, "middle")]


def text(x: float, y: float, words: str, anchor: str, *, bold: bool = False, colour: str = "#222222") -> str:
    weight = " font-weight='bold'" if bold else ""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' fill='{colour}' {FONT}{weight}>{escaped}</text>"


def line(points: Sequence[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
    return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='{width:g}'{dashed}/>"


def dot(x: float, y: float, colour: str, *, filled: bool) -> str:
    fill = colour if filled else "#ffffff"
    return f"<circle cx='{x:g}' cy='{y:g}' r='4' fill='{fill}' stroke='{colour}' stroke-width='1.5'/>"


def drawn(numbers: dict[str, Any]) -> str:
    """The page."""
    ways, runs = numbers["ways"], numbers["runs"]
    steps = next(iter(next(iter(runs.values())).values()))["step"]
    bounds = sorted({0, *(bound for bound in COLOURS if f"S={bound}, oldest" in ways)})
    values = [v for way in ways.values() for v in way["curve"][1:]] + [v for w in ways.values() for v in w["of_seeds"]]
    low = 10 * (int(min(values)) // 10)
    grid = list(range(low, 101, 10))
    parts = curves(ways, steps, bounds, (low, 100), grid) + ends(ways, bounds, (low, 100), grid)
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>\n"
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#ffffff'/>\n{body}\n</svg>\n"
    )


def curves(
    ways: dict[str, Any], steps: list[int], bounds: list[int], span: tuple[int, int], grid: list[int]
) -> list[str]:
    """The left panel. What lies below it at the first step is cut off."""
    panel = Panel(60, 40, 330, 250, (0, steps[-1]), span)
    found = panel.axes({s: str(s) for s in steps}, grid, "Every token S versions old", "step")
    for bound in bounds:
        name = "S=0" if bound == 0 else f"S={bound}, oldest"
        for way, dashes in ((name, ""), (f"{name}, uncorrected", "5 4")):
            if way in ways:
                pairs = [pair for pair in zip(steps, ways[way]["curve"], strict=True) if pair[1] >= span[0]]
                found.append(line([panel.at(*pair) for pair in pairs], COLOURS[bound], 2, dashes))
    x = 60.0
    for bound in bounds:
        found += [line([(x, 355), (x + 22, 355)], COLOURS[bound], 2), text(x + 27, 359, f"S = {bound}", "start")]
        x += 68
    found += [line([(x, 355), (x + 22, 355)], GREY, 2, "5 4"), text(x + 27, 359, "uncorrected", "start")]
    return found


def ends(ways: dict[str, Any], bounds: list[int], span: tuple[int, int], grid: list[int]) -> list[str]:
    """The right panel."""
    panel = Panel(480, 40, 400, 250, (-0.6, len(bounds) - 0.4), span)
    marks = {float(at): str(bound) for at, bound in enumerate(bounds)}
    found = panel.axes(marks, grid, "Held-out accuracy at the end", "S = rollout.max_staleness")
    kinds = (
        (", usual", "a run as it is", -0.2, "#0072b2", True),
        (", oldest", "every token S versions old", 0.0, "#d55e00", True),
        (", oldest, uncorrected", "the same, uncorrected", 0.2, "#d55e00", False),
    )
    for suffix, _, shift, colour, filled in kinds:
        for at, bound in enumerate(bounds):
            name = "S=0" if bound == 0 else f"S={bound}{suffix}"
            if name not in ways or (bound == 0 and shift):
                continue
            shown = COLOURS[0] if bound == 0 else colour
            seeds = ways[name]["of_seeds"]
            found.append(line([panel.at(at + shift, min(seeds)), panel.at(at + shift, max(seeds))], shown, 1.5))
            found.append(dot(*panel.at(at + shift, ways[name]["accuracy"]), shown, filled=filled))
    x = 480.0
    for _, words, _, colour, filled in kinds:
        found += [dot(x, 355, colour, filled=filled), text(x + 9, 359, words, "start")]
        x += 27 + 5.7 * len(words)
    return found


def main(argv: Sequence[str] | None = None) -> Path:
    """Draw a file of results; returns where the drawing is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=measure.RESULTS / "staleness.json")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args(argv)
    options.out.write_text(drawn(json.loads(options.results.read_text())["numbers"]))
    print(f"drawn to {options.out}")
    return Path(options.out)


if __name__ == "__main__":
    main()
