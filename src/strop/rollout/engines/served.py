"""An engine behind HTTP: a server of SGLang or an OpenAI-compatible one, started by others, that samples for a run.

The server is the run's alone: weights are replaced in it, and requests are cut off. A request that was cut off goes on
from the tokens that it has, with whatever weights are served by then, so every token has the version that drew it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from strop.errors import RunFailure, UserError
from strop.rewards.client import Server, Unanswered
from strop.rollout.engine import EngineStats, FinishReason, SampleRequest, SampleResult, SampleSettings, WeightUpdate
from strop.rollout.engines.connection import Connection, told
from strop.rollout.engines.dialects import Dialect, Unfit
from strop.rollout.engines.stopping import ends_with_stop, stop_tail
from strop.rollout.sampling import stream_key

KEY = "rollout.engine.server"
HOT = 2.0
"""The highest temperature that all servers sample at."""
SAME, FAR = 0.05, 0.5
"""Nats. Closer than the first, log-probabilities are of the same temperature but for rounding; farther than the second
from those of a draw among all tokens, another temperature makes another number of them."""


class ServedEngine:
    """Samples with a server.

    Args:
        server, dialect, concurrency: where and how it is asked. tokenizer: finds stop texts.
        eos_ids: tokens that end a completion. seed: of the run. context: longest prompt + completion.
        vocabulary: tokens that the model knows.
    """

    def __init__(
        self,
        server: Server,
        dialect: Dialect,
        tokenizer: Any,
        *,
        concurrency: int,
        eos_ids: Sequence[int],
        seed: int,
        context: int,
        vocabulary: int,
    ) -> None:
        self.server = server
        self._dialect = dialect
        self._connection = Connection(server)
        self._concurrency = concurrency
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._seed = seed
        self._context = context
        self._vocabulary = vocabulary
        self._version = 0
        self._running = 0
        self._parts: dict[tuple[int, ...], tuple[list[int], list[float], list[int]]] = {}
        self._aborts = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._stats = EngineStats()

    async def check(self) -> str:
        """What the server says of itself, once it has shown that it can do what a run needs.

        Raises:
            UserError: it cannot be reached; or it gives no token ids, no log-probabilities, or those of another
                temperature than it samples at.
        """
        try:
            about = await self._dialect.look(self._connection)
            prompt = [1 + at % (self._vocabulary - 1) for at in range(4)]
            hot = SampleSettings(8, HOT)
            said = await self._dialect.sample(self._connection, prompt, hot, seed=self._seed, ends=sorted(self._eos))
            if not said.tokens:
                raise Unfit("it sampled nothing")
            plain = (await self._dialect.score(self._connection, [*prompt, *said.tokens]))[len(prompt) - 1 :]
            from_plain = np.abs(np.asarray(said.logprobs) - plain).max()
            from_any = np.abs(plain + math.log(self._vocabulary)).max()
            if from_plain < SAME and from_any > FAR:
                raise Unfit(
                    "the log-probabilities that it gives are not those at the sampling temperature",
                    "start vLLM's server with --logprobs-mode processed_logprobs, and SGLang without "
                    "SGLANG_RETURN_ORIGINAL_LOGPROB",
                )
        except Unfit as error:
            raise UserError(
                f"the server cannot sample for this run: {error}", where=self._where, mend=error.mend
            ) from None
        except Unanswered as error:
            raise UserError(
                f"the server did not answer: {self.server.hidden(str(error))}",
                where=self._where,
                mend=f"start it, or mend {KEY}.urls",
            ) from None
        return about

    async def generate(self, request: SampleRequest) -> SampleResult:
        """Sample one completion.

        Raises:
            ValueError: prompt and completion do not fit the model's context, or the prompt is empty.
            RunFailure: the server did not answer.
        """
        request.check(self._context)
        begun = SampleResult([], [], [], "aborted") if request.begun is None else request.begun.plain()
        part = (list(begun.tokens), list(begun.logprobs), list(begun.versions))
        self._parts[request.stream] = part
        try:
            return await self._sample(request, *part)
        finally:
            del self._parts[request.stream]

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        """What each request had when it was last cut off."""
        return {stream: self._result(*part, "aborted") for stream, part in self._parts.items() if part[0]}

    async def _sample(
        self, request: SampleRequest, tokens: list[int], logprobs: list[float], versions: list[int]
    ) -> SampleResult:
        """Add to what is there until the completion has ended."""
        settings = request.settings
        attempt, aborts = 0, self._aborts
        while True:
            await self._gate.wait()
            if self._aborts != aborts:
                return self._result(tokens, logprobs, versions, "aborted")
            started = time.perf_counter()
            # Draws go on elsewhere in the stream, or those of the first tokens would be drawn again.
            seed = int(stream_key(self._seed, (*request.stream, *([len(tokens)] if tokens else []))))
            left = replace(settings, max_new_tokens=settings.max_new_tokens - len(tokens))
            try:
                # Its time begins when it has a place.
                async with self._place():
                    if not self._gate.is_set() or self._aborts != aborts:
                        continue
                    version = self._version
                    self._running += 1
                    try:
                        said = await self._dialect.sample(
                            self._connection, [*request.tokens, *tokens], left, seed=seed, ends=self._eos
                        )
                    finally:
                        self._running -= 1
            except Unanswered as error:
                if attempt == self.server.retries or not error.again:
                    raise self._failure("sampling", told(error, attempt, self.server)) from error
                await self._connection.wait(attempt, error)
                attempt += 1
                # Through the gate again: other weights may be served by now.
                continue
            except Unfit as error:
                raise self._failure("sampling", error) from error
            attempt = 0
            tokens += said.tokens
            logprobs += said.logprobs
            versions += [version] * len(said.tokens)
            self._stats.sampled_tokens += len(said.tokens)
            self._stats.seconds += time.perf_counter() - started
            finish = self._finish(tokens, settings)
            if finish is not None:
                self._stats.prompt_tokens += len(request.tokens)
                self._stats.sequences += 1
                return self._result(tokens, logprobs, versions, finish)
            if not said.aborted:
                raise RunFailure(
                    f"the server ended a completion after {len(tokens)} of {settings.max_new_tokens} tokens, with none "
                    "that ends one",
                    where=self._where,
                    mend="its context must be as long as the model's here",
                )

    async def score(self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN.

        Raises:
            ValueError: another temperature than 1. RunFailure: the server did not answer.
        """
        if temperature != 1.0:
            raise ValueError("servers score prompts at temperature 1 only")
        try:
            found = await asyncio.gather(*(self._dialect.score(self._connection, tokens) for tokens in token_lists))
        except (Unanswered, Unfit) as error:
            raise self._failure("scoring", error) from error
        return [np.concatenate([[np.float32("nan")], scores]).astype(np.float32) for scores in found]

    async def load(self, folder: Path, version: int) -> None:
        """Serve the weights of a folder from now on; what runs is cut off, and goes on with them.

        Args:
            folder: of Hugging Face's form, which the server sees under the same name. The engine is paused.

        Raises:
            RunFailure: the server did not take them.
        """
        try:
            await self._cut()
            await self._dialect.load(self._connection, folder)
        except (Unanswered, Unfit) as error:
            raise self._failure("taking new weights", error) from error
        self._version = version

    async def update_weights(self, update: WeightUpdate) -> int:
        """The version that is served. Weights come by `load`.

        Raises:
            RunFailure: another version is asked for than is served.
        """
        if update.tensors is not None or update.version != self._version:
            raise RunFailure(f"a server takes weights from a folder, and serves version {self._version}")
        return self._version

    async def pause(self) -> None:
        """Ask for nothing from now on."""
        self._gate.clear()

    async def resume(self) -> None:
        self._gate.set()

    async def abort(self) -> None:
        """End every request with what it has."""
        self._aborts += 1
        if not self._gate.is_set():
            # Those that wait at the gate see it, and nobody else goes through.
            self._gate.set()
            self._gate.clear()
        try:
            await self._cut()
        except (Unanswered, Unfit) as error:
            raise self._failure("ending its requests", error) from error

    async def sleep(self) -> None:
        """Nothing: a server's memory is its own."""

    async def wake(self) -> None:
        """Nothing, likewise."""

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    async def close(self) -> None:
        """Close the connections; the server goes on, with the weights that it has."""
        await self._connection.close()

    async def _cut(self) -> None:
        """End what runs; more than once, for a request may have been on its way."""
        while self._running:
            await self._dialect.cut(self._connection)
            await asyncio.sleep(0.01)

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, asyncio.Semaphore(self._concurrency)
        return self._places[1]

    @property
    def _where(self) -> str:
        return f"{KEY}.urls: {self.server.url}"

    def _finish(self, tokens: Sequence[int], settings: SampleSettings) -> FinishReason | None:
        """How a completion has ended; None if it has not."""
        if tokens and tokens[-1] in self._eos:
            return "stop"
        tail = stop_tail(settings.stop)
        if tail and ends_with_stop(self._tokenizer, tokens[-tail:], settings.stop):
            return "stop"
        return "length" if len(tokens) >= settings.max_new_tokens else None

    def _result(
        self, tokens: list[int], logprobs: list[float], versions: list[int], finish: FinishReason
    ) -> SampleResult:
        return SampleResult(
            np.asarray(tokens, np.int64), np.asarray(logprobs, np.float32), np.asarray(versions, np.int32), finish
        )

    def _failure(self, doing: str, error: Exception) -> RunFailure:
        mend = error.mend if isinstance(error, Unfit) and error.mend else "see what the server printed"
        text = self.server.hidden(str(error))
        return RunFailure(f"the server failed at {doing}: {text}", where=self._where, mend=mend)
