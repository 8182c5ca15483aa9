"""Matches of the policy against itself: several roles, one set of weights, a conversation for each role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from strop.environments.protocol import Done, Message, PolicyTurn

ROLE = "role"
"""The column of a row that says whose turns they are."""


@dataclass(frozen=True)
class Move:
    """Whose turn it is.

    role: one of the match's roles. messages: what this role reads, new messages only; with its first turn they begin
    its conversation and tell it the rules. reward: of the turn that is answered.
    """

    role: str
    messages: list[Message]
    reward: float | None = None


class Match(Protocol):
    """One match. Single-use, as an `Environment` is: made for one, reset once, stepped until Done, closed always."""

    roles: Sequence[str]
    """Names of the roles; the same for every match."""

    async def reset(self, row: Mapping[str, Any]) -> Move:
        """Begin: who speaks first.

        Args:
            row: every column of the data row.
        """
        ...

    async def step(self, role: str, turn: PolicyTurn) -> Move | Done:
        """Take one role's turn. The reward of `Done` is that of the turn."""
        ...

    async def rewards(self) -> Mapping[str, float]:
        """What the match was worth to each role; asked once, at its end, also when a limit ended it."""
        ...

    async def close(self) -> None:
        """Free what it holds; may be called at any time and more than once."""
        ...
