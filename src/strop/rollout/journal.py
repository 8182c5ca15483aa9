"""A journal of what was sampled for groups that no step has trained yet.

It stands between those who play episodes and the engine. What it has noted is part of a checkpoint, so that a run which
goes on from there plays the same episodes again without sampling them again: a request that had ended is answered from
the journal, one that was under way goes on behind its last token. So whatever an environment was told is told again,
and no token is lost. A request with another prompt than noted (an environment that answers otherwise) starts anew, and
is counted.

It also holds requests back while weights change, where completions are to be of one version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from strop.rollout.busy import Busy, Interval
from strop.rollout.engine import Engine, FinishReason, SampleRequest, SampleResult
from strop.rollout.together import Ended, sample_all

Stream = tuple[int, ...]
ENDS: tuple[FinishReason, ...] = ("stop", "length", "aborted")


class Note(NamedTuple):
    """What was sampled for a request. `result.finish` is `aborted` where it had not ended."""

    prompt: tuple[int, ...]
    result: SampleResult

    @property
    def ended(self) -> bool:
        return self.result.finish != "aborted"


class Journal:
    """The engine, as those who play episodes see it.

    Streams of training begin with the number of their group; those of evaluations begin below zero and are not noted.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._notes: dict[Stream, Note] = {}
        self._asked: dict[Stream, SampleRequest] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._outstanding = 0
        self._idle = 0.0
        self._since = time.perf_counter()
        self._busy = Busy()
        self.begun_anew = 0
        """Requests that were begun anew although something of them was noted."""
        self.gone_on = 0
        """Requests that went on behind what was noted of them, or were answered by it."""

    async def generate(self, request: SampleRequest) -> SampleResult:
        """See `Engine.generate`."""
        found: list[SampleResult] = []
        await self.generate_all([request], lambda _, result: found.append(result))
        return found[0]

    async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
        """See `sample_all`."""
        places: list[int] = []
        asked: list[SampleRequest] = []
        for at, request in enumerate(requests):
            note = self._noted(request)
            if note is not None and note.ended:
                ended(at, note.result)
                continue
            places.append(at)
            asked.append(request if note is None else request._replace(begun=note.result))
        if not asked:
            return
        # Whoever is woken may find it closed again.
        while not self._open.is_set():
            await self._open.wait()
        for request in asked:
            if request.stream[0] >= 0:
                self._asked[request.stream] = request

        left = set(range(len(asked)))

        def noted(at: int, result: SampleResult) -> None:
            request = asked[at]
            if request.stream[0] >= 0:
                if result.finish != "aborted":
                    self._notes[request.stream] = Note(request.tokens, result)
                self._answered(request)
            left.discard(at)
            if not left:
                self._leave()
            ended(places[at], result)

        self._enter()
        try:
            await sample_all(self._engine, asked, noted)
        finally:
            if left:
                self._leave()
            for at in left:
                self._answered(asked[at])

    def _noted(self, request: SampleRequest) -> Note | None:
        """What there is of a request, if it has the prompt that was noted."""
        note = self._notes.get(request.stream)
        if note is None:
            return None
        if note.prompt != request.tokens:
            del self._notes[request.stream]
            self.begun_anew += 1
            return None
        self.gone_on += 1
        return note

    def _answered(self, request: SampleRequest) -> None:
        # An episode that is played again may have asked anew before this was cancelled.
        if self._asked.get(request.stream) is request:
            del self._asked[request.stream]

    def forget(self, groups: Iterable[int]) -> None:
        """These groups are trained: nothing of them is asked for again."""
        gone = frozenset(groups)
        self._notes = {stream: note for stream, note in self._notes.items() if stream[0] not in gone}

    # While weights change.

    async def hold(self) -> None:
        """Let no request begin from now on, and wait for those that have begun."""
        self._open.clear()
        await self._quiet.wait()

    def rest(self) -> None:
        """The engine does nothing for requests that have begun, until `go_on`."""
        self._busy.rest()

    def go_on(self) -> None:
        """Let requests begin again."""
        self._busy.go_on()
        self._open.set()

    def metrics(self) -> dict[str, float]:
        """What became of requests that were cut short, since the run began or went on: gone on with, or begun anew, by
        an engine that takes the place of a lost one too. Empty while there were none."""
        anew = self.begun_anew + getattr(self._engine, "begun_anew", 0)
        if not self.gone_on and not anew:
            return {}
        return {"resumed/gone_on": float(self.gone_on), "resumed/begun_anew": float(anew)}

    def take_idle(self) -> float:
        """Seconds since this was last asked in which the engine had nothing to sample."""
        now = time.perf_counter()
        idle = self._idle + (now - self._since if self._outstanding == 0 else 0.0)
        self._idle, self._since = 0.0, now
        return idle

    def take_busy(self) -> list[list[Interval]]:
        """When each engine had something to sample and did so, since this was last asked."""
        own = self._busy.take()
        each = getattr(self._engine, "take_busy", None)
        return [own] if each is None else each()

    def _enter(self) -> None:
        if self._outstanding == 0:
            self._idle += time.perf_counter() - self._since
            self._quiet.clear()
        self._outstanding += 1
        self._busy.enter()

    def _leave(self) -> None:
        self._busy.leave()
        self._outstanding -= 1
        if self._outstanding == 0:
            self._since = time.perf_counter()
            self._quiet.set()

    # In a checkpoint.

    async def notes(self) -> dict[Stream, Note]:
        """All notes, with what the engine has so far of requests that have not ended."""
        asked = dict(self._asked)
        part = await self._engine.under_way()
        found = {stream: Note(asked[stream].tokens, result) for stream, result in part.items() if stream in asked}
        # What has ended meanwhile is there as a whole; of what goes on behind a note there is more by now.
        return self._notes | found | {stream: note for stream, note in self._notes.items() if note.ended}

    def take_back(self, notes: Mapping[Stream, Note]) -> None:
        """Go on with the notes of a checkpoint."""
        self._notes = dict(notes)


def as_arrays(notes: Mapping[Stream, Note]) -> dict[str, np.ndarray]:
    """Notes as flat arrays with lengths, for a file; see `from_arrays`."""
    streams, found = list(notes), list(notes.values())
    prompts: dict[tuple[int, ...], int] = {}
    prompt_of = [prompts.setdefault(note.prompt, len(prompts)) for note in found]
    results = [note.result for note in found]
    return {
        **_ragged("streams", streams, np.int64),
        **_ragged("prompts", list(prompts), np.int32),
        **_ragged("tokens", [result.tokens for result in results], np.int32),
        "prompt_of": np.array(prompt_of, np.int32),
        "logprobs": _flat([result.logprobs for result in results], np.float32),
        "versions": _flat([result.versions for result in results], np.int32),
        "finish": np.array([ENDS.index(result.finish) for result in results], np.int8),
    }


def from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[Stream, Note]:
    """The notes that `as_arrays` was given."""
    streams, prompts = (
        [tuple(one.tolist()) for one in _parts(arrays[name], arrays[f"{name}_lengths"])]
        for name in ("streams", "prompts")
    )
    tokens, logprobs, versions = (
        _parts(arrays[name], arrays["tokens_lengths"]) for name in ("tokens", "logprobs", "versions")
    )
    return {
        stream: Note(prompts[prompt], SampleResult(t.astype(np.int64), p, v, ENDS[finish]))
        for stream, prompt, t, p, v, finish in zip(
            streams, arrays["prompt_of"], tokens, logprobs, versions, arrays["finish"], strict=True
        )
    }


def _flat(parts: Iterable[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _ragged(name: str, parts: list[Any], dtype: Any) -> dict[str, np.ndarray]:
    return {name: _flat(parts, dtype), f"{name}_lengths": np.array([len(part) for part in parts], np.int64)}


def _parts(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
