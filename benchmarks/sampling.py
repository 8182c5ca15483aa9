"""Sampling speed: strop's `local` engine against transformers' `generate`, with one model in one process.

Both sample exactly the same number of tokens (no end token), at temperature 1, from the whole distribution. `ragged`
has prompts of different length, spread evenly, which `generate` pads on the left; `groups` has few prompts and several
completions of each. The engine's weights are laid out anew in each timed run, as they are after each update of a
training run. `generate` returns no log-probabilities here, the engine always does; `agreement` is their distance to the
trainer's, and `continuous_batching` is transformers' own (`generate_batch`), once.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np

Prompts = list[list[int]]
# transformers' continuous batching: tokens in a page of its cache, and in a forward pass.
PAGE, PASS = 32, 4096


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--group-size", type=int, default=8, help="completions of a prompt in `groups`")
    parser.add_argument("--no-continuous-batching", action="store_true", help="leave out generate_batch")
    parser.add_argument("--side", choices=["continuous"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    if options.smoke:
        options.sequences, options.new_tokens, options.longest, options.group_size, options.repeats = 8, 6, 40, 4, 1
    model, tokenizer = load(smoke=options.smoke)
    cases = make_cases(options, tokenizer)
    if options.side:
        measure.tell(continuous_batching(model, cases["ragged"], options.new_tokens))
        return {}
    keys = ("sequences", "new_tokens", "shortest", "longest", "group_size")
    numbers: dict[str, Any] = {"sizes": {key: getattr(options, key) for key in keys}}
    for name, prompts in cases.items():
        numbers[name] = compare(model, tokenizer, prompts, options)
    some = cases["ragged"][:16]
    numbers["agreement"] = {
        f"temperature_{t}": agreement(model, tokenizer, some, options.new_tokens, t) for t in (0.7, 1.0)
    }
    if not (options.no_continuous_batching or options.smoke):
        numbers["continuous_batching"] = in_a_process(options)
    measure.write("sampling", numbers, options)
    return numbers


def load(*, smoke: bool) -> tuple[Any, Any]:
    """SmolLM2-135M in float32, or a tiny new model."""
    if smoke:
        from strop.config.model import NewModel
        from strop.models.create import create_model

        return create_model(NewModel(hidden_size=32, layers=2, context=128), seed=0)
    from strop.config.model import ModelSettings
    from strop.models.fetch import fetch
    from strop.models.load import load_model

    loaded = load_model(ModelSettings(path=str(fetch("smollm2-135m")), dtype="float32"), device="cpu", seed=0)
    return loaded.model, loaded.tokenizer


def make_cases(options: argparse.Namespace, tokenizer: Any) -> dict[str, Prompts]:
    """The prompts of each case, one for each sequence, in an order that is not that of their length."""
    from texts import prompts_of

    def spread(count: int) -> Prompts:
        lengths = np.linspace(options.shortest, options.longest, count).astype(int)
        return prompts_of(tokenizer, np.random.default_rng(0).permutation(lengths).tolist())

    few = spread(options.sequences // options.group_size)
    return {"ragged": spread(options.sequences), "groups": [p for p in few for _ in range(options.group_size)]}


class Local:
    """The engine, given new weights before each run."""

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0) -> None:
        from strop.rollout.engines.local import LocalEngine

        self._engine = LocalEngine(
            model, tokenizer, eos_ids=(), seed=0, context=model.config.max_position_embeddings, max_sequences=256
        )
        self._temperature = temperature
        self._version = 0

    def run(self, prompts: Prompts, new_tokens: int) -> list[Any]:
        """One `SampleResult` for each prompt."""
        from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate

        settings = SampleSettings(new_tokens, self._temperature)

        async def work() -> list[Any]:
            self._version += 1
            await self._engine.update_weights(WeightUpdate(self._version))
            requests = [SampleRequest(tuple(p), settings, (self._version, at)) for at, p in enumerate(prompts)]
            return list(await asyncio.gather(*(self._engine.generate(request) for request in requests)))

        return asyncio.run(work())


def generate(model: Any, prompts: Prompts, new_tokens: int, **others: Any) -> Any:
    """[B, new_tokens] ids from `generated`."""
    return generated(model, prompts, new_tokens, **others)[:, max(len(prompt) for prompt in prompts) :]


def generated(model: Any, prompts: Prompts, new_tokens: int, **others: Any) -> Any:
    """What transformers' `generate` returns, prompts padded on the left. others: of its settings."""
    import torch
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    # None would be filled from the model's own settings.
    model.generation_config.eos_token_id = None
    whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, use_cache=True, **whole, **others)
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)


def compare(model: Any, tokenizer: Any, prompts: Prompts, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of both sides, in turn."""
    engine, tokens = Local(model, tokenizer), options.new_tokens
    engine.run(prompts[:4], 2)
    generate(model, prompts[:4], 2)

    def ours() -> float:
        started = time.perf_counter()
        results = engine.run(prompts, tokens)
        seconds = time.perf_counter() - started
        assert all(len(result.tokens) == tokens for result in results)
        return seconds

    def theirs() -> float:
        started = time.perf_counter()
        found = generate(model, prompts, tokens)
        seconds = time.perf_counter() - started
        assert tuple(found.shape) == (len(prompts), tokens)
        return seconds

    seconds = measure.interleaved({"local": ours, "generate": theirs}, options.repeats)
    rates = {side: len(prompts) * tokens / measure.median(times) for side, times in seconds.items()}
    return {
        "tokens_per_second": rates,
        "ratio": rates["local"] / rates["generate"],
        "ratio_of_each_repeat": [b / a for a, b in zip(seconds["local"], seconds["generate"], strict=True)],
        "seconds": seconds,
        "prompt_tokens": sum(len(prompt) for prompt in prompts),
    }


def agreement(model: Any, tokenizer: Any, prompts: Prompts, new_tokens: int, temperature: float) -> dict[str, float]:
    """Distance of the engine's log-probabilities to those that the trainer computes for the same tokens."""
    results = Local(model, tokenizer, temperature).run(prompts, new_tokens)
    return distance(model, prompts, [r.tokens for r in results], [r.logprobs for r in results], temperature)


def distance(
    model: Any, prompts: Prompts, tokens: Sequence[list[int]], logprobs: Sequence[list[float]], temperature: float
) -> dict[str, float]:
    """Mean and largest absolute difference, in nats, to `score_streams`."""
    from strop.models.forward import score_streams

    gaps = []
    for prompt, sampled, given in zip(prompts, tokens, logprobs, strict=True):
        (scored,) = score_streams(model, [np.asarray([*prompt, *sampled])], temperature=temperature)
        gaps.append(np.abs(scored[len(prompt) :] - np.asarray(given, dtype=np.float32)))
    flat = np.concatenate(gaps)
    return {"mean": float(flat.mean()), "max": float(flat.max()), "tokens": len(flat)}


def in_a_process(options: argparse.Namespace) -> dict[str, Any]:
    """transformers' continuous batching on its own: it runs a thread, which may not end when something is wrong."""
    sizes = ("sequences", "new_tokens", "shortest", "longest", "threads")
    arguments = [f"--{size.replace('_', '-')}={getattr(options, size)}" for size in sizes]
    try:
        arguments.append("--side=continuous")
        return measure.fresh_process(Path(__file__), arguments, threads=options.threads, timeout=600)
    except RuntimeError as error:
        return {"failed": str(error)[-1500:]}


def continuous_batching(model: Any, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
    """Speed of `generate_batch`, whether it gives log-probabilities, and whether a draw depends on its neighbours."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def run(chosen: Prompts, tokens: int) -> list[Any]:
        settings = GenerationConfig(
            max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
        )
        # Left alone it sizes its cache by the memory of the whole machine, and is slower.
        pages = sum(-(-(len(prompt) + tokens) // PAGE) + 1 for prompt in chosen)
        batching = ContinuousBatchingConfig(
            return_logprobs=True, seed=0, page_size=PAGE, num_blocks=pages, max_batch_tokens=PASS
        )
        found = model.generate_batch(chosen, generation_config=settings, continuous_batching_config=batching)
        # Results come in the order in which they ended.
        by_prompt = {tuple(output.prompt_ids): output for output in found.values()}
        return [by_prompt[tuple(prompt)] for prompt in chosen]

    run(prompts[:4], 2)
    started = time.perf_counter()
    outputs = run(prompts, new_tokens)
    seconds = time.perf_counter() - started
    sampled = [list(output.generated_tokens) for output in outputs]
    given = [list(output.logprobs or []) for output in outputs]
    has = all(len(g) == len(s) for g, s in zip(given, sampled, strict=True))
    alone = run(prompts[:1], new_tokens)[0].generated_tokens
    total = sum(len(s) for s in sampled)
    return {
        "tokens_per_second": total / seconds,
        "tokens": total,
        "gives_logprobs": has,
        "agreement": distance(model, prompts[:16], sampled[:16], given[:16], 1.0) if has else None,
        "draws_depend_on_the_batch": list(alone) != sampled[0],
    }


if __name__ == "__main__":
    main()
