"""Chunked log-probabilities of a few tokens and their tail, against whole distributions in float64; and mixtures."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.distillation import event_divergence, mixture
from strop.models.logprobs import linear_logprobs
from strop.models.topk_logprobs import TeacherRows, linear_topk_logprobs, mixture_topk

ROWS, HIDDEN, VOCABULARY, K = 7, 5, 23, 4


def inputs(*, dtype: torch.dtype = torch.float64, rows: int = ROWS, k: int = K) -> list[Tensor]:
    """hidden [N, H], weight [V, H], bias [V], targets [N], ids [N, K]."""
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=draw, dtype=torch.float64) * 2
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (rows,), generator=draw)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=draw)[:k] for _ in range(rows)])
    return [*(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), targets, ids]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor, softcap: float | None) -> Tensor:
    logits = hidden.double() @ weight.double().T + bias.double()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, ids: Tensor, first: float, second: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by whole distributions: the tail is one less the sum of the chosen tokens, taken token by token."""
    logits = logits_of(hidden, weight, bias, softcap)
    logp = (logits / first).log_softmax(-1)
    events = (logits / second).log_softmax(-1)
    others = torch.ones_like(logits).scatter(1, ids, 0.0)
    tail = (events.exp() * others).sum(-1, keepdim=True).log()
    topk = torch.cat([events.gather(1, ids), tail], 1)
    return logp.gather(1, targets[:, None])[:, 0], topk, -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (0.7, 0.7), (1.0, 2.5)])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
def test_values_and_gradients_are_those_of_whole_distributions(
    first: float, second: float, softcap: float | None, chunk: int, entropy: Any
) -> None:
    hidden, weight, bias, targets, ids = inputs()
    found = linear_topk_logprobs(
        hidden, weight, targets, ids, bias=bias, temperature=first, topk_temperature=second, softcap=softcap,
        chunk=chunk, entropy=entropy,
    )  # fmt: skip
    expected = plain(hidden, weight, bias, targets, ids, first, second, softcap)
    draw = torch.Generator().manual_seed(9)
    ours = theirs = torch.zeros((), dtype=torch.float64)
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        if number == 2 and entropy != "graph":
            assert not mine.requires_grad
            torch.testing.assert_close(mine, other.detach() if entropy == "value" else torch.zeros_like(other))
            continue
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)
        up = torch.randn(mine.shape, generator=draw, dtype=torch.float64)
        ours, theirs = ours + (mine * up).sum(), theirs + (other * up).sum()
    leaves = [hidden, weight, bias]
    for got, want in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


def test_gradcheck() -> None:
    hidden, weight, bias, targets, ids = inputs(rows=3)

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return linear_topk_logprobs(
            leaves[0], leaves[1], targets, ids, bias=leaves[2], topk_temperature=1.7, chunk=2, entropy="graph"
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_all_tokens_give_the_divergence_of_whole_distributions(kind: Any) -> None:
    """With every token told apart there is no tail, and value and gradient are those of the plain formula."""
    hidden, weight, bias, targets, ids = inputs(k=VOCABULARY)
    teacher = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teacher = teacher.log_softmax(-1)
    _, topk, _ = linear_topk_logprobs(hidden, weight, targets, ids, bias=bias, chunk=3)
    assert bool((topk[:, -1] == -torch.inf).all())
    told = torch.cat([teacher.gather(1, ids), torch.full((ROWS, 1), -torch.inf, dtype=torch.float64)], 1)
    ours = event_divergence(topk, told, kind, beta=0.3).sum()
    p, q = logits_of(hidden, weight, bias, None).log_softmax(-1), teacher
    theirs = {
        "forward_kl": lambda: (q.exp() * (q - p)).sum(),
        "reverse_kl": lambda: (p.exp() * (p - q)).sum(),
        "jensen_shannon": lambda: _jsd(p, q, 0.3),
    }[kind]()
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    leaves = [hidden, weight, bias]
    for got, want in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


def _jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    middle = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return beta * (q.exp() * (q - middle)).sum() + (1 - beta) * (p.exp() * (p - middle)).sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_of_events_alone_needs_no_gradient_of_the_targets(frozen: bool) -> None:
    hidden, weight, bias, targets, ids = inputs()
    if frozen:
        weight, bias = weight.detach(), bias.detach()
    up = torch.randn(ROWS, K + 1, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    _, topk, _ = linear_topk_logprobs(hidden, weight, targets, ids, bias=bias, chunk=3, entropy="value")
    expected = plain(hidden, weight, bias, targets, ids, 1.0, 1.0, None)[1]
    ours, theirs = (torch.autograd.grad((x * up).sum(), hidden)[0] for x in (topk, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def test_the_targets_are_what_linear_logprobs_gives() -> None:
    hidden, weight, bias, targets, ids = inputs(dtype=torch.float32)
    hits, others, agreement = torch.zeros(ROWS), torch.zeros(ROWS), torch.zeros(ROWS)
    mine = linear_topk_logprobs(
        hidden, weight, targets, ids, bias=bias, temperature=0.7, chunk=3, entropy="value", hits=hits,
        agreement=agreement,
    )  # fmt: skip
    theirs = linear_logprobs(hidden, weight, targets, bias=bias, temperature=0.7, entropy="value", hits=others)
    assert mine[0].dtype == mine[1].dtype == torch.float32
    torch.testing.assert_close(mine[0], theirs[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mine[2], theirs[1], atol=1e-6, rtol=1e-6)
    assert torch.equal(hits, others)
    best = logits_of(hidden, weight, bias, None).argmax(-1)
    assert torch.equal(agreement, (best == ids[:, 0]).float())
    assert torch.equal(hits, (best == targets).float())


def test_bfloat16_in_float32_out() -> None:
    hidden, weight, bias, targets, ids = inputs(dtype=torch.bfloat16)
    _, topk, _ = linear_topk_logprobs(hidden, weight, targets, ids, bias=bias, chunk=3)
    assert topk.dtype == torch.float32
    expected = plain(hidden, weight, bias, targets, ids, 1.0, 1.0, None)[1]
    # The logits are rounded to bfloat16 once (8 bits); nothing after that may round again.
    assert float((topk - expected).detach().abs().max()) < 0.1
    found = torch.autograd.grad(topk.sum(), [hidden, weight])
    wanted = torch.autograd.grad(expected.sum(), [hidden, weight])
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 17), st.integers(1, 20), st.integers(1, VOCABULARY))
def test_chunks_do_not_matter_and_events_are_a_distribution(rows: int, chunk: int, k: int) -> None:
    hidden, weight, bias, targets, ids = inputs(rows=rows, k=k)
    whole = linear_topk_logprobs(hidden, weight, targets, ids, bias=bias)[1]
    parts = linear_topk_logprobs(hidden, weight, targets, ids, bias=bias, chunk=chunk)[1]
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(rows, dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_tail_of_almost_nothing_keeps_its_digits() -> None:
    """One less the sum of the others would be 0 here."""
    weight = torch.tensor([[40.0], [0.0], [-1.0]], requires_grad=True)
    hidden = torch.ones(1, 1, requires_grad=True)
    _, topk, _ = linear_topk_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([[0]]))
    expected = torch.logsumexp(torch.tensor([-40.0, -41.0]), 0)
    assert float(topk[0, 1].detach()) == pytest.approx(float(expected), abs=1e-5)
    topk[0, 1].backward()
    assert hidden.grad is not None
    share = float(torch.sigmoid(torch.tensor(1.0)))
    assert float(hidden.grad) == pytest.approx(share - 41.0, abs=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_no_rows(frozen: bool) -> None:
    hidden, weight, bias, targets, ids = inputs(rows=1)
    hidden, targets, ids = hidden.detach()[:0].requires_grad_(), targets[:0], ids[:0]
    weight = weight.detach().requires_grad_(not frozen)
    logprobs, topk, _ = linear_topk_logprobs(hidden, weight, targets, ids, bias=bias)
    assert logprobs.shape == (0,)
    assert topk.shape == (0, K + 1)
    topk.sum().backward()
    assert hidden.grad is not None
    assert frozen or (weight.grad is not None and bool((weight.grad == 0).all()))


@pytest.mark.parametrize("temperatures", [(0.0, 1.0), (1.0, -1.0)])
def test_a_temperature_that_makes_no_sense_is_refused(temperatures: tuple[float, float]) -> None:
    hidden, weight, bias, targets, ids = inputs()
    with pytest.raises(ValueError, match="temperatures"):
        linear_topk_logprobs(
            hidden, weight, targets, ids, bias=bias, temperature=temperatures[0], topk_temperature=temperatures[1]
        )


# --- teachers ------------------------------------------------------------------------------------------------------


def teachers(shares: list[float]) -> list[TeacherRows]:
    """Teachers of other widths; all but the first have more rows than the tokenizer knows tokens."""
    found = []
    for number, share in enumerate(shares):
        draw = torch.Generator().manual_seed(number)
        width, rows = 4 + number, VOCABULARY + 3 * number
        hidden, weight = torch.randn(ROWS, width, generator=draw), torch.randn(rows, width, generator=draw)
        found.append(TeacherRows(hidden, weight, torch.randn(rows, generator=draw), 3.0 if number else None, share))
    return found


@pytest.mark.parametrize("shares", [[1.0], [0.25, 0.75], [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("chunk", [2, 512])
@pytest.mark.parametrize("k", [5, VOCABULARY, 100])
def test_the_likeliest_of_a_mixture_are_exact(shares: list[float], chunk: int, k: int) -> None:
    rows = teachers(shares)
    targets = torch.arange(ROWS)
    ids, topk, logprobs = mixture_topk(rows, k, targets=targets, vocabulary=VOCABULARY, temperature=1.5, chunk=chunk)
    mixed = torch.zeros(ROWS, VOCABULARY, dtype=torch.float64)
    for row in rows:
        assert row.bias is not None
        logits = logits_of(row.hidden, row.weight, row.bias, row.softcap)[:, :VOCABULARY]
        mixed += row.share * (logits / 1.5).softmax(-1)
    count = min(k, VOCABULARY)
    assert ids.shape == (ROWS, count)
    values, index = mixed.topk(count, -1)
    assert torch.equal(ids, index)
    torch.testing.assert_close(topk[:, :-1].double(), values.log(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(topk.exp().sum(-1), torch.ones(ROWS))
    assert bool((topk[:, -1] == -torch.inf).all()) == (count == VOCABULARY)
    torch.testing.assert_close(logprobs.double(), mixed.gather(1, targets[:, None])[:, 0].log(), atol=1e-5, rtol=1e-5)


def test_a_mixture_is_the_pure_function_of_the_teachers_own() -> None:
    rows, targets = teachers([0.25, 0.75]), torch.arange(ROWS)

    def of(chosen: list[TeacherRows]) -> Tensor:
        return mixture_topk(chosen, 3, targets=targets, vocabulary=VOCABULARY, temperature=1.0)[2]

    alone = [of([TeacherRows(row.hidden, row.weight, row.bias, row.softcap, 1.0)]) for row in rows]
    torch.testing.assert_close(of(rows), mixture(torch.stack(alone), [1.0, 3.0]), atol=1e-6, rtol=1e-6)


# --- memory: promise P8 --------------------------------------------------------------------------------------------

MEASURE = textwrap.dedent("""
    import sys
    import torch
    from strop.algorithms.distillation import event_divergence
    from strop.models.topk_logprobs import TeacherRows, linear_topk_logprobs, mixture_topk

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

    way, chunk = sys.argv[1], int(sys.argv[2])
    rows, width, vocabulary, k = map(int, sys.argv[3:7])
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) * width**-0.5).requires_grad_()
    other, head = torch.randn(rows, width, generator=draw), weight.detach().flip(0)
    targets = torch.randint(0, vocabulary, (rows,), generator=draw)
    (torch.randn(64, 64).requires_grad_() @ torch.randn(64, 64)).sum().backward()
    before = peak()
    if way == "chunked":
        teacher = [TeacherRows(other, head, None, None, 1.0)]
        ids, told, _ = mixture_topk(teacher, k, targets=targets, vocabulary=vocabulary, temperature=1.0, chunk=chunk)
        _, topk, _ = linear_topk_logprobs(hidden, weight, targets, ids, chunk=chunk)
        event_divergence(topk, told, "jensen_shannon").sum().backward()
    else:
        q, p = torch.log_softmax(other @ head.T, -1), torch.log_softmax(hidden @ weight.T, -1)
        middle = torch.logaddexp(q, p) - 0.6931
        (0.5 * (q.exp() * (q - middle)).sum() + 0.5 * (p.exp() * (p - middle)).sum()).backward()
    print(peak() - before)
""")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak memory from /proc")
def test_peak_memory_is_that_of_chunks() -> None:
    rows, width, vocabulary, k, chunk = 768, 64, 32_768, 32, 64

    def measured(way: str) -> int:
        command = [sys.executable, "-c", MEASURE, way, *map(str, (chunk, rows, width, vocabulary, k))]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    chunked, whole = measured("chunked"), measured("whole")
    assert whole >= 4 * 4 * rows * vocabulary, "the comparison does not materialise the distributions"
    # The formula of docs/performance.md: some five chunks of logits at a time, the gradients of what is trained, and
    # K + 1 numbers a position.
    formula = 5 * 4 * chunk * vocabulary + 4 * (3 * rows + 2 * vocabulary) * width + 60 * rows * (k + 1)
    assert chunked <= formula + (64 << 20)
    assert chunked <= whole / 3
