"""The viewer's pages for all who look: contrast, keyboard, names, narrow screens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import SHOWN, go

Look = Callable[..., Any]
HERE = Path(__file__).parent
CONTRAST = (HERE / "contrast.js").read_text()
REACHED = (HERE / "reachable.js").read_text()
PAGES = {
    "overview": "#/",
    "curves": "#/run?run=one",
    "steps": "#/run?run=one&tab=steps",
    "timeline": "#/run?run=one&tab=timeline",
    "alarms": "#/run?run=one&tab=alarms",
    "system": "#/run?run=one&tab=system",
    "recipe": "#/run?run=one&tab=config",
    "compare": "#/compare?run=one&run=two",
    "episodes": "#/episodes?run=one&step=2",
    "episode": "#/episode?run=one&step=2&row=1",
    "problem": "#/run?run=none",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(folder: Path, look: Look, scheme: str) -> None:
    """The contrast of WCAG AA, of all colours that text and what lies under it come to."""
    page = look(folder, scheme=scheme)
    page.expected = ("404 (Not Found)",)
    for name, where in PAGES.items():
        go(page, where)
        seen, low = page.evaluate(CONTRAST)
        assert seen > 5, name
        assert low == [], name
    go(page, PAGES["episode"])
    for name in page.locator("#quantity option").evaluate_all("all => all.map(one => one.value)"):
        page.locator("#quantity").select_option(name)
        page.locator(".tok.own").first.hover()
        assert page.evaluate(CONTRAST)[1] == [], name
    # Every colour that a token can have, which this episode may not.
    page.evaluate("""() => {
      const place = document.querySelector('.tokens');
      for (const [kind, count] of [['s', 7], ['d', 9], ['c', 7]]) {
        for (let at = 0; at < count; at += 1) for (const whose of ['own', 'context']) {
          const one = document.createElement('span');
          one.className = `tok ${whose} ${kind}${at}`;
          one.textContent = 'x';
          place.append(one);
        }
      }
    }""")
    assert page.evaluate(CONTRAST)[1] == []


def test_the_contrast_test_finds_what_is_too_pale(folder: Path, look: Look) -> None:
    page = go(look(folder), "#/")
    page.evaluate("document.querySelector('h1').style.color = '#999'")
    assert [text.split(" ")[-1] for text in page.evaluate(CONTRAST)[1]] == ["Runs"]


def test_the_theme_is_kept(folder: Path, look: Look) -> None:
    page = go(look(folder, scheme="dark"), "#/")
    theme = lambda: page.evaluate("document.documentElement.dataset.theme")  # noqa: E731
    assert theme() == "dark"
    page.locator("#theme").click()
    assert theme() == "light"
    page.reload()
    page.wait_for_function(SHOWN)
    assert theme() == "light"


def test_a_narrow_screen_shows_everything_without_scrolling_sideways(folder: Path, look: Look) -> None:
    page = look(folder, width=400)
    page.expected = ("404 (Not Found)",)
    for name, where in PAGES.items():
        go(page, where)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, name
    go(page, PAGES["overview"])
    for column in ("run", "status", "step", "value"):
        box = page.locator(f".vt-row [data-column={column}]").first.bounding_box()
        assert box["x"] + box["width"] <= 400, column
    go(page, PAGES["episode"])
    page.locator(".tok.own").first.click()
    numbers = page.locator("#token-numbers").bounding_box()
    assert numbers["y"] + numbers["height"] <= 901
    assert numbers["height"] <= 0.4 * 900


def test_everything_is_reached_by_keyboard(folder: Path, look: Look) -> None:
    page = look(folder)
    page.expected = ("404 (Not Found)",)
    for name, where in PAGES.items():
        go(page, where)
        page.evaluate("() => { document.activeElement.blur(); window.scrollTo(0, 0); }")
        count = page.evaluate(REACHED)
        reached, unseen = set(), []
        for _ in range(3 * count + 20):
            page.keyboard.press("Tab")
            at, outline = page.evaluate("""() => {
              const one = document.activeElement;
              return [one.reachable ?? null, getComputedStyle(one).outlineStyle];
            }""")
            if at is not None:
                reached.add(at)
                if outline == "none":
                    unseen.append(at)
            if len(reached) == count:
                break
        assert reached == set(range(count)), f"{name}: {set(range(count)) - reached} not reached"
        assert unseen == [], f"{name}: the focus is not seen"


def test_every_control_has_a_name(folder: Path, look: Look) -> None:
    page = look(folder)
    for name, where in PAGES.items():
        page.expected = ("404 (Not Found)",)
        go(page, where)
        nameless = page.evaluate("""() => {
          const all = [...document.querySelectorAll('a, button, input, select, [role=grid], [role=region]')];
          const named = (one) => one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length;
          return all.filter((one) => !named(one)).map((one) => one.outerHTML);
        }""")
        assert nameless == [], name
