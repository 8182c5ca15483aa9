"""What is lost where a teacher's distribution is told by its K likeliest tokens and a tail, and the bytes of a file.

Teacher and student are SmolLM2-135M, the student with noise on every matrix, of a share of that matrix's own deviation.
The texts are this repository's pages. For each K: the teacher's probability of the K (`coverage`), each divergence as a
share of that of whole distributions, how far the gradient of the student's logits is from that of whole distributions
(`gradient_error`, relative to its norm), the same after a file has rounded to float16, and the bytes of a token in it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure

KINDS = ("forward_kl", "reverse_kl", "jensen_shannon")
LENGTH = 256


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--k", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.3], help="shares of a matrix's deviation")
    options = parser.parse_args(argv)
    measure.use_threads(options.threads)
    if options.smoke:
        options.tokens, options.k, options.noise, options.repeats = 128, [4, 16], [0.3], 1
    teacher, tokenizer = load(options.smoke)
    streams = texts(tokenizer, options.tokens, teacher.config.max_position_embeddings)
    numbers: dict[str, Any] = {
        "shape": {"tokens": sum(len(s) - 1 for s in streams), "vocabulary": teacher.config.vocab_size},
        "files": files(teacher, streams, options.k),
        "seconds": seconds(teacher, options),
    }
    for share in options.noise:
        numbers[f"noise_{share}"] = losses(teacher, noisy(teacher, share), streams, options.k)
    measure.write("distillation", numbers, options)
    return numbers


def load(smoke: bool) -> tuple[Any, Any]:
    """The teacher and its tokenizer; for a smoke run a new model of the width of a hand."""
    import torch

    from strop.config.model import ModelSettings, NewModel
    from strop.models.fetch import KNOWN, fetch
    from strop.models.load import load_model

    if smoke:
        characters = "".join(chr(code) for code in range(32, 127))
        settings = ModelSettings(create=NewModel(characters=characters, hidden_size=32, layers=1, heads=2))
    else:
        settings = ModelSettings(path=str(fetch(next(iter(KNOWN)))))
    loaded = load_model(settings, device="cpu", dtype=torch.float32, seed=0)
    if smoke:
        with torch.no_grad():
            loaded.model.get_output_embeddings().weight.mul_(20)
    return loaded.model, loaded.tokenizer


def texts(tokenizer: Any, tokens: int, longest: int) -> list[Any]:
    """Token ids of this repository's pages, cut into streams."""
    import numpy as np

    pages = sorted((measure.ROOT / "docs").glob("*.md"))
    ids: list[int] = []
    for page in pages:
        ids += tokenizer(page.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    length = min(LENGTH, longest, tokens)
    # From all over the pages, not from the first alone.
    starts = range(0, len(ids) - length, max(1, (len(ids) - length) // max(1, tokens // length)))
    return [np.asarray(ids[start : start + length]) for start in list(starts)[: tokens // length]]


def noisy(model: Any, share: float) -> Any:
    """A copy with noise on every matrix."""
    import copy

    import torch

    draw = torch.Generator().manual_seed(0)
    student = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.ndim == 2:
                parameter += share * parameter.std() * torch.randn(parameter.shape, generator=draw)
    return student


def logits_of(model: Any, stream: Any) -> Any:
    """[L - 1, V] of a stream, that of each token but the first."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(stream)[None]).logits[0, :-1].float()


def losses(teacher: Any, student: Any, streams: list[Any], ks: list[int]) -> dict[str, Any]:
    """For each K and kind, sums over all positions."""
    import torch

    from strop.algorithms.distillation import event_divergence

    sums: dict[str, dict[str, float]] = {}

    def add(row: str, name: str, value: float) -> None:
        sums.setdefault(row, {}).setdefault(name, 0.0)
        sums[row][name] += value

    positions = 0
    for stream in streams:
        q, p_logits = logits_of(teacher, stream).log_softmax(-1), logits_of(student, stream)
        positions += len(q)
        order = q.argsort(-1, descending=True)
        for kind in KINDS:
            logits = p_logits.clone().requires_grad_()
            whole = event_divergence(logits.log_softmax(-1), q, kind).sum()
            (gradient,) = torch.autograd.grad(whole, logits)
            add("whole", kind, float(whole.detach()))
            add("whole", f"{kind} gradient", float(gradient.square().sum()))
            for k in ks:
                told = events(q, order[:, :k])
                for row, teacher_says in ((str(k), told), (f"{k} float16", rounded(told))):
                    logits = p_logits.clone().requires_grad_()
                    loss = event_divergence(events(logits.log_softmax(-1), order[:, :k]), teacher_says, kind).sum()
                    (mine,) = torch.autograd.grad(loss, logits)
                    add(row, kind, float(loss.detach()))
                    add(row, f"{kind} gradient", float((mine - gradient).square().sum()))
                if kind == KINDS[0]:
                    add(str(k), "coverage", float((1 - told[:, -1].exp()).sum()))
    whole_sums = sums.pop("whole")
    found: dict[str, Any] = {"divergence": {kind: whole_sums[kind] / positions for kind in KINDS}}
    for row, values in sums.items():
        found[row] = {
            kind: {
                "share_of_whole": values[kind] / whole_sums[kind],
                "gradient_error": (values[f"{kind} gradient"] / whole_sums[f"{kind} gradient"]) ** 0.5,
            }
            for kind in KINDS
        }
        if "coverage" in values:
            found[row]["coverage"] = values["coverage"] / positions
    return found


def events(logprobs: Any, ids: Any) -> Any:
    """[N, K + 1]: the chosen tokens and all others."""
    import torch

    others = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], 1)


def rounded(told: Any) -> Any:
    """As a file of targets gives it back."""
    kept = told.half().float()
    return kept - kept.logsumexp(-1, keepdim=True)


def files(teacher: Any, streams: list[Any], ks: list[int]) -> dict[str, float]:
    """Bytes of a token in a file of targets, for each K."""
    import torch

    from strop.data.targets import TargetsHeader, TargetsWriter

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for k in ks:
            path = Path(folder) / f"{k}.parquet"
            header = TargetsHeader(k, 1.0, teacher.config.vocab_size, tokenizer="", teachers=())
            with TargetsWriter(path, header) as writer:
                for number, stream in enumerate(streams):
                    q = logits_of(teacher, stream).log_softmax(-1)
                    ids = q.topk(k, -1).indices
                    writer.add(number, ids.to(torch.int32).numpy(), events(q, ids).numpy())
            found[str(k)] = path.stat().st_size / writer.tokens
    return found


def seconds(teacher: Any, options: argparse.Namespace) -> dict[str, float]:
    """Forward and backward over the output head: of one log-probability a token, and of 64 and their tail as well."""
    import torch

    from strop.models.logprobs import linear_logprobs
    from strop.models.topk_logprobs import linear_topk_logprobs

    draw = torch.Generator().manual_seed(0)
    vocabulary, width = teacher.get_output_embeddings().weight.shape
    hidden = torch.randn(options.tokens, width, generator=draw).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) * width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (options.tokens,), generator=draw)
    ids = torch.stack([torch.randperm(vocabulary, generator=draw)[:64] for _ in range(options.tokens)])

    def timed(function: Any) -> float:
        started = time.perf_counter()
        function().sum().backward()
        return time.perf_counter() - started

    sides = {
        "logprobs": lambda: timed(lambda: linear_logprobs(hidden, weight, targets)[0]),
        "topk": lambda: timed(lambda: linear_topk_logprobs(hidden, weight, targets, ids)[1]),
    }
    return {name: measure.median(runs) for name, runs in measure.interleaved(sides, options.repeats).items()}


if __name__ == "__main__":
    main()
