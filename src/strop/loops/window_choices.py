"""What is checked and said of `rollout.window` before a run begins."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config import Config
from strop.config.window import PastSettings
from strop.errors import UserError
from strop.rollout.own_choice import own_select
from strop.rollout.window_order import make_order


def check_window(config: Config) -> None:
    """Raise UserError unless the functions that `rollout.window` names can be called."""
    rollout = config.rollout
    make_order(rollout.window.order, groups_per_step=rollout.groups_per_step, max_staleness=rollout.max_staleness)
    if rollout.window.past is not None:
        own_select(rollout.window.past)


def told_of_window(config: Config) -> str:
    """What a run says of its window at the start; empty where it has nothing to warn of."""
    if config.rollout.window.order != "ready":
        return ""
    return (
        "rollout.window.order: ready trains short completions first: each step's are shorter than what is sampled "
        "(`window/length_bias` below 1), and the long ones are the stalest. Nothing is dropped"
    )


def idle_in_window(config: Config) -> Iterator[UserError]:
    """Settings of the window that would have no effect beside the others."""
    window = config.rollout.window
    if config.supervised is not None:
        return
    if window.order != "admission":
        if config.offline is not None:
            yield _idle("order", "with `offline`: nothing is sampled")
        elif config.rollout.max_staleness < 2:
            why = f"with rollout.max_staleness: {config.rollout.max_staleness}, which lets no group wait for another"
            yield _idle("order", why, ", or set rollout.max_staleness to 2 or more")
    elif window.slack != "auto":
        yield _idle("slack", "with order: admission, in which no group is passed over")
    if window.past is None:
        return
    if config.offline is not None:
        yield _idle("past", "with `offline`, whose groups come again in every epoch")
        return
    past, fields = window.past, PastSettings.model_fields
    for name, select in {"priority": "priority", "exponent": "priority", "strata": "stratified"}.items():
        if past.select != select and getattr(past, name) != fields[name].default:
            yield _idle(f"past.{name}", f"with select: {past.select}", f", or set rollout.window.past.select: {select}")


def _idle(key: str, why: str, otherwise: str = "") -> UserError:
    where = f"rollout.window.{key}"
    return UserError(f"`{where}` has no effect {why}", where=where, mend=f"remove the line{otherwise}")
