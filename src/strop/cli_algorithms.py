"""`strop algorithms …`: what there is, and what each one chooses."""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

import typer

from strop.errors import UserError

algorithms = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Algorithms and what they choose.")


@algorithms.command("list")
def algorithms_list() -> None:
    """Every named algorithm, with its paper."""
    from strop.algorithms.named import ALGORITHMS

    width = max(map(len, ALGORITHMS))
    for name, kind in ALGORITHMS.items():
        note = "  (with a critic)" if kind.needs_critic else ""
        typer.echo(f"{name:<{width}}  {first_line(kind)}{note}")
    typer.echo("\nstrop algorithms show NAME prints what it computes and every choice it makes.")


@algorithms.command("show")
def algorithms_show(
    name: Annotated[str, typer.Argument(help="A name that `strop algorithms list` shows, or your own module:Class.")],
    dialect: Annotated[
        str | None, typer.Option(help="Fill in what the paper leaves open as verl, trl, … does.")
    ] = None,
) -> None:
    """What an algorithm computes, where that is written, and every choice it makes.

    \b
    Examples:
      strop algorithms show dapo
      strop algorithms show grpo --dialect trl
    """
    typer.echo(page(name, dialect))


def page(name: str, dialect: str | None) -> str:
    """What `strop algorithms show` prints.

    Raises:
        UserError: there is no such algorithm or dialect.
    """
    import difflib

    from strop.algorithms.dialects import DIALECTS
    from strop.algorithms.named import ALGORITHMS, build_algorithm

    kind: Any = ALGORITHMS.get(name)
    if kind is None and ":" in name:
        from strop.rewards.python import load_function

        kind = load_function(name, where="NAME")
    if kind is None:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        mend = f"did you mean {near[0]}?" if near else "`strop algorithms list` shows them all"
        raise UserError(f"there is no algorithm {name!r}", mend=mend)
    if dialect is not None and dialect not in DIALECTS:
        near = difflib.get_close_matches(dialect, DIALECTS, n=1)
        mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(DIALECTS)}"
        raise UserError(f"there is no dialect {dialect!r}", mend=mend)
    lines = [name, *(f"  {line}".rstrip() for line in inspect.cleandoc(kind.__doc__ or "").splitlines())]
    try:
        plain = build_algorithm(kind, group_size=2, max_new_tokens=256)
        algorithm = build_algorithm(kind, group_size=2, max_new_tokens=256, dialect=dialect)
    except (TypeError, ValueError, AttributeError):
        return "\n".join([*lines, "", "its choices are those of its own class"])
    lines += ["", "choices", *_table(algorithm, plain, dialect)]
    if needs := [text for attribute, text in NEEDS.items() if getattr(algorithm, attribute)]:
        lines += ["", "needs", *(f"  {text}" for text in needs)]
    lines += ["", f"code: {kind.__module__.replace('.', '/')}.py, class {kind.__name__}"]
    return "\n".join(lines)


NEEDS = {
    "needs_group": "two or more completions of each prompt (rollout.group_size)",
    "needs_reference": "the reference's log-probabilities",
    "needs_greedy": "the most likely completion of each prompt; one more for each group, not trained",
    "needs_teacher": "a teacher (algorithm.teacher), or several (algorithm.teachers)",
    "needs_critic": "a critic",
}


def _table(algorithm: Any, plain: Any, dialect: str | None) -> list[str]:
    """Each choice in force, one line: key, value, and whose choice it is."""
    from strop.algorithms.policy_gradient import PolicyGradient, resolved

    base, own = _defaults(PolicyGradient), _defaults(type(algorithm))
    before = resolved(plain)
    found = {key: value for key, value in resolved(algorithm).items() if key not in ("name", "max_new_tokens")}
    rows = []
    for key, value in found.items():
        if key in before and before[key] != value:
            whose = f"{dialect} (else {_shown(before[key])})"
        elif key not in base or own.get(key) != base[key]:
            whose = "the algorithm's own"
        else:
            whose = "default"
        rows.append((f"algorithm.{key}", _shown(value), whose))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {whose}" for key, value, whose in rows]


def _defaults(kind: Any) -> dict[str, Any]:
    from dataclasses import fields

    from strop.algorithms.policy_gradient import shown

    return {shown(f.name): f.default for f in fields(kind) if f.init}


def listed(algorithm: Any) -> str:
    """The choices in force on one line; those of a class of one's own are its own matter."""
    from strop.algorithms.policy_gradient import PolicyGradient, resolved

    if not isinstance(algorithm, PolicyGradient):
        return str(algorithm.name)
    return ", ".join(f"{key}: {_shown(value)}" for key, value in resolved(algorithm).items())


def first_line(kind: Any) -> str:
    """The first sentence of a class's docstring: its title and its paper."""
    return re.split(r"\n\s*\n", inspect.cleandoc(kind.__doc__ or ""))[0].replace("\n", " ")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
