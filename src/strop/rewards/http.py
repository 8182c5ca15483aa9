"""`http`: a reward service scores completions; `docs/rewards.md` has the contract."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Sequence
from typing import Any

from strop.config.rewards import HttpVerifier
from strop.rewards.client import Client, Server, Unanswered, server_of
from strop.rewards.failures import shorten
from strop.rewards.protocol import Completed, Verdict

STATUSES = ("ok", "verifier_error", "timeout")


class HttpService:
    """Posts completions in batches and takes one result for each.

    A batch that cannot be had, after all tries, is an error or time-out of its completions. A result that is wrong in
    itself is an error of its completion alone.

    Args:
        settings: where, what, how many. timeout: seconds of one request. where: key path of the settings.

    Raises:
        UserError: the address or the environment variable of the key is not usable.
    """

    def __init__(self, settings: HttpVerifier, *, timeout: float, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.settings = settings
        server: Server = server_of(
            settings.url, settings.api_key_env, timeout=timeout, retries=settings.retries, where=where, key="url"
        )
        self._client = Client(server, concurrency=settings.concurrency)

    async def ask(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion, in order."""
        size = self.settings.batch_size
        batches = [completed[start : start + size] for start in range(0, len(completed), size)]
        answers = await asyncio.gather(*(self._batch(batch) for batch in batches))
        return [verdict for answer in answers for verdict in answer]

    async def close(self) -> None:
        """Nothing to give back: each request has a connection of its own."""

    async def _batch(self, batch: Sequence[Completed]) -> list[Verdict]:
        body = {"items": [self._item(one) for one in batch]}
        try:
            return await self._client.post(body, lambda reply: _verdicts(reply, len(batch)))
        except Unanswered as error:
            status: Any = "timeout" if error.timed_out else "verifier_error"
            return [Verdict(None, status, str(error))] * len(batch)

    def _item(self, one: Completed) -> dict[str, Any]:
        return {
            "prompt": one.prompt,
            "completion": one.completion,
            "answer": as_json(one.answer),
            "finish": one.finish,
            "row": {name: as_json(one.row.get(name)) for name in self.settings.columns},
        }


def as_json(value: Any) -> Any:
    """A value of a data row as JSON has it: NaN and infinity become null, and what has no form in JSON a text."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _verdicts(reply: Any, expected: int) -> list[Verdict]:
    if not isinstance(reply, list) or len(reply) != expected:
        found = f"a list of {len(reply)}" if isinstance(reply, list) else f"a {type(reply).__name__}"
        raise Unanswered(f"it answered with {found}, where a list of {expected} results is due")
    return [_verdict(result) for result in reply]


def _verdict(result: Any) -> Verdict:
    """The verdict that one result stands for."""
    shown = shorten(repr(result), 120)
    if not isinstance(result, dict) or ("score" not in result and result.get("status", "ok") == "ok"):
        return Verdict(None, "verifier_error", f"a result must be an object with a score, not {shown}")
    status, score, detail = result.get("status", "ok"), result.get("score"), str(result.get("detail") or "")
    components = result.get("components") or {}
    if status not in STATUSES:
        return Verdict(None, "verifier_error", f"the status of {shown} is none of {', '.join(STATUSES)}")
    if status != "ok":
        return Verdict(None, status, shorten(detail) or f"the service says {status}")
    if not isinstance(components, dict) or not all(_is_number(value) for value in components.values()):
        return Verdict(None, "verifier_error", f"the components of {shown} are not numbers by name")
    if score is not None and not _is_number(score):
        return Verdict(None, "verifier_error", f"the score of {shown} is not a number")
    return Verdict(
        None if score is None else float(score),
        detail=shorten(detail),
        components={str(name): float(value) for name, value in components.items()},
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
