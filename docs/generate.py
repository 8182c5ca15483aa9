"""Writes what is generated of the pages: `python docs/generate.py`.

That is `configuration.md`, from the schema, and in `performance.md` the section of `measured.py`, from results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import measured

from strop.config.explain import Place, describe, items_of, kinds_of, leaves, models_of, places

PAGE = Path(__file__).parent / "configuration.md"
MEASURED = Path(__file__).parent / "performance.md"
HEAD = """# All keys of a recipe

Written by `python docs/generate.py` from the schema; edit the docstrings in `src/strop/config/`, not this page.
`strop config explain KEY` prints the same in the terminal, and `strop config schema` prints a JSON schema for editors.
[recipes.md](recipes.md) explains the sections in words.
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n{part}\n" for part in _sections())


def _sections() -> Iterator[str]:
    by_section: dict[str, list[str]] = {}
    for leaf in leaves():
        section = leaf.path.rpartition(".")[0]
        default = "*required*" if leaf.required else f"`{json.dumps(leaf.default, ensure_ascii=False)}`"
        cells = (f"`{leaf.path}`", describe(leaf.annotation), default, leaf.description)
        by_section.setdefault(section, []).append("| " + " | ".join(map(_cell, cells)) + " |")
    for path, text in _headings():
        level = "##" if "." not in path else "###"
        yield f"{level} `{path}`"
        yield text
        if path in by_section:
            yield "| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(by_section.pop(path))
    assert not by_section, f"keys without a section: {by_section}"


def _headings() -> Iterator[tuple[str, str]]:
    """Path and text of each section, in the order of the schema."""
    for place in places():
        if models_of(place.annotation):
            yield place.path, place.description + _absent(place)
            members = kinds_of(place.annotation)
            for model, kind in members if len(members) > 1 else []:
                yield f"{place.path}[{kind}]", " ".join((model.__doc__ or "").split())
        for item in items_of(place.annotation):
            kinds = kinds_of(item)
            if kinds:
                yield place.path, place.description
            for model, kind in kinds:
                yield f"{place.path}[{kind}]", " ".join((model.__doc__ or "").split())


def _absent(place: Place) -> str:
    """A note for sections that a recipe has only where it names them."""
    optional = not place.required and place.default is None and "." in place.path
    return " Only where the recipe has this section." if optional else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written: {len(leaves())} keys")
    MEASURED.write_text(measured.with_section(MEASURED.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{MEASURED} written: its section on GPUs")
