"""The embedded engine: samples with the trainer's own module, on any device, with continuous batching.

Sequences that share a prompt are prefilled once; a finished sequence leaves the batch and a waiting one enters; each
token is drawn from its sample's own random stream. transformers' own continuous batching was looked at first: it can
give log-probabilities, but a draw there depends on its neighbours in the batch, which resuming bit for bit rules out.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strop.errors import RunFailure
from strop.models.attention import Plan, running
from strop.models.blocks import ChangedBlocks
from strop.models.consistent import chosen_logprobs
from strop.models.consistent_mode import is_consistent
from strop.models.forward import backbone
from strop.models.layout import pack
from strop.rollout.engine import EngineStats, FinishReason, SampleRequest, SampleResult, WeightUpdate
from strop.rollout.engines import packed_linear
from strop.rollout.engines.derived import Derived
from strop.rollout.engines.graphs import GraphDecoder, NotCaptured, capturable
from strop.rollout.engines.kv_cache import Decode, KVCache, Prefill
from strop.rollout.engines.stopping import stop_tail
from strop.rollout.engines.token_scores import TokenScores
from strop.rollout.engines.under_way import Draws, Launched, UnderWay, context_of
from strop.rollout.sampling import draw, stream_key, uniforms
from strop.rollout.together import Ended, as_ended

# While new weights are half copied.
_NO_VERSION = -1


class LocalEngine:
    """Samples with the trainer's own module (nothing to synchronise, nothing to drift), or with one of its own.

    Args:
        model: a causal model, adapters included. tokenizer: decodes the tail of a completion to find stop texts.
        eos_ids: tokens that end a completion. seed: of the run. context: longest prompt + completion.
        max_sequences: rows decoded together. prefill_tokens: prompt tokens in one forward pass.
        pack_weights: hold a second copy of the weights for small matrix products; None decides by the model.
        graphs: on a GPU, capture decoding steps as CUDA graphs; a model that does not allow it is decoded without.
            compiled: then also compile the model's blocks by torch.compile.
        recomputes: compute keys and values of running requests anew with each version of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        seed: int,
        context: int,
        max_sequences: int = 256,
        prefill_tokens: int = 4096,
        pack_weights: bool | None = None,
        graphs: bool = True,
        compiled: bool = False,
        recomputes: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._seed = seed
        self._context = context
        self._rows = max_sequences
        self._prefill_tokens = prefill_tokens
        self._device = next(model.parameters()).device
        self._consistent = is_consistent(model)
        if self._consistent and (pack_weights or compiled):
            raise ValueError("packed weights and compiled blocks compute what the trainer does not")
        can_pack = packed_linear.available(model) and not self._consistent
        packs = can_pack if pack_weights is None else pack_weights
        self._capture = graphs and capturable(self._device)
        self._derived = Derived(
            model, packs=packs, rows=max_sequences, consistent=self._consistent, joins=self._capture
        )
        self._cache: KVCache | None = None
        self._graphs: Any = None
        self._blocks = ChangedBlocks(model, compiled=True, recompute=False) if compiled and self._capture else None
        self._scores = TokenScores(model, self._derived, self._hidden, self._hidden_of_steps)
        self._recomputes = recomputes
        self._version = 0
        self._waiting: deque[UnderWay] = deque()
        self._running: list[UnderWay] = []
        # Begun before the tokens of the step before it were looked at; nothing but sequences of its rows depends on it.
        self._launched: Launched | None = None
        self._draws = Draws(max_sequences)
        self._loop: asyncio.Task[None] | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._stats = EngineStats()

    async def generate(self, request: SampleRequest, *, told: Callable[[int], None] | None = None) -> SampleResult:
        """Sample one completion.

        Args:
            told: called with each token as soon as it is drawn; it must not raise.

        Raises:
            ValueError: prompt and completion do not fit the model's context, or the prompt is empty.
        """
        request.check(self._context)
        return await self._begin(request, told)

    async def generate_all(self, requests: Sequence[SampleRequest], ended: Ended) -> None:
        """See `sample_all`."""
        for request in requests:
            request.check(self._context)
        await as_ended(map(self._begin, requests), ended)

    def _begin(self, request: SampleRequest, told: Callable[[int], None] | None = None) -> asyncio.Future[SampleResult]:
        sequence = UnderWay(
            request, asyncio.get_running_loop().create_future(), stream_key(self._seed, request.stream), told=told
        )
        sequence.stop_tail = stop_tail(request.settings.stop)
        if (begun := request.begun) is not None:
            plain = begun.plain()
            sequence.tokens, sequence.logprobs = list(plain.tokens), list(plain.logprobs)
            sequence.versions = list(plain.versions)
        self._waiting.append(sequence)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run())
        return sequence.future

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        """What each request has so far."""
        return {
            sequence.request.stream: SampleResult(
                list(sequence.tokens), list(sequence.logprobs), list(sequence.versions), "aborted"
            )
            for sequence in [*self._running, *self._waiting]
            if sequence.tokens and not sequence.future.done()
        }

    async def score(self, token_lists: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L], through the weights that sampling uses."""
        self._without_dropout()
        with torch.no_grad(), self._derived.used(self._version):
            return self._scores.of(token_lists, temperature, self._version, capture=self._capture)

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take a version: with tensors they are copied into the module; without, the module has them already.

        What was derived from the old weights is dropped in both cases.

        Args:
            update: its `tensors` are pairs of a parameter's name and its new value, of the same shape, on any device
                and in any number format; parameters that are not named stay as they are.

        Raises:
            RunFailure: there is no such parameter, or it has another shape; the engine serves no version then.
        """
        self._derived.drop()
        if update.tensors is not None:
            self._copy(update.tensors)
        self._version = update.version
        if self._graphs is not None:
            self._graphs.weights_are_new()
        # What was computed with the old weights is not lent to requests that enter from now on.
        for sequence in self._running:
            sequence.first_hidden = None
        if self._recomputes:
            self._enter_again()
        return self._version

    def _copy(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self._model.named_parameters())
        self._version = _NO_VERSION
        with torch.no_grad():
            for name, tensor in tensors:
                if name not in own or own[name].shape != tensor.shape:
                    here = f"has the shape {list(own[name].shape)}" if name in own else "does not exist"
                    raise RunFailure(f"{name}, {list(tensor.shape)}, was sent to an engine where it {here}")
                own[name].copy_(tensor)

    async def pause(self) -> None:
        self._gate.clear()

    async def resume(self) -> None:
        self._gate.set()

    async def abort(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            self._finish(sequence, "aborted")
        self._running.clear()
        self._waiting.clear()
        self._forget_launched()

    async def sleep(self) -> None:
        """Give the cache and copies of weights back; running requests keep what they have and are prefilled again."""
        self._enter_again()
        self._cache = self._graphs = None
        self._scores.forget()
        self._derived.give_back()

    def _enter_again(self) -> None:
        """Let running requests wait, with what they have, until they are prefilled anew."""
        for sequence in self._running:
            sequence.first_hidden = None
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._forget_launched()

    def _forget_launched(self) -> None:
        """What a launched step draws is not wanted; its graph can be given back when the GPU is done with it."""
        launched, self._launched = self._launched, None
        if launched is not None:
            # A GPU that has failed computes nothing any more, and whoever called it has been told.
            with suppress(RuntimeError):
                launched.drawn.wait()

    async def wake(self) -> None:
        """Nothing to do: memory is taken again when it is needed."""

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        if self._cache is not None:
            stats.extra["kv_cache_bytes"] = float(self._cache.bytes())
        if joined := self._derived.joined_bytes():
            stats.extra["joined_bytes"] = float(joined)
        return stats

    async def close(self) -> None:
        await self.abort()
        if self._loop is not None:
            self._loop.cancel()
            self._loop = None
        await self.sleep()

    async def _run(self) -> None:
        """Decode until nothing waits. One turn of the event loop between steps lets requests and results through."""
        try:
            while self._waiting or self._running:
                await asyncio.sleep(0)
                # Whoever is woken may find it closed again.
                while not self._gate.is_set():
                    await self._gate.wait()
                started = time.perf_counter()
                self._without_dropout()
                if self._version == _NO_VERSION:
                    raise RunFailure("the weights of the engine are parts of two versions")
                with torch.no_grad(), self._derived.used(self._version):
                    self._step()
                self._stats.seconds += time.perf_counter() - started
        except Exception as error:
            failure = RunFailure(f"the local engine failed while sampling: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for sequence in [*self._running, *self._waiting]:
                if not sequence.future.done():
                    sequence.future.set_exception(failure)
            self._running.clear()
            self._waiting.clear()
            self._forget_launched()

    def _step(self) -> None:
        self._drop_cancelled()
        while self._waiting and len(self._running) < self._rows:
            self._prefill(self._next_prompts())
        if self._running:
            self._decode()
        if not self._running:
            self._forget_launched()

    def _next_prompts(self) -> list[UnderWay]:
        """Waiting requests for the free rows, as many as fit one forward pass (and at least one)."""
        chosen: list[UnderWay] = []
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        while self._waiting and len(self._running) + len(chosen) < self._rows:
            prompt = context_of(self._waiting[0])
            if prompt not in prompts:
                tokens += len(prompt)
                if prompts and tokens > self._prefill_tokens:
                    break
                prompts.add(prompt)
            chosen.append(self._waiting.popleft())
        return chosen

    def _prefill(self, entering: list[UnderWay]) -> None:
        """Give entering sequences a row each; equal prompts are computed once, or copied from a row that has it."""
        if self._cache is None:
            self._cache = KVCache(self._rows)
        cache = self._cache
        first = len(self._running)
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for row, sequence in enumerate(entering, start=first):
            by_prompt.setdefault(context_of(sequence), []).append(row)
            sequence.row = row
            self._draws.enter(row, sequence)
        held = {
            s.request.tokens: row
            for row, s in enumerate(self._running)
            if s.first_hidden is not None and s.first_hidden[0] == self._version
        }
        self._running.extend(entering)
        # Graphs hold addresses, so that the cache should not have to grow under them.
        more = max(s.request.settings.max_new_tokens - len(s.tokens) for s in entering) if self._capture else 1
        cache.reserve(min(max(len(prompt) for prompt in by_prompt) + more, self._context))
        last: dict[tuple[int, ...], Tensor] = {}
        fresh = {prompt: rows for prompt, rows in by_prompt.items() if prompt not in held}
        for prompt, rows in by_prompt.items():
            if prompt in held:
                lender = self._running[held[prompt]].first_hidden
                assert lender is not None
                last[prompt] = lender[1]
                for row in rows:
                    cache.copy(held[prompt], row, len(prompt))
        if fresh:
            prompts = [np.asarray(prompt, dtype=np.int64) for prompt in fresh]
            packed = pack(prompts, [len(prompt) - 1 for prompt in prompts])
            plan = Prefill(packed, cache, list(fresh.values()), self._device)
            hidden = self._hidden(*self._row(packed.layout.input_ids, packed.layout.position_ids), plan)
            for places, (prompt, rows) in zip(packed.places, fresh.items(), strict=True):
                cache.lengths[rows] = len(prompt)
                last[prompt] = hidden[int(places[-1])]
            self._stats.prompt_tokens += len(packed.layout.input_ids)
        self._stats.sequences += len(entering)
        stacked = torch.stack([last[context_of(sequence)] for sequence in entering])
        for sequence in entering:
            # After a sleep the context goes past the prompt, and its end is not where a sibling begins.
            sequence.first_hidden = None if sequence.tokens else (self._version, last[sequence.request.tokens])
        self._take(first, stacked)

    def _decode(self) -> None:
        assert self._cache is not None
        if self._capture or self._launched is not None:
            self._decode_ahead()
            return
        count = len(self._running)
        plan = Decode(self._cache, count, self._device)
        hidden = self._hidden(*self._row(self._draws.last[:count], self._cache.lengths[:count].copy()), plan)
        self._cache.lengths[:count] += 1
        self._take(0, hidden)

    def _decode_ahead(self) -> None:
        """Launch a captured step and look at what the one before it drew, while the GPU computes this one.

        What ends with a token of the step before has been computed once more by then: one row of a step is lost.
        """
        assert self._cache is not None
        self._cache.reserve(int(self._cache.lengths[: len(self._running)].max()) + 1)
        before = self._launched
        # Otherwise its tokens are looked at first: nothing may come after them, or other graphs cannot read them.
        at_once = self._capture and (before is None or (self._graphs.fits() and self._goes_on(before)))
        self._launched = self._launch(before) if at_once else None
        if before is not None:
            self._accept(before.sequences, *before.drawn.wait(), before.version)

    def _goes_on(self, before: Launched) -> bool:
        """Whether any running sequence has tokens left to draw after those of a step."""
        coming = {id(sequence) for sequence in before.sequences}
        return any(len(s.tokens) + (id(s) in coming) < s.request.settings.max_new_tokens for s in self._running)

    def _launch(self, before: Launched | None) -> Launched | None:
        """A captured step of the running rows, begun; None where the model cannot be captured."""
        assert self._cache is not None
        count, draws, lengths = len(self._running), self._draws, self._cache.lengths
        u = uniforms(draws.keys[:count], draws.positions[:count])
        sources = None if before is None else before.sources(self._running)
        try:
            drawn = self._decoder().launch(draws.last[:count], lengths[:count], draws.temperatures[:count], u, sources)
        except NotCaptured as why:
            self._capture_no_more("a decoding step", str(why))
            return None
        lengths[:count] += 1
        draws.positions[:count] += 1
        return Launched(list(self._running), self._version, drawn)

    def _decoder(self) -> GraphDecoder:
        """That of the cache as it is now."""
        assert self._cache is not None
        if self._graphs is None or not self._graphs.fits():
            self._graphs = None
            self._graphs = GraphDecoder(
                self._model,
                self._cache,
                self._drawn if self._consistent else self._drawn_in_one_pass,
                self._device,
                blocks=self._blocks,
                joined=lambda: self._derived.joined(self._version),
            )
        return self._graphs

    def _take(self, first: int, hidden: Tensor) -> None:
        """Draw a token for each row from `first` on, given hidden states [n, H]."""
        rows = slice(first, len(self._running))
        draws, device = self._draws, self._device
        u = torch.from_numpy(uniforms(draws.keys[rows], draws.positions[rows])).to(device)
        draws.positions[rows] += 1
        tokens, logprobs = self._drawn(hidden, torch.from_numpy(draws.temperatures[rows]).to(device), u)
        self._accept(self._running[rows], tokens.cpu().numpy(), logprobs.cpu().numpy(), self._version)

    def _drawn(self, hidden: Tensor, temperatures: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, their log-probabilities) [n] each."""
        logits = self._derived.logits(hidden, self._version)
        tokens, logprobs = draw(logits, temperatures, u)
        if self._consistent:
            # Of the same logits, added up as the trainer does.
            logprobs = chosen_logprobs(logits, tokens, temperatures)
        return tokens, logprobs

    def _drawn_in_one_pass(self, hidden: Tensor, temperatures: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """`_drawn` of a captured step, where a kernel reads the logits as they come."""
        from strop.rollout.engines.draw_kernel import draw

        return draw(self._derived.logits(hidden, self._version, widened=False), temperatures, u)

    def _accept(self, sequences: Sequence[UnderWay], drawn: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Give sequences their tokens [n] of a version, and let those go that are finished now."""
        last, finished = self._draws.last, []
        for sequence, token, logprob in zip(sequences, drawn.tolist(), logprobs.tolist(), strict=True):
            if sequence.future.done():
                continue
            last[sequence.row] = token
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            self._stats.sampled_tokens += 1
            if sequence.told is not None:
                sequence.told(token)
            if (finish := sequence.finished(self._eos, self._tokenizer)) is not None:
                self._finish(sequence, finish)
                finished.append(sequence)
        # From the last row down, so that the row moved into a gap stays.
        for sequence in sorted(finished, key=lambda sequence: -sequence.row):
            self._release(sequence.row)

    def _finish(self, sequence: UnderWay, finish: FinishReason) -> None:
        if not sequence.future.done():
            sequence.future.set_result(sequence.result(finish))

    def _release(self, row: int) -> None:
        """Free a row; the last running one moves into the gap so that rows in use stay contiguous."""
        assert self._cache is not None
        last = len(self._running) - 1
        if row != last:
            self._running[row] = self._running[last]
            self._running[row].row = row
            self._cache.copy(last, row, int(self._cache.lengths[last]))
            self._draws.move(last, row)
        self._running.pop()

    def _drop_cancelled(self) -> None:
        if any(s.future.done() for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.future.done())
        for row in reversed(range(len(self._running))):
            if self._running[row].future.done():
                self._release(row)

    def _row(self, input_ids: np.ndarray, position_ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """[1, T] each, on the device."""
        ids, positions = (torch.from_numpy(array).to(self._device)[None] for array in (input_ids, position_ids))
        return ids, positions

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, plan: Plan) -> Tensor:
        """[T, H]: last hidden states of a pass that is not captured itself, from tokens [1, T].

        Its layers are those of captured steps, compiled and joined, which a GPU has to be asked less often for; and
        what is sampled with is then what the proof of delivery sees.
        """
        if not self._capture:
            return self._pass(input_ids, position_ids, plan)
        try:
            return self._hidden_of_steps(input_ids, position_ids, plan)
        except (RunFailure, torch.OutOfMemoryError):
            # A smaller `prefill_tokens` mends the latter; without compiled blocks a pass needs more memory.
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        # Where this fails too, the layers are not to blame.
        hidden = self._pass(input_ids, position_ids, plan)
        self._capture_no_more("a pass over prompts or a probe", why)
        return hidden

    def _hidden_of_steps(self, input_ids: Tensor, position_ids: Tensor, plan: Plan) -> Tensor:
        with ExitStack() as layers:
            if (joined := self._derived.joined(self._version)) is not None:
                layers.enter_context(joined.active())
            if self._blocks is not None:
                layers.enter_context(self._blocks.used())
            return self._pass(input_ids, position_ids, plan)

    def _pass(self, input_ids: Tensor, position_ids: Tensor, plan: Plan) -> Tensor:
        with running(self._model, plan):
            found = backbone(self._model)(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return found.last_hidden_state[0]

    def _capture_no_more(self, what: str, why: str) -> None:
        """Compute everything plainly from now on. A step that was launched keeps what it draws."""
        if self._launched is not None:
            self._launched.drawn.wait()
        self._capture, self._graphs, self._blocks = False, None, None
        self._scores.forget()
        self._derived.give_back()
        warnings.warn(
            f"completions are sampled without CUDA graphs and compiled blocks, which is slower: {what} failed with "
            f"them, {why} (rollout.engine.eager: true does without from the start)",
            RuntimeWarning,
            stacklevel=2,
        )

    def _without_dropout(self) -> None:
        if self._model.training:
            self._model.eval()
