"""What the consistent mode costs: tokens a second of the `local` engine and of the trainer, with it and without.

Both modes sample the same requests with the same weights and train what they sampled, in turn in one process; nothing
is compiled in either. `mismatch` is the distance of the noted log-probabilities to the trainer's, in nats. The model of
recipes/quickstart.yaml is for a CPU; on a GPU: `--shape qwen3-0.6b --dtype bfloat16 --sequences 256 --prompt 128
--new-tokens 512 --budget 16384`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

import measure
import numpy as np


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--shape", choices=["quickstart", "tiny", "qwen3-0.6b", "qwen3-4b"], default="quickstart")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sequences", type=int, default=64, help="sampled together, in groups of four")
    parser.add_argument("--prompt", type=int, default=12, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a pass of the trainer")
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    if options.smoke:
        options.shape, options.sequences, options.prompt, options.new_tokens, options.repeats = "tiny", 8, 6, 5, 1
    import card

    modes = {name: Mode(options, consistent=name == "consistent") for name in ("ordinary", "consistent")}
    for mode in modes.values():
        mode.run()
    rounds = measure.interleaved({name: mode.run for name, mode in modes.items()}, options.repeats)
    keys = ("shape", "dtype", "sequences", "prompt", "new_tokens", "budget")
    numbers: dict[str, Any] = {"card": card.name(), "sizes": {key: getattr(options, key) for key in keys}}
    for name, found in rounds.items():
        numbers[name] = {key: measure.median([one[key] for one in found]) for key in found[0]}
        numbers[name]["each"] = found
    for what in ("sampling_tokens_per_second", "training_tokens_per_second"):
        numbers[f"times_as_long_{what.partition('_')[0]}"] = numbers["ordinary"][what] / numbers["consistent"][what]
    measure.write("consistent", numbers, options)
    return numbers


class Mode:
    """A model, its engine and its trainer, in one of the two modes."""

    def __init__(self, options: argparse.Namespace, *, consistent: bool) -> None:
        import torch

        from strop.algorithms.named import build_algorithm
        from strop.config.training import OptimizerSettings
        from strop.models.consistent_mode import make_consistent
        from strop.rollout.engines.local import LocalEngine
        from strop.training.single import SingleDeviceTrainer

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = made(options).to(device, getattr(torch, options.dtype)).eval()
        if consistent:
            make_consistent(model)
        self._options, self._model = options, model
        self._vocabulary = int(model.config.vocab_size)
        context = options.prompt + options.new_tokens
        self._engine = LocalEngine(model, None, eos_ids=(), seed=0, context=context, max_sequences=options.sequences)
        self._objective = build_algorithm("grpo", group_size=4, max_new_tokens=options.new_tokens)
        # At a rate at which no weight moves, so that every round has the same work.
        settings = OptimizerSettings(learning_rate=1e-12, schedule="constant", warmup_steps=0)
        self._trainer = SingleDeviceTrainer(model, settings, total_updates=1000, budget=options.budget)
        self._version = 0

    def run(self) -> dict[str, float]:
        """One round: sample, then train what was sampled."""
        import card

        from strop.training.batching import token_batch

        card.wait()
        started = time.perf_counter()
        streams = asyncio.run(self._sample())
        card.wait()
        sampled = time.perf_counter()
        count = len(streams)
        batch = token_batch(
            streams,
            rewards=[float(at % 3) for at in range(count)],
            group_ids=[at // 4 for at in range(count)],
            truncated=[False] * count,
        )
        batch.advantages = self._objective.advantages(batch)
        begun = time.perf_counter()
        stats = self._trainer.update(batch, self._objective)
        card.wait()
        ended = time.perf_counter()
        options = self._options
        return {
            "sampling_tokens_per_second": count * options.new_tokens / (sampled - started),
            "training_tokens_per_second": count * (options.prompt + options.new_tokens) / (ended - begun),
            "mismatch_mean": stats["mismatch/mean"],
            "mismatch_max": stats["mismatch/max"],
        }

    async def _sample(self) -> list[Stream]:
        from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate

        self._version += 1
        await self._engine.update_weights(WeightUpdate(self._version))
        random = np.random.default_rng(0)
        options = self._options
        prompts = random.integers(3, self._vocabulary, (-(-options.sequences // 4), options.prompt))
        requests = [
            SampleRequest(tuple(prompts[at // 4].tolist()), SampleSettings(options.new_tokens), (at,))
            for at in range(options.sequences)
        ]
        found = await asyncio.gather(*(self._engine.generate(request) for request in requests))
        return [Stream(request.tokens, result) for request, result in zip(requests, found, strict=True)]


class Stream:
    """A prompt and its completion, as a trainer takes them."""

    def __init__(self, prompt: Sequence[int], result: Any) -> None:
        before, after = len(prompt), len(result.tokens)
        self.tokens = np.array([*prompt, *result.tokens], dtype=np.int64)
        self.loss_mask = np.arange(before + after) >= before
        self.logprobs = np.concatenate([np.full(before, np.nan), result.logprobs]).astype(np.float32)
        self.versions = np.where(self.loss_mask, 0, -1)


def made(options: argparse.Namespace) -> Any:
    """A model with random weights, the same each time."""
    context = options.prompt + options.new_tokens
    if options.shape == "quickstart":
        from strop.config.loading import load_config
        from strop.models.create import create_model

        settings = load_config(measure.ROOT / "recipes" / "quickstart.yaml").model.create
        assert settings is not None
        return create_model(settings.model_copy(update={"context": context}), seed=0)[0]
    import random_models
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(random_models.config(options.shape, context))


if __name__ == "__main__":
    main()
