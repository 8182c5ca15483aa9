"""Curves as SVG that stands in a page by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from strop.tracking.text import show_metric

WIDTH, HEIGHT = 420, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 24, 22
MAX_POINTS = 400


def curve(name: str, points: Sequence[tuple[float, float]], *, over: str = "step") -> str:
    """One metric over steps: a line with its least and greatest value, broken where there is no number.

    Args:
        points: (step, value) in order. over: what the first of the two is.
    """
    known = [(step, value) for step, value in points if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    first, last = known[0][0], known[-1][0]
    spread, length = (high - low) or 1.0, (last - first) or 1.0

    def place(step: float, value: float) -> str:
        x = _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - first) / length
        middle = 0.5 if high == low else (value - low) / spread
        return f"{x:.1f},{HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * middle:.1f}"

    lines = [
        f'<polyline points="{" ".join(place(*point) for point in part)}"/>'
        if len(part) > 1
        else '<circle cx="{}" cy="{}" r="2"/>'.format(*place(*part[0]).split(","))
        for part in _parts(_fewer(points))
    ]
    title = escape(name)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>'
        f'<text x="{_LEFT}" y="14" class="name">{title}</text>'
        f'<path d="M{_LEFT},{_TOP}V{HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}" class="axis"/>'
        f'<text x="{_LEFT - 5}" y="{_TOP + 5}" class="end">{escape(show_metric(name, high))}</text>'
        f'<text x="{_LEFT - 5}" y="{HEIGHT - _BOTTOM}" class="end">{escape(show_metric(name, low))}</text>'
        f'<text x="{_LEFT}" y="{HEIGHT - 7}">{first:g}</text>'
        f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 7}" class="end">{escape(over)} {last:g}</text>'
        f"{''.join(lines)}</svg>"
    )


def _parts(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Runs of points that are numbers."""
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            found[-1].append((step, value))
        elif found[-1]:
            found.append([])
    return [part for part in found if part]


def _fewer(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, where there are more points than can be seen."""
    if len(points) <= MAX_POINTS:
        return list(points)
    found = []
    for index in range(MAX_POINTS):
        part = points[index * len(points) // MAX_POINTS : (index + 1) * len(points) // MAX_POINTS]
        known = [value for _, value in part if math.isfinite(value)]
        found.append((part[-1][0], sum(known) / len(known) if known else math.nan))
    return found
