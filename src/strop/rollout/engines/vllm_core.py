"""vLLM in this process: how weights get into it, and what comes out of one step of it.

Where its layers are divided among several GPUs (`VllmSettings.tensor`), the model is in processes that vLLM starts, one
for each, and what plans their work is here.

vLLM's own output loop makes several Python objects of each log-probability, which costs more than a decoding step of a
small model. Therefore the core of its engine is driven here, whose outputs are flat arrays; the scheduler, the KV
cache, the kernels and the sampler are vLLM's. Nothing here knows asyncio, and all of it is called from one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from strop.errors import RunFailure
from strop.rollout.engine import SampleSettings
from strop.rollout.engines import vllm_sleep, vllm_weights
from strop.rollout.engines.vllm_start import VllmSettings, start
from strop.rollout.engines.vllm_weights import NAMED, Sent

_SEEDS = 1 << 63
# In the place of what sleeps, after a sleep that failed half way.
_LOST = "lost"
_RPC_SECONDS, _LAST_SECONDS = 600.0, 10.0

Call = Callable[[str, tuple[Any, ...]], list[Any]]
"""Calls a method of each of vLLM's processes with arguments, and gives what they returned."""


class Workers(Protocol):
    """How weights get into the processes of a vLLM that has several. extension: full name of a class that is mixed into
    vLLM's workers."""

    extension: str

    def begin(self, call: Call) -> None:
        """What is to be done once in each of them."""
        ...

    def push(self, call: Call, weights: Mapping[str, Tensor]) -> list[str]:
        """Bring weights to all of them; returns the names of tensors of which one holds other values."""
        ...

    def end(self, call: Call) -> None:
        """What is to be done before vLLM ends them."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StepOutput:
    """What one step brought of one request: tokens [n], logprobs float32 [n]; of a scored one the log-probabilities of
    its prompt but for the first token, float32 [L - 1]. ended: vLLM will bring no more of it. failed: by its fault."""

    request: str
    tokens: list[int]
    logprobs: np.ndarray
    scores: np.ndarray | None
    ended: bool
    failed: bool


class VllmCore:
    """An engine core of vLLM, without weights at first.

    Args:
        config: of the model in transformers' form.
        architecture: name of its class.
        workers: how weights get into them, where `settings.tensor` makes several.

    Raises:
        MissingExtra: vLLM is not installed. RunFailure: it could not be started.
    """

    def __init__(self, config: Any, architecture: str, settings: VllmSettings, workers: Workers | None = None) -> None:
        self._engine = start(config, architecture, settings, None if workers is None else workers.extension)
        self._core = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        self._greedy: set[str] = set()
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._workers = workers
        self._adapters: Any = None
        self._sleeps = settings.sleeps
        self._keeps = settings.keeps
        self._asleep: list[str] = []
        self._closing = threading.Event()
        if workers is not None:
            _end_together(self._core.engine_core.model_executor.workers, self._closing)
            workers.begin(self._call)
        self._kept: dict[str, vllm_sleep.Kept] = {}

    # Requests.

    def add(
        self, request: str, tokens: Sequence[int], settings: SampleSettings, *, seed: int, ends: Collection[int]
    ) -> None:
        """Sample a completion. seed: of all its draws. ends: tokens that end it."""
        from vllm import SamplingParams

        greedy = settings.temperature == 0
        if greedy:
            self._greedy.add(request)
        self._add(
            request,
            tokens,
            SamplingParams(
                max_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                # Of any 64 bits, what vLLM takes as a seed. Without one it would draw one, from a global generator.
                seed=0 if greedy else seed % _SEEDS,
                logprobs=0,
                detokenize=False,
                stop_token_ids=sorted(ends),
                ignore_eos=True,
            ),
        )

    def add_scored(self, request: str, tokens: Sequence[int]) -> None:
        """Score the tokens; vLLM samples one token after them, which nobody wants."""
        from vllm import SamplingParams

        self._greedy.add(request)
        self._add(
            request, tokens, SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, detokenize=False)
        )

    def abort(self, requests: Sequence[str]) -> None:
        self._core.abort_requests(list(requests))
        self._greedy.difference_update(requests)

    def step(self) -> list[StepOutput]:
        """Compute one step for all requests; with asynchronous scheduling the first may bring nothing yet."""
        with self._kept_random():
            outputs = self._core.get_output().outputs
        found = [_output_of(one) for one in outputs]
        self._greedy.difference_update(one.request for one in found if one.ended)
        return found

    # Sleep.

    def drain(self) -> list[StepOutput]:
        """Begin no more steps, and give what those bring that were begun; `wake_cache` lets it go on."""
        vllm_sleep.hold(self._core)
        found: list[StepOutput] = []
        while vllm_sleep.pending(self._core):
            found += self.step()
        return found

    def sleep(self, level: int) -> None:
        """Give memory back; requests that run keep their tokens, and their keys and values are computed anew.

        Args:
            level: 1 copies the weights to the CPU's memory, 2 drops them. Of a core that was not started for it neither
                gives anything back.

        Raises:
            RunFailure: vLLM could not; it is of no use any more.
        """
        try:
            if self._sleeps:
                # Nothing may be written any more, and 0.24 unmaps pages without waiting for the kernels that use them.
                torch.cuda.synchronize()
                self._kept = {vllm_sleep.CACHE: vllm_sleep.keep(vllm_sleep.CACHE, vllm_sleep.caches(self._runner))}
                if level == 2:
                    self._kept[vllm_sleep.WEIGHTS] = vllm_sleep.keep(vllm_sleep.WEIGHTS, self._model.parameters())
            vllm_sleep.fall_asleep(self._core, level if self._sleeps else 0)
        except Exception as error:
            self._asleep = [_LOST]
            raise RunFailure(f"vLLM could not give its memory back: {type(error).__name__}: {error}") from error
        self._asleep = [vllm_sleep.WEIGHTS, vllm_sleep.CACHE] if self._sleeps else [vllm_sleep.SCHEDULING]

    def wake_weights(self) -> None:
        """Take the memory of the weights again; after level 2 they have to be pushed. Nothing where it is awake.

        Raises:
            RunFailure: there is no room, or vLLM could not sleep before.
        """
        if vllm_sleep.WEIGHTS in self._asleep:
            dropped = vllm_sleep.WEIGHTS in self._kept
            self._wake([vllm_sleep.WEIGHTS])
            if dropped and not self._quantised:
                vllm_sleep.spoil(self._model)
        elif self._asleep == [_LOST]:
            raise RunFailure("vLLM could not give its memory back before, and serves nothing any more")

    def wake_cache(self) -> None:
        """Take the memory of keys and values again, and go on. Nothing where it is awake."""
        if self._asleep:
            self._wake(list(self._asleep))
            if self._sleeps:
                vllm_sleep.blank(vllm_sleep.caches(self._runner))

    def _wake(self, tags: list[str]) -> None:
        try:
            vllm_sleep.wake(self._core, tags)
            for tag in tags:
                if (kept := self._kept.pop(tag, None)) is not None:
                    kept.restore()
        except Exception as error:
            raise RunFailure(
                f"vLLM could not take its memory again: {type(error).__name__}: {error}",
                where="rollout.engine.sleep",
                mend="lower rollout.engine.memory, or set training.offload: true, so that there is room for it",
            ) from error
        self._asleep = [tag for tag in self._asleep if tag not in tags]

    # Weights.

    def push(self, weights: Mapping[str, Tensor], adapters: Path | None = None) -> None:
        """Put all weights into the model, and forget everything that was computed with others.

        Requests that run keep their tokens; their keys and values are computed anew, unless it was started to keep
        them.

        Args:
            weights: by the names of Hugging Face, on any device and in any number format; none where those that it has
                are to stay.
            adapters: a folder of peft's form, needed until this returns; they take the place of those that it had.

        Raises:
            RunFailure: vLLM could not take them, or holds other values than these.
        """
        try:
            stale = self._put(weights) if weights else []
            if adapters is not None:
                self._put_adapters(adapters)
        except Exception as error:
            raise RunFailure(f"vLLM could not take the weights: {type(error).__name__}: {error}") from error
        if stale:
            told = ", ".join(stale[:NAMED]) + (f" and {len(stale) - NAMED} more" if len(stale) > NAMED else "")
            raise RunFailure(
                f"vLLM holds other values than it was given, in {len(stale)} of {len(weights)} tensors: {told}",
                mend="the run stops so that nothing is trained on samples of other weights",
            )
        if not self._keeps and not self._core.reset_prefix_cache(reset_running_requests=True):
            raise RunFailure("vLLM could not forget the keys and values of older weights")

    def close(self) -> None:
        """End vLLM.

        Raises:
            RunFailure: it could not take back memory that it had given away, which it cannot give a second time; it is
                ended all the same.
        """
        self._closing.set()
        try:
            if self._sleeps and self._asleep != [_LOST]:
                self.wake_weights()
                self.wake_cache()
        finally:
            if self._workers is not None:
                with suppress(Exception):  # some of them may be lost, or hang
                    self._workers.end(partial(self._call, seconds=_LAST_SECONDS))
                self._workers.close()
            self._core.shutdown()
            if self._sleeps:
                # Whatever of it is still held keeps its pages in the pool.
                self._engine = self._core = None
                vllm_sleep.leave_pool()

    def _put(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Weights into the model, wherever it is; the names of those that differ then."""
        if self._workers is not None:
            return self._workers.push(self._call, weights)
        vllm_weights.load(self._worker, weights.items(), Sent.of(weights))
        return vllm_weights.stale(self._model, weights)

    def _put_adapters(self, folder: Path) -> None:
        """Under one number for ever, so that requests that run go on with the new ones."""
        from vllm.lora.request import LoRARequest

        if not self._core.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True)):
            raise RunFailure("it keeps adapters of its own")
        self._adapters = LoRARequest("policy", 1, str(folder))

    def _call(self, method: str, arguments: tuple[Any, ...], *, seconds: float = _RPC_SECONDS) -> list[Any]:
        told: list[Any] = self._core.collective_rpc(method, timeout=seconds, args=arguments)
        return told

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._runner.get_model()
        return model

    @property
    def _runner(self) -> Any:
        return self._worker.model_runner

    @property
    def _worker(self) -> Any:
        """vLLM's worker in this process."""
        return self._core.engine_core.model_executor.driver_worker.worker

    @property
    def _quantised(self) -> bool:
        return self._engine.vllm_config.model_config.quantization is not None

    def _add(self, request: str, tokens: Sequence[int], params: Any) -> None:
        prompt = {"type": "token", "prompt_token_ids": list(tokens)}
        made = self._engine.input_processor.process_inputs(
            request, prompt, params, supported_tasks=self._tasks, lora_request=self._adapters
        )
        self._core.add_request(made)

    @contextmanager
    def _kept_random(self) -> Iterator[None]:
        """Where greedy requests are among others, vLLM draws for them too, from the global generator."""
        if not self._greedy:
            yield
            return
        with torch.random.fork_rng(devices=[] if self._device is None else [self._device]):
            yield


def _output_of(one: Any) -> StepOutput:
    logprobs = np.zeros(0, np.float32) if one.new_logprobs is None else one.new_logprobs.logprobs[:, 0]
    prompt = one.new_prompt_logprobs_tensors
    reason = None if one.finish_reason is None else str(one.finish_reason)
    return StepOutput(
        request=one.request_id,
        tokens=list(one.new_token_ids),
        logprobs=logprobs,
        scores=None if prompt is None else prompt.logprobs[:, 0].float().cpu().numpy(),
        ended=reason is not None,
        failed=reason is not None and reason.lower() not in ("stop", "length", "repetition"),
    )


def _end_together(workers: Sequence[Any], closing: threading.Event) -> None:
    """Kill all of vLLM's processes as soon as one is lost.

    The others wait for it, on a GPU for ever; vLLM sees the loss too, but gives them half a minute to end by themselves
    before it tells whoever waits for an answer.

    Args:
        workers: vLLM's handles of them. closing: set when they are meant to end.
    """

    def watch() -> None:
        wait([worker.proc.sentinel for worker in workers])
        if not closing.is_set():
            for worker in workers:
                worker.proc.kill()

    threading.Thread(target=watch, name="strop-vllm-workers", daemon=True).start()


__all__ = ["Call", "StepOutput", "VllmCore", "Workers"]
