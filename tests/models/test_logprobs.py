"""Chunked log-probabilities against log_softmax and autograd, and what they cost in memory (promise P8)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.models.logprobs import linear_logprobs

ROWS, HIDDEN, VOCABULARY = 7, 5, 23


def inputs(*, dtype: torch.dtype = torch.float32, rows: int = ROWS, bias: bool = True) -> list[Tensor]:
    """hidden [N, H], weight [V, H], bias [V], targets [N]."""
    draw = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=draw) * 2
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    offset = torch.randn(VOCABULARY, generator=draw) * bias
    targets = torch.randint(0, VOCABULARY, (rows,), generator=draw)
    return [x.to(dtype) for x in (hidden, weight, offset)] + [targets]


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same by whole logits in float64."""
    logits = hidden.double() @ weight.double().T + bias.double()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    found, expected = found.detach(), expected.detach()
    return bool((found.double() - expected.double()).abs().max() <= tolerance * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
def test_values_and_gradients_are_those_of_log_softmax(
    temperature: float, softcap: float | None, chunk: int, entropy: str
) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    up = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(9))

    logprobs, spread = linear_logprobs(
        hidden, weight, targets, bias=bias, temperature=temperature, softcap=softcap, chunk=chunk, entropy=entropy
    )
    expected_logprobs, expected_spread = plain(hidden, weight, bias, targets, temperature, softcap)
    assert close(logprobs, expected_logprobs)
    if entropy == "none":
        assert (spread == 0).all()
    else:
        assert close(spread, expected_spread)
    # Only "graph" sends a gradient through the entropy; "value" must not even build one.
    assert spread.requires_grad == (entropy == "graph")

    loss, expected_loss = (logprobs * up[0]).sum(), (expected_logprobs * up[0]).sum()
    if entropy == "graph":
        loss, expected_loss = loss + (spread * up[1]).sum(), expected_loss + (expected_spread * up[1]).sum()
    for found, expected in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected_loss, leaves), strict=True
    ):
        assert close(found, expected)


@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("chunk", [2, 512])
def test_a_frozen_head_gives_the_same_gradient(entropy: str, softcap: float | None, chunk: int) -> None:
    hidden, weight, bias, targets = inputs()
    hidden.requires_grad_()
    up = torch.randn(ROWS, generator=torch.Generator().manual_seed(9))

    def gradient() -> Tensor:
        logprobs, _ = linear_logprobs(
            hidden, weight, targets, bias=bias, temperature=0.7, softcap=softcap, chunk=chunk, entropy=entropy
        )
        return torch.autograd.grad((logprobs * up).sum(), hidden)[0]

    frozen = gradient()
    weight.requires_grad_()
    trained = gradient()
    expected = torch.autograd.grad((plain(hidden, weight, bias, targets, 0.7, softcap)[0] * up).sum(), hidden)[0]
    assert close(frozen, trained, 1e-6)
    assert close(frozen, expected)


def test_a_head_alone_may_be_trained() -> None:
    hidden, weight, bias, targets = inputs()
    weight.requires_grad_()
    linear_logprobs(hidden, weight, targets, bias=bias, chunk=2)[0].sum().backward()
    found, weight.grad = weight.grad, None
    plain(hidden, weight, bias, targets, 1.0, None)[0].sum().backward()
    assert found is not None
    assert weight.grad is not None
    assert close(found, weight.grad)


def test_bfloat16_in_float32_out() -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, spread = linear_logprobs(hidden, weight, targets, bias=bias, chunk=3, entropy="value")
    assert logprobs.dtype == spread.dtype == torch.float32
    expected = plain(hidden, weight, bias, targets, 1.0, None)
    # The logits are rounded to bfloat16 once (8 bits); nothing after that may round again.
    assert close(logprobs, expected[0], 0.02)
    assert close(spread, expected[1], 0.02)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    reference = torch.autograd.grad(expected[0].sum(), weight)[0]
    assert close(weight.grad, reference, 0.03)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 17), st.integers(1, 20))
def test_chunks_do_not_matter(rows: int, chunk: int) -> None:
    hidden, weight, bias, targets = inputs(rows=rows)
    whole = linear_logprobs(hidden, weight, targets, bias=bias, chunk=512, entropy="value")
    parts = linear_logprobs(hidden, weight, targets, bias=bias, chunk=chunk, entropy="value")
    assert close(parts[0], whole[0], 1e-6)
    assert close(parts[1], whole[1], 1e-6)


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    logprobs, spread = linear_logprobs(hidden, weight, torch.tensor([0, 0]), entropy="graph")
    assert logprobs.tolist() == [0.0, -2e4]
    assert spread.tolist() == [0.0, 0.0]
    (logprobs + spread).sum().backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_no_rows(frozen: bool) -> None:
    hidden, weight, bias, targets = inputs(rows=0)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    logprobs, spread = linear_logprobs(hidden, weight, targets, bias=bias, entropy="value")
    assert logprobs.shape == spread.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, HIDDEN)
    assert frozen or (weight.grad is not None and bool((weight.grad == 0).all()))


@pytest.mark.parametrize("target", [VOCABULARY, -100])
def test_a_target_outside_of_the_vocabulary_is_an_error(target: int) -> None:
    hidden, weight, bias, targets = inputs()
    targets[3] = target
    with pytest.raises((RuntimeError, IndexError)):
        linear_logprobs(hidden, weight, targets, bias=bias)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_makes_no_sense_is_refused(temperature: float) -> None:
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(hidden, weight, targets, bias=bias, temperature=temperature)


# Peak memory, each measurement in a process of its own: the peak of a process never goes down again.

MEASURE = textwrap.dedent("""
    import sys
    import torch
    from strop.models.logprobs import linear_logprobs

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024

    way, (rows, width, vocabulary) = sys.argv[1], map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) * width**-0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=draw)
    # What the process holds anyhow, the library's first matrix product included.
    (torch.randn(64, 64).requires_grad_() @ torch.randn(64, 64)).sum().backward()
    before = peak()
    if way == "chunked":
        logprobs, _ = linear_logprobs(hidden, weight, targets, chunk=int(sys.argv[6]))
    else:
        logprobs = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    logprobs.sum().backward()
    print(peak() - before)
    torch.save([hidden.grad, weight.grad[:: max(1, vocabulary // 4096)].clone()], sys.argv[5])
""")


def measured(way: str, shape: tuple[int, int, int], chunk: int, file: str) -> int:
    """Bytes of peak memory that forward and backward add; gradients go to a file."""
    command = [sys.executable, "-c", MEASURE, way, *map(str, shape), file, str(chunk)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak memory from /proc")
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        pytest.param((768, 64, 32_768), 64, id="quick"),
        pytest.param((4096, 576, 49_152), 512, id="acceptance", marks=pytest.mark.slow),
    ],
)
def test_peak_memory_is_at_most_a_third_of_whole_logits(
    shape: tuple[int, int, int], chunk: int, tmp_path: Path
) -> None:
    files = [f"{tmp_path}/{way}.pt" for way in ("chunked", "whole")]
    chunked, whole = measured("chunked", shape, chunk, files[0]), measured("whole", shape, chunk, files[1])
    rows, width, vocabulary = shape
    assert whole >= 4 * rows * vocabulary, "the comparison does not materialise the logits"
    assert chunked <= whole / 3
    # The formula: some four chunks of logits at a time, and the gradients of what is trained.
    assert chunked <= 4 * (4 * chunk * vocabulary + 2 * (rows + vocabulary) * width) + (64 << 20)
    for ours, theirs in zip(*(torch.load(file) for file in files), strict=True):
        assert close(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("entropy", ["none", "value", "graph"])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_rows_that_are_said_to_count_alike_have_the_same_gradients(
    chunk: int, entropy: str, alike: bool, softcap: float | None
) -> None:
    """Also where they do not, and where the gradient cannot be taken early."""
    hidden, weight, bias, targets = inputs()
    up = torch.full((ROWS,), -0.25) if alike else torch.linspace(-1, 2, ROWS)
    found = []
    for even in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        logprobs, _ = linear_logprobs(
            leaves[0],
            leaves[1],
            targets,
            bias=leaves[2],
            temperature=0.7,
            softcap=softcap,
            chunk=chunk,
            entropy=entropy,  # type: ignore[arg-type]
            even=even,
        )
        (logprobs * up).sum().backward(retain_graph=True)
        once = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
        (logprobs * up).sum().backward()
        assert all(close(leaf.grad, 2 * first) for leaf, first in zip(leaves, once, strict=True))
        found.append((logprobs, once))
    (plainly, expected), (evenly, gradients) = found
    assert torch.equal(plainly, evenly)
    assert all(close(a, b, 1e-6) for a, b in zip(gradients, expected, strict=True))


def test_logits_are_made_once_where_rows_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.models import logprobs as module

    calls: list[int] = []
    logits = module._logits
    monkeypatch.setattr(module, "_logits", lambda *arguments: (calls.append(1), logits(*arguments))[1])
    for even, count in ((False, 6), (True, 3)):
        hidden, weight, bias, targets = inputs()
        leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
        found, _ = linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], chunk=3, even=even)
        calls.clear()
        found, _ = linear_logprobs(leaves[0], leaves[1], targets, bias=leaves[2], chunk=3, even=even)
        found.mean().backward()
        assert len(calls) == count
