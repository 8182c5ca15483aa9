"""Peak memory and time of log-probabilities, forward and backward: in chunks, against all logits at once.

Both sides compute log_softmax(hidden @ weight.T)[target] for each token and its gradients, each in a process of its
own. `peak` is what the process's resident memory rose by from the inputs to its highest point, gradients included.
`trained_head` also takes the gradient of the output head; `frozen_head` (adapters elsewhere) does not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
import numpy as np

SIDES = ("chunked", "materialised")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--chunk", type=int, default=512, help="rows whose logits exist at a time")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--frozen-head", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        measure_side(options)
        return {}
    if options.smoke:
        options.tokens, options.hidden, options.vocabulary, options.chunk, options.repeats = 64, 32, 4096, 16, 1
    shape = {name: getattr(options, name) for name in ("tokens", "hidden", "vocabulary", "chunk")}
    numbers: dict[str, Any] = {"shape": shape, "trained_head": compare(options, frozen=False)}
    if not options.smoke:
        numbers["frozen_head"] = compare(options, frozen=True)
    measure.write("logprob_memory", numbers, options)
    return numbers


def compare(options: argparse.Namespace, *, frozen: bool) -> dict[str, Any]:
    """Both sides, each repeat in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:

        def run(side: str) -> dict[str, Any]:
            arguments = [f"--{name}={getattr(options, name)}" for name in ("tokens", "hidden", "vocabulary", "chunk")]
            arguments += [f"--side={side}", f"--threads={options.threads}", f"--gradients={folder}/{side}.npz"]
            arguments += ["--frozen-head"] if frozen else []
            return measure.fresh_process(Path(__file__), arguments, threads=options.threads)

        found = measure.interleaved({side: lambda side=side: run(side) for side in SIDES}, options.repeats)
        a, b = (np.load(f"{folder}/{side}.npz") for side in SIDES)
        difference = {name: float(np.abs(a[name] - b[name]).max()) for name in a.files}
        largest = {name: float(np.abs(b[name]).max()) for name in b.files}
    summary: dict[str, Any] = {
        side: {
            "peak_mib": round(measure.median([r["peak"] for r in runs]) / 2**20, 1),
            "seconds": measure.median([r["seconds"] for r in runs]),
        }
        for side, runs in found.items()
    }
    mine, theirs = (summary[side] for side in SIDES)
    return summary | {
        "peak_ratio": theirs["peak_mib"] / max(mine["peak_mib"], 0.1),
        "time_ratio": theirs["seconds"] / mine["seconds"],
        "largest_difference": difference,
        "largest_value": largest,
    }


def measure_side(options: argparse.Namespace) -> None:
    """One side in this process: tells its peak and seconds, and leaves its gradients in a file."""
    measure.use_threads(options.threads)
    import torch

    from strop.models.logprobs import linear_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, generator=generator).mul_(options.hidden**-0.5)
    weight.requires_grad_(not options.frozen_head)
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=generator)
    scale = torch.randn(options.tokens, generator=generator)

    def pass_over(rows: int) -> torch.Tensor:
        if options.side == "chunked":
            values, _ = linear_logprobs(hidden[:rows], weight, targets[:rows], chunk=options.chunk)
        else:
            logits = hidden[:rows] @ weight.T
            values = torch.log_softmax(logits, -1).gather(1, targets[:rows, None])[:, 0]
        (values * scale[:rows]).sum().backward()
        return values.detach()

    pass_over(8)  # what the libraries load and set aside at first use is not the subject
    hidden.grad = weight.grad = None
    before = measure.resident_bytes()
    measure.forget_peak()
    started = time.perf_counter()
    values = pass_over(options.tokens)
    seconds = time.perf_counter() - started
    measure.tell({"peak": measure.peak_bytes() - before, "seconds": seconds})
    gradients = {"hidden": hidden.grad, "weight": weight.grad}
    arrays = {f"gradient_{name}": grad.numpy() for name, grad in gradients.items() if grad is not None}
    np.savez(options.gradients, logprobs=values.numpy(), **arrays)


if __name__ == "__main__":
    main()
