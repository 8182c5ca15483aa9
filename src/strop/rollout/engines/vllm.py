"""The engine `vllm`: samples with vLLM in this process, with the weights of a module that lives beside it.

Token ids go in and token ids come out; log-probabilities are those of the distribution that a token was drawn from.
Each sample has a seed of its own, so its draws do not depend on what is sampled beside it (up to rounding of the
logits).
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from torch import nn

from strop.errors import RunFailure
from strop.models.save import save_adapters, walk_merged, walk_plain
from strop.rollout.engine import EngineStats, FinishReason, SampleRequest, SampleResult, WeightUpdate
from strop.rollout.engines.stopping import ends_with_stop, stop_tail
from strop.rollout.engines.vllm_core import StepOutput, VllmCore
from strop.rollout.sampling import stream_key

T = TypeVar("T")
# Of all requests of this process, so that no vLLM is ever given a number twice: it may still know an ended one.
_NUMBERS = itertools.count()
_NO_VERSION = -1


@dataclass
class _Running:
    """A request on its way. score: it only wants the log-probabilities of its tokens."""

    request: SampleRequest | None
    score: Sequence[int] | None
    future: asyncio.Future[Any]
    tail: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    # (tokens that were there, version of those that follow)
    versions: list[tuple[int, int]] = field(default_factory=list)
    scores: list[np.ndarray] = field(default_factory=list)

    def go_on(self, begun: SampleResult) -> None:
        """Have what was sampled of it before."""
        self.tokens = [int(token) for token in begun.tokens]
        self.logprobs = [np.asarray(begun.logprobs, np.float32)]
        self.versions = [(at, int(version)) for at, version in enumerate(begun.versions)]

    def result(self, finish: FinishReason) -> SampleResult:
        count = len(self.tokens)
        versions = np.zeros(count, np.int32)
        for start, version in self.versions:
            versions[start:] = version
        logprobs = np.concatenate([np.zeros(0, np.float32), *self.logprobs])[:count].astype(np.float32)
        return SampleResult(np.asarray(self.tokens, np.int64), logprobs, versions, finish)


class VllmEngine:
    """Samples with vLLM; `docs/engine.md` says how it is used.

    Args:
        model: whose weights are sampled with; it is read at each publication.
        core: makes the engine core, in the thread that it then stays in.
        tokenizer: decodes the tail of a completion to find stop texts.
        eos_ids: tokens that end a completion. seed: of the run. context: longest prompt + completion.
        sleep_level: what a sleep does with the weights: 1 keeps them in the CPU's memory, so that the same version is
            served again after it; 2 drops them, and the engine waits for `update_weights`.
        merges: adapters go into vLLM merged into the weights. Otherwise they are kept beside them
            (`VllmSettings.adapter_rank`), and only they are brought to it where the weights have not changed.

    Raises:
        MissingExtra, RunFailure: see `VllmCore`.
    """

    def __init__(
        self,
        model: nn.Module,
        core: Callable[[], VllmCore],
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        seed: int,
        context: int,
        sleep_level: Literal[1, 2] = 1,
        merges: bool = True,
    ) -> None:
        self._model = model
        self._merges = merges
        # How often each of the weights that vLLM has was written to before it got them; None where it has none.
        self._held: list[int] | None = None
        self._sleep_level = sleep_level
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._seed = seed
        self._context = context
        # vLLM is used by one thread alone, and the event loop goes on while it computes.
        self._thread = ThreadPoolExecutor(1, "vllm")
        try:
            self._core = self._thread.submit(core).result()
            try:
                # As with `local`, what the module holds is served before anything is published.
                self._thread.submit(self._push).result()
            except BaseException:
                self._thread.submit(self._core.close).result()
                raise
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._version = 0
        self._entering: list[str] = []
        self._requests: dict[str, _Running] = {}
        self._loop: asyncio.Task[None] | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._turn = asyncio.Lock()
        self._stats = EngineStats()

    async def generate(self, request: SampleRequest) -> SampleResult:
        """Sample one completion.

        Raises:
            ValueError: prompt and completion do not fit the model's context, or the prompt is empty.
            RunFailure: vLLM failed.
        """
        request.check(self._context)
        running = _Running(request, None, asyncio.get_running_loop().create_future(), stop_tail(request.settings.stop))
        if request.begun is not None:
            running.go_on(request.begun)
        found: SampleResult = await self._enter(running)
        return found

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        """What each request has so far."""
        return {
            running.request.stream: running.result("aborted")
            for running in self._requests.values()
            if running.request is not None and running.tokens and not running.future.done()
        }

    async def score(self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L], through the weights that sampling uses.
        While the engine sleeps it waits, as sampling does.

        Raises:
            ValueError: another temperature than 1; vLLM does not score prompts at another.
            RunFailure: the engine is paused and sleeps, so that waiting might be for ever.
        """
        if temperature != 1.0:
            raise ValueError("vLLM scores prompts at temperature 1 only")
        loop = asyncio.get_running_loop()
        wanted = [_Running(None, list(tokens), loop.create_future()) for tokens in token_lists]
        if self._gate.is_set():
            return list(await asyncio.gather(*(self._enter(one) for one in wanted)))
        # A publication scores its probe while nothing else may be sampled.
        async with self._turn:
            if not self._awake.is_set():
                raise RunFailure("a sleeping engine was asked for log-probabilities while it was paused")
            scores, beside = await self._aside(lambda: self._score_alone([list(tokens) for tokens in token_lists]))
            await self._take_all(beside)
        return scores

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take a version: the module's weights as they are now, or the given ones, go into vLLM, which wakes up for it.

        Raises:
            RunFailure: vLLM could not take them or holds something else, or could not wake up; the engine serves no
                version then.
        """
        async with self._turn, self._nothing_served():
            if update.tensors is not None:
                own = dict(self._model.named_parameters())
                for name, tensor in update.tensors:
                    if name not in own or own[name].shape != tensor.shape:
                        raise RunFailure(f"{name}, {list(tensor.shape)}, was sent to an engine that has no such tensor")
                    own[name].data.copy_(tensor)
            # Keys and values come last: they take what room the weights leave.
            await self._aside(self._core.wake_weights)
            await self._aside(self._push)
            await self._aside(self._core.wake_cache)
            self._version = update.version
            for running in self._requests.values():
                running.versions.append((len(running.tokens), update.version))
        return self._version

    async def pause(self) -> None:
        """Begin no step from now on; returns when the one that is computed has ended."""
        self._gate.clear()
        async with self._turn:
            pass

    async def resume(self) -> None:
        self._gate.set()

    async def abort(self) -> None:
        async with self._turn:
            requests, self._requests, self._entering = self._requests, {}, []
            for running in requests.values():
                self._finish(running, "aborted")
            await self._aside(lambda: self._core.abort(list(requests)))

    async def sleep(self) -> None:
        """Give the GPU's memory back. Requests that run keep their tokens and go on after it; others wait.

        A vLLM that was not started for it (`VllmSettings.sleeps`) keeps its memory and stops.

        Raises:
            RunFailure: vLLM could not; the engine serves no version then.
        """
        async with self._turn:
            if not self._awake.is_set():
                return
            self._awake.clear()
            try:
                await self._take_all(await self._aside(self._core.drain))
                await self._aside(lambda: self._core.sleep(self._sleep_level))
                if self._sleep_level == 2:
                    self._held = None
            except BaseException:
                # Whoever waits is told.
                self._version = _NO_VERSION
                self._awake.set()
                raise

    async def wake(self) -> None:
        """Go on with the same version. After level 2 only the memory of the weights is taken, and the engine waits for
        those that `update_weights` brings.

        Raises:
            RunFailure: there is no room for it; the engine serves no version then.
        """
        async with self._turn:
            if self._awake.is_set():
                return
            try:
                await self._aside(self._core.wake_weights)
                if self._sleep_level == 1:
                    await self._aside(self._core.wake_cache)
                    self._awake.set()
            except BaseException:
                self._version = _NO_VERSION
                self._awake.set()
                raise

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    async def close(self) -> None:
        try:
            await self.abort()
            if self._loop is not None:
                self._loop.cancel()
                self._loop = None
            await self._aside(self._core.close)
        except Exception as error:
            # What is wrong with it was raised where it was asked for something; the run has more to close.
            warnings.warn(f"vLLM could not be closed: {error}", RuntimeWarning, stacklevel=2)
        finally:
            self._thread.shutdown()

    # What these stand on.

    @asynccontextmanager
    async def _nothing_served(self) -> AsyncIterator[None]:
        """No version is served while it lasts, nor after it where it fails; requests then fail instead of waiting."""
        self._version = _NO_VERSION
        try:
            yield
        finally:
            self._awake.set()

    async def _enter(self, running: _Running) -> Any:
        name = str(next(_NUMBERS))
        running.versions.append((len(running.tokens), self._version))
        self._requests[name] = running
        self._entering.append(name)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run())
        return await running.future

    async def _run(self) -> None:
        """Compute until nothing is wanted."""
        try:
            while self._requests:
                # Requests of the same turn of the event loop enter together.
                await asyncio.sleep(0)
                await self._gate.wait()
                await self._awake.wait()
                async with self._turn:
                    if not (self._requests and self._gate.is_set() and self._awake.is_set()):
                        continue
                    if self._version == _NO_VERSION:
                        raise RunFailure("vLLM serves no version of the weights: it could not take one, or not wake up")
                    entering, self._entering = self._entering, []
                    given_up = [name for name, one in self._requests.items() if one.future.done()]
                    started = time.perf_counter()
                    outputs = await self._aside(lambda: self._step(entering, given_up))  # noqa: B023
                    self._stats.seconds += time.perf_counter() - started
                    for name in given_up:
                        self._requests.pop(name, None)
                    await self._take_all(outputs)
        except Exception as error:
            failure = error if isinstance(error, RunFailure) else RunFailure(f"vLLM failed: {error!r}")
            failure.__cause__ = error if failure is not error else error.__cause__
            requests, self._requests, self._entering = self._requests, {}, []
            for running in requests.values():
                if not running.future.done():
                    running.future.set_exception(failure)

    def _step(self, entering: Sequence[str], given_up: Sequence[str]) -> list[StepOutput]:
        for name in entering:
            if name not in given_up:
                self._add(name, self._requests[name])
        if given_up:
            self._core.abort(given_up)
        return self._core.step()

    def _add(self, name: str, running: _Running) -> None:
        if running.score is not None:
            self._core.add_scored(name, running.score)
            return
        assert running.request is not None
        request, begun = running.request, len(running.tokens)
        # Draws go on elsewhere in the stream, or those of the first tokens would be drawn again.
        seed = int(stream_key(self._seed, (*request.stream, *([begun] if begun else []))))
        settings = replace(request.settings, max_new_tokens=request.settings.max_new_tokens - begun)
        self._core.add(name, (*request.tokens, *running.tokens), settings, seed=seed, ends=self._eos)
        self._stats.prompt_tokens += len(request.tokens) + begun
        self._stats.sequences += 1

    def _score_alone(self, token_lists: Sequence[Sequence[int]]) -> tuple[list[np.ndarray], list[StepOutput]]:
        """(scores, what came beside): requests that run in vLLM go on meanwhile, with the weights that are scored."""
        names = {f"probe-{at}": at for at in range(len(token_lists))}
        for name, at in names.items():
            self._core.add_scored(name, token_lists[at])
        found: list[list[np.ndarray]] = [[] for _ in token_lists]
        beside, left = [], set(names)
        while left:
            for output in self._core.step():
                if output.request not in names:
                    beside.append(output)
                    continue
                if output.failed:
                    raise RunFailure("vLLM gave up scoring the probe")
                if output.scores is not None:
                    found[names[output.request]].append(output.scores)
                if output.ended:
                    left.discard(output.request)
        return [_with_first(scores) for scores in found], beside

    async def _take_all(self, outputs: Sequence[StepOutput]) -> None:
        ended = [output.request for output in outputs if self._take(output)]
        if ended:
            await self._aside(lambda: self._core.abort(ended))

    def _take(self, output: StepOutput) -> bool:
        """Add what a step brought; whether vLLM has to be told that the request has ended."""
        running = self._requests.get(output.request)
        if running is None:
            return False
        if output.failed:
            raise RunFailure("vLLM gave a request up")
        if running.score is not None:
            if output.scores is not None:
                running.scores.append(output.scores)
            if output.ended:
                del self._requests[output.request]
                if not running.future.done():
                    running.future.set_result(_with_first(running.scores))
            return False
        assert running.request is not None
        before = len(running.tokens)
        running.tokens += output.tokens
        running.logprobs.append(output.logprobs)
        self._stats.sampled_tokens += len(output.tokens)
        stopped = (
            running.tail > 0
            and len(running.tokens) > before
            and ends_with_stop(self._tokenizer, running.tokens[-running.tail :], running.request.settings.stop)
        )
        if not output.ended and not stopped:
            return False
        del self._requests[output.request]
        ended = stopped or (bool(running.tokens) and running.tokens[-1] in self._eos)
        self._finish(running, "stop" if ended else "length")
        return not output.ended

    def _finish(self, running: _Running, finish: FinishReason) -> None:
        if not running.future.done():
            running.future.set_result(running.result(finish))

    def _push(self) -> None:
        if self._merges:
            self._core.push(dict(walk_merged(self._model)))
            return
        weights = dict(walk_plain(self._model))
        written = [tensor._version for tensor in weights.values()]
        with tempfile.TemporaryDirectory(prefix="strop-adapters-") as folder:
            save_adapters(self._model, Path(folder))
            self._core.push({} if written == self._held else weights, Path(folder))
        self._held = written

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _with_first(scores: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([[np.float32("nan")], *scores]).astype(np.float32)
