"""`slime`: a reward function as slime has them, for one sample or for those of a group."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from strop.config.adapted_rewards import SlimeVerifier
from strop.errors import RunFailure, UserError
from strop.rewards.failures import describe_exception, shorten
from strop.rewards.protocol import Completed, Verdict
from strop.rewards.python import load_function
from strop.rewards.slime_sample import Sample, SampleStatus, metadata_of, stand_in


class SlimeFunction:
    """Calls `function(args, sample)`, plain or `async`, and takes its number, or a dict with `reward_key`.

    With `call_with: group` it is `function(args, samples)`, which returns a list. `args` has the `arguments` of the
    settings, and `reward_key`. None says that the function does not apply to the completion. An exception is a verifier
    error of its sample, or of all samples of the call.

    Raises:
        UserError: the function cannot be imported or cannot be called like this.

    Source: `--custom-rm-path` of slime, with `--group-rm` for groups.
    """

    def __init__(self, settings: SlimeVerifier, *, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.path = settings.function
        self._together = settings.call_with == "group"
        self._reward_key = settings.reward_key
        self._args = Namespace(**{"reward_key": settings.reward_key, **settings.arguments})
        stand_in()
        self._function = load_function(settings.function, where=f"{where}.function")
        try:
            inspect.signature(self._function).bind(None, None)
        except TypeError as error:
            raise UserError(
                f"{self.path!r} cannot be called with `args` and a sample: {error}",
                where=f"{where}.function",
                mend="write it as `async def custom_rm(args, sample)`",
            ) from error
        except ValueError:  # Some builtins have no signature.
            return

    def verify(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion, in order.

        Raises:
            RunFailure: the function returns something other than numbers.
        """
        samples = [sample_of(item, index) for index, item in enumerate(completed)]
        if not samples:
            return []
        return asyncio.run(self._group(samples) if self._together else self._each(samples))

    async def _each(self, samples: list[Sample]) -> list[Verdict]:
        return list(await asyncio.gather(*(self._one(sample) for sample in samples)))

    async def _one(self, sample: Sample) -> Verdict:
        try:
            found = await self._returned(sample)
        except (Exception, SystemExit) as error:
            return Verdict(None, "verifier_error", f"{self.path}: {describe_exception(error)}")
        return self._verdict(found)

    async def _group(self, samples: list[Sample]) -> list[Verdict]:
        try:
            found = await self._returned(samples)
        except (Exception, SystemExit) as error:
            return [Verdict(None, "verifier_error", f"{self.path}: {describe_exception(error)}")] * len(samples)
        if hasattr(found, "tolist"):
            found = found.tolist()
        if not isinstance(found, list | tuple) or len(found) != len(samples):
            raise self._wrong(f"returned {shorten(repr(found), 80)} for {len(samples)} samples", "a list with one each")
        return [self._verdict(one) for one in found]

    async def _returned(self, given: Any) -> Any:
        found = self._function(self._args, given)
        return await found if inspect.isawaitable(found) else found

    def _verdict(self, found: Any) -> Verdict:
        parts: dict[str, float] = {}
        if isinstance(found, dict):
            if self._reward_key not in found:
                keys = ", ".join(map(str, found))
                raise self._wrong(f"returned a dict with {keys}", "a number; set `reward_key` to the key of the score")
            parts = {
                str(key): float(value)
                for key, value in found.items()
                if key != self._reward_key and isinstance(value, numbers.Real) and math.isfinite(value)
            }
            found = found[self._reward_key]
        if found is None:
            return Verdict(None, components=parts)
        if getattr(found, "ndim", None) == 0 and hasattr(found, "item"):
            found = found.item()
        if not isinstance(found, numbers.Real):
            raise self._wrong(f"returned {shorten(repr(found), 80)}", "a number")
        score = float(found)
        if not math.isfinite(score):
            return Verdict(None, "verifier_error", f"{self.path} returned {score}")
        return Verdict(score, components=parts)

    def _wrong(self, what: str, expected: str) -> RunFailure:
        return RunFailure(
            f"the reward function {self.path!r} {what}; expected {expected}",
            where=f"reward function {self.path}",
            mend="return one number for each sample",
        )


def sample_of(item: Completed, index: int = 0) -> Sample:
    """A finished completion as slime has it."""
    prompt = item.prompt if isinstance(item.prompt, str) else [dict(message) for message in item.prompt]
    return Sample(
        group_index=0,
        index=index,
        prompt=prompt,
        tokens=list(item.completion_ids),
        response=item.completion,
        response_length=len(item.completion_ids),
        label=item.answer,
        status=SampleStatus.TRUNCATED if item.finish == "length" else SampleStatus.COMPLETED,
        metadata=metadata_of(item.row),
    )
