"""What `engines.py` samples with: engines of strop and transformers' `generate`, each under the same three verbs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import random_models

Prompts = list[list[int]]


@dataclass(frozen=True)
class Job:
    """What all engines do. sizes: sequences sampled together. runs: of each size, beside the one that is not counted.
    memory: share of the GPU's memory that vLLM gets. prefill_tokens: of prompts, in one pass of strop's engines; None
    is what a run chooses."""

    shape: str
    device: str
    dtype: str
    sizes: list[int]
    prompt_tokens: int
    new_tokens: int
    runs: int
    threads: int
    memory: float
    prefill_tokens: int | None = None

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens


class Sampler(Protocol):
    """prepare: called before each run, outside of its time. run: one completion of each prompt, [B][new tokens] ids.
    with_logprobs: the same, and the log-probabilities that the engine gives with them."""

    def prepare(self) -> None: ...
    def run(self, prompts: Prompts) -> Any: ...
    def with_logprobs(self, prompts: Prompts) -> tuple[Any, Any]: ...
    def close(self) -> None: ...


class Driven:
    """An engine of strop, on an event loop of its own. new_tokens: of each completion, at first the job's."""

    def __init__(self, engine: Any, job: Job) -> None:
        self._engine = engine
        self.new_tokens = job.new_tokens
        self._loop = asyncio.new_event_loop()
        self._version = 0

    def prepare(self) -> None:
        from strop.rollout.engine import WeightUpdate

        self._version += 1
        self._loop.run_until_complete(self._engine.update_weights(WeightUpdate(self._version)))

    def run(self, prompts: Prompts) -> Any:
        return [result.tokens for result in self._sample(prompts)]

    def with_logprobs(self, prompts: Prompts) -> tuple[Any, Any]:
        results = self._sample(prompts)
        return [result.tokens for result in results], [result.logprobs for result in results]

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()

    def _sample(self, prompts: Prompts) -> list[Any]:
        from strop.rollout.engine import SampleRequest, SampleSettings

        settings = SampleSettings(self.new_tokens)

        async def work() -> list[Any]:
            requests = [SampleRequest(tuple(p), settings, (self._version, at)) for at, p in enumerate(prompts)]
            return list(await asyncio.gather(*(self._engine.generate(request) for request in requests)))

        return self._loop.run_until_complete(work())


def chosen_prefill(model: Any, job: Job, engine: str) -> int:
    """Prompt tokens in one pass where the recipe does not say."""
    import torch

    from strop.planning.hardware import Hardware, choose_prefill

    device = torch.device(job.device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return choose_prefill(Hardware(device, model.dtype, job.threads, memory, ()), model.config, engine)


def local(loaded: Any, job: Job, *, compiled: bool = False) -> Driven:
    """strop's own engine, with the sizes that a run on such a card has."""
    from strop.rollout.engines.local import LocalEngine

    end = random_models.EOS
    return Driven(
        LocalEngine(
            loaded.model,
            loaded.tokenizer,
            eos_ids=(end,),
            seed=0,
            context=job.context,
            max_sequences=max(job.sizes),
            prefill_tokens=job.prefill_tokens or chosen_prefill(loaded.model, job, "local"),
            compiled=compiled,
        ),
        job,
    )


def local_compiled(loaded: Any, job: Job) -> Driven:
    """The same with its blocks compiled (`rollout.engine.eager: false`)."""
    return local(loaded, job, compiled=True)


def vllm(loaded: Any, job: Job) -> Driven:
    """strop's engine `vllm`, with CUDA graphs."""
    from strop.rollout.engines.vllm import VllmEngine
    from strop.rollout.engines.vllm_core import VllmCore
    from strop.rollout.engines.vllm_start import VllmSettings

    model = loaded.model
    settings = VllmSettings(
        dtype=model.dtype,
        context=job.context,
        max_sequences=max(job.sizes),
        prefill_tokens=job.prefill_tokens or chosen_prefill(model, job, "vllm"),
        memory=job.memory,
        eager=job.device == "cpu",
        prefix_caching=True,
    )
    engine = VllmEngine(
        model,
        lambda: VllmCore(model.config, type(model).__name__, settings),
        loaded.tokenizer,
        eos_ids=(random_models.EOS,),
        seed=0,
        context=job.context,
    )
    return Driven(engine, job)


class Generate:
    """transformers' `generate`. others: of its settings."""

    def __init__(self, loaded: Any, job: Job, **others: Any) -> None:
        self._model, self._job, self._others = loaded.model, job, others

    def prepare(self) -> None:
        """Nothing: it samples with the module's own weights."""

    def run(self, prompts: Prompts) -> Any:
        import sampling

        return sampling.generate(self._model, prompts, self._job.new_tokens, **self._others).tolist()

    def with_logprobs(self, prompts: Prompts) -> tuple[Any, Any]:
        import sampling
        import torch

        kept = {"return_dict_in_generate": True, "output_logits": True}
        found = sampling.generated(self._model, prompts, self._job.new_tokens, **self._others, **kept)
        tokens = found.sequences[:, self._job.prompt_tokens :]
        given = [
            torch.log_softmax(logits.float(), -1).gather(1, tokens[:, at, None])[:, 0]
            for at, logits in enumerate(found.logits)
        ]
        return tokens.tolist(), torch.stack(given, 1).tolist()

    def close(self) -> None:
        """Nothing is left of it."""


def generate_static(loaded: Any, job: Job) -> Generate:
    return Generate(loaded, job, cache_implementation="static")


SAMPLERS = {
    "local": local,
    "local-compiled": local_compiled,
    "vllm": vllm,
    "generate": Generate,
    "generate-static": generate_static,
}
