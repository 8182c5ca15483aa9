"""How numbers, times and model output look in a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*#@"
SHARES = frozenset(("accuracy", "correct", "token_accuracy", "agreement", "coverage"))


def show_number(value: float | None) -> str:
    """Three or four digits: 0.0123, 1.23, 45.6, 789, 12.3k, 4.5M, 1.2e-05; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size >= 9999.5:
        for bound, divisor, unit in ((999.95e3, 1e3, "k"), (999.95e6, 1e6, "M"), (999.95e9, 1e9, "G")):
            if size < bound:
                return f"{value / divisor:.1f}{unit}"
        return f"{value:.1e}"
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    if size >= 0.01:
        return f"{value:.3f}"
    if size >= 0.00095:
        return f"{value:.4f}"
    return "0" if size == 0 else f"{value:.1e}"


def show_metric(name: str, value: float | None) -> str:
    """A number in the unit of its metric: shares in percent, memory in GiB, times in seconds."""
    if value is None or not math.isfinite(value):
        return show_number(value)
    last = name.rsplit("/", 1)[-1]
    if last in SHARES or last.endswith(("share", "fraction")):
        return f"{100 * value:.1f} %"
    if last.endswith("_gib"):
        return f"{value:.2f} GiB"
    if name.startswith("time/"):
        return f"{show_number(value)} s"
    return show_number(value)


def show_duration(seconds: float | None) -> str:
    """8 s -> "0:08", an hour and more -> "1:02:03", days -> "2d 03:04"; "–" for None."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours >= 48:
        days, hours = divmod(hours, 24)
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """A curve in one line of at most `width` characters, from the lowest value to the highest.

    More values than characters are averaged in equal parts, so that the whole history is seen. NaN leaves a gap; a
    constant is drawn at mid-height.
    """
    count = len(values)
    if count == 0 or width <= 0:
        return ""
    if count > width:
        edges = [index * count // width for index in range(width + 1)]
        points = [_mean(values[start:end]) for start, end in itertools.pairwise(edges)]
    else:
        points = [_mean([value]) for value in values]
    known = [point for point in points if point is not None]
    if not known:
        return " " * len(points)
    # Scaled, since the distance of very large numbers may be more than the largest.
    scale = max(map(abs, known)) or 1.0
    points = [None if point is None else point / scale for point in points]
    low, high = min(known) / scale, max(known) / scale
    # Averages of equal values differ in their last bits; that is not a curve.
    constant = high - low <= 1e-9
    bars = ASCII_BARS if ascii_only else BARS

    def bar(point: float | None) -> str:
        if point is None:
            return " "
        if constant:
            return bars[len(bars) // 2 - 1]
        return bars[min(len(bars) - 1, int((point - low) / (high - low) * len(bars)))]

    return "".join(bar(point) for point in points)


def printable(text: str) -> str:
    """Text without control characters, line ends and tabs apart.

    A completion is whatever the model made up: its escape sequences must not reach the terminal.
    """
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def one_line(text: str, width: int) -> str:
    """Text as one line of at most `width` characters: line ends as ⏎, no control characters."""
    # A long text is cut before it is looked at; the factor leaves room for characters that are dropped.
    shown = printable(text[: 8 * width]).replace("\n", "⏎").replace("\t", " ")
    return shown if len(shown) <= width else shown[: max(0, width - 1)] + "…"


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(value / len(known) for value in known) if known else None
