"""Packing: forward and backward over ragged sequences on SmolLM2-135M, float32, against padding and masking.

All sides take the gradient of the same weighted sum of log-probabilities through the same chunked head, so only the
model's own pass differs. `padded` is a batch padded on the right through transformers' sdpa attention, `block_mask` one
row with a mask of T x T, `packed` strop's row, and `shared` the same row with the prompt of a group computed once. A
timed run holds the layout, the forward and the backward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import measure
import numpy as np
from sampling import load
from texts import prompts_of


@dataclass
class Case:
    """Sequences of token ids; log-probabilities are wanted from `heads[i]` on, in groups of equal heads."""

    streams: list[np.ndarray]
    heads: list[int]
    sides: tuple[str, ...]

    @property
    def wanted(self) -> list[np.ndarray]:
        return [np.arange(len(s)) >= head for s, head in zip(self.streams, self.heads, strict=True)]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--sequences", type=int, default=24, help="sequences of the ragged case")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest of them")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the group case, of some 100 tokens")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each, of 20 to 64 tokens")
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    if options.smoke:
        options.sequences, options.longest, options.prompts, options.group_size, options.repeats = 6, 40, 2, 3, 1
    model, tokenizer = load(smoke=options.smoke)
    cases = {"ragged": ragged(options, tokenizer), "groups": groups(options, tokenizer)}
    numbers = {name: compare(model, case, options.repeats) for name, case in cases.items()}
    measure.write("packing", numbers, options)
    return numbers


def ragged(options: argparse.Namespace, tokenizer: Any) -> Case:
    """Sequences of lengths spread evenly from 8 tokens to the longest."""
    lengths = np.linspace(8, options.longest, options.sequences).astype(int)
    ids = prompts_of(tokenizer, np.random.default_rng(0).permutation(lengths).tolist())
    return Case([np.asarray(i) for i in ids], [1] * len(ids), ("padded", "block_mask", "packed"))


def groups(options: argparse.Namespace, tokenizer: Any) -> Case:
    """Groups of completions of one prompt each."""
    generator = np.random.default_rng(0)
    base = 16 if options.smoke else 100
    streams, heads = [], []
    for prompt in prompts_of(tokenizer, (base + generator.integers(-8, 9, options.prompts)).tolist()):
        lengths = generator.integers(20, 65, options.group_size)
        for completion in prompts_of(tokenizer, lengths.tolist(), seed=1):
            streams.append(np.asarray([*prompt, *completion]))
            heads.append(len(prompt))
    return Case(streams, heads, ("padded", "packed", "shared"))


def compare(model: Any, case: Case, repeats: int) -> dict[str, Any]:
    """Seconds of each side in turn, their ratios, and how far log-probabilities and gradients are from `padded`."""
    import torch

    run: dict[str, Callable[[], Any]] = {
        "padded": lambda: padded(model, case),
        "block_mask": lambda: block_mask(model, case),
        "packed": lambda: packed(model, case, shared=False),
        "shared": lambda: packed(model, case, shared=True),
    }
    count = sum(int(mask.sum()) for mask in case.wanted)
    # Small, as advantages over a batch are, so that gradients have the size that they have in training.
    scale = torch.randn(count, generator=torch.Generator().manual_seed(0)) / count
    differences = {}
    expected: tuple[Any, Any] | None = None
    for side in case.sides:  # the warm-up, and the comparison
        model.zero_grad(set_to_none=True)
        values = run[side]()(scale)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        if expected is None:
            expected = values, gradient
            continue
        differences[side] = {
            "logprobs_max": float((values - expected[0]).abs().max()),
            "gradients_max": float((gradient - expected[1]).abs().max()),
            "gradients_relative": float((gradient - expected[1]).norm() / expected[1].norm()),
        }
    del expected, gradient

    def timed(side: str) -> float:
        model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        run[side]()(scale)
        return time.perf_counter() - started

    seconds = measure.interleaved({side: lambda side=side: timed(side) for side in case.sides}, repeats)
    medians = {side: measure.median(times) for side, times in seconds.items()}
    lengths = [len(s) for s in case.streams]
    return {
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "padded_tokens": len(lengths) * max(lengths),
        "seconds": medians,
        "speed_up_over_padded": {side: medians["padded"] / medians[side] for side in case.sides[1:]},
        "difference_to_padded": differences,
        "seconds_of_each_repeat": seconds,
    }


# Each side lays out the batch and runs the model; what it returns takes the scale of each log-probability, runs the
# backward pass and gives the log-probabilities [N].


def padded(model: Any, case: Case) -> Callable[[Any], Any]:
    """A batch padded on the right."""
    import torch

    longest = max(len(s) for s in case.streams)
    ids = torch.zeros(len(case.streams), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, stream in enumerate(case.streams):
        ids[row, : len(stream)] = torch.from_numpy(stream)
        mask[row, : len(stream)] = 1
    places = [row * longest + np.flatnonzero(wanted) for row, wanted in enumerate(case.wanted)]
    return _finish(model, {"input_ids": ids, "attention_mask": mask}, np.concatenate(places))


def block_mask(model: Any, case: Case) -> Callable[[Any], Any]:
    """One row, with a mask that lets each token see the earlier ones of its own sequence."""
    import torch

    owner = torch.from_numpy(np.repeat(np.arange(len(case.streams)), [len(s) for s in case.streams]))
    mask = torch.tril(owner[:, None] == owner[None])[None, None]
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate(case.streams))[None],
        "position_ids": torch.from_numpy(np.concatenate([np.arange(len(s)) for s in case.streams]))[None],
        "attention_mask": mask,
    }
    return _finish(model, inputs, np.flatnonzero(np.concatenate(case.wanted)))


def _finish(model: Any, inputs: dict[str, Any], places: np.ndarray) -> Callable[[Any], Any]:
    """places: [N] of the wanted tokens in the flattened ids."""
    import torch

    from strop.models.forward import backbone
    from strop.models.logprobs import linear_logprobs, output_head

    hidden = backbone(model)(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    targets = inputs["input_ids"].flatten()[places]
    weight, bias, _ = output_head(model)
    values, _ = linear_logprobs(hidden.index_select(0, torch.from_numpy(places - 1)), weight, targets, bias=bias)

    def backward(scale: Any) -> Any:
        (values * scale).sum().backward()
        return values.detach()

    return backward


def packed(model: Any, case: Case, *, shared: bool) -> Callable[[Any], Any]:
    """strop's row."""
    import torch

    from strop.models.attention import running
    from strop.models.forward import packed_inputs, packed_logprobs
    from strop.models.layout import pack

    layout = pack(case.streams, case.heads if shared else None)
    inputs = packed_inputs(layout, case.wanted, torch.device("cpu"))

    def both(scale: Any) -> Any:
        with running(model, inputs.attention):
            values, _ = packed_logprobs(model, inputs)
            (values * scale).sum().backward()
        return values.detach()

    return both


if __name__ == "__main__":
    main()
