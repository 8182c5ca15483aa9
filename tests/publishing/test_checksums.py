"""A checksum tells apart what is not the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Counted
from torch import Tensor

from strop.publishing import checksums
from strop.publishing.checksums import ROW, Summed, ahead, checksum, finished
from strop.publishing.manifest import Recording

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64]


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=draw, dtype=torch.uint8).view(dtype)


def reference(tensor: Tensor) -> int:
    """The formula in Python's own numbers."""
    import hashlib

    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + 4].ljust(4, b"\0"), "little", signed=True) for at in range(0, len(data), 4)]
    total = 0
    for row in range(0, len(words), ROW):
        sum_ = 0
        for place, word in enumerate(words[row : row + ROW]):
            sum_ += word * ((mixed((place + 1) * step & mask) & 0xFFFFFFFF00000000) | (2 * place + 1))
        total += mixed((sum_ + (row // ROW + 1) * step) & mask)
    form = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=8).digest()
    return (total & mask) ^ int.from_bytes(form, "little")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 1000, ROW + 5])
def test_it_is_the_formula(dtype: torch.dtype, count: int) -> None:
    tensor = drawn(count, dtype)
    assert checksum(tensor) == reference(tensor)


@settings(max_examples=200, deadline=None)
@given(dtype=st.sampled_from(DTYPES), count=st.integers(1, 300), data=st.data())
def test_any_single_bit_changes_it(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = drawn(count, dtype)
    before = checksum(tensor)
    place = data.draw(st.integers(0, tensor.nbytes - 1))
    tensor.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(tensor) != before


@settings(max_examples=200, deadline=None)
@given(dtype=st.sampled_from(DTYPES), count=st.integers(2, 300), data=st.data())
def test_any_exchange_of_two_unequal_values_changes_it(dtype: torch.dtype, count: int, data: st.DataObject) -> None:
    tensor = drawn(count, dtype)
    before = checksum(tensor)
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    raw = tensor.view(torch.uint8).view(count, -1)
    unequal = not torch.equal(raw[a], raw[b])
    raw[[a, b]] = raw[[b, a]].clone()
    assert (checksum(tensor) != before) == unequal


def test_values_that_differ_in_their_sign_alone_may_not_change_places() -> None:
    # Differences of 2^31 times differences of multipliers that are powers of two: the worst case of the formula.
    tensor = torch.ones(ROW)
    found = set()
    for place in [1 << power for power in range(16)]:
        tensor.fill_(1.0)[place] = -1.0
        found.add(checksum(tensor))
    assert len(found) == 16


def test_every_place_and_every_row_counts() -> None:
    found = set()
    places = [*range(0, 3 * ROW, 997), ROW - 1, ROW, 2 * ROW]
    for place in places:
        tensor = torch.zeros(3 * ROW + 7)
        tensor[place] = 1.0
        found.add(checksum(tensor))
    assert len(found) == len(set(places))
    rows = drawn(3 * ROW, torch.float32).view(3, ROW)
    assert len({checksum(rows[order].contiguous()) for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0])}) == 4


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 200), cut=st.integers(1, 20))
def test_truncation_changes_it_also_where_zeros_are_cut_off(count: int, cut: int) -> None:
    whole = torch.cat([drawn(count, torch.bfloat16), torch.zeros(cut, dtype=torch.bfloat16)])
    assert checksum(whole) != checksum(whole[:-cut])
    assert checksum(whole) != checksum(whole[cut:])


def test_dtype_and_shape_count_and_layout_does_not() -> None:
    tensor = drawn(24, torch.float32).view(4, 6)
    same = [tensor, tensor.clone(), tensor.t().contiguous().t(), torch.cat([tensor[:1], tensor])[1:]]
    assert len({checksum(one) for one in same}) == 1
    other = [tensor.view(6, 4), tensor.view(24), tensor.view(torch.int32), tensor.t()]
    assert len({checksum(one) for one in [tensor, *other]}) == 5
    # A view that begins within a word.
    assert checksum(drawn(9, torch.bfloat16)[1:]) == checksum(drawn(9, torch.bfloat16)[1:].clone())


def test_random_tensors_have_random_bits() -> None:
    found = [checksum(drawn(33, torch.float32, seed)) for seed in range(2000)]
    assert len(set(found)) == 2000
    for bit in range(64):
        assert 850 < sum(value >> bit & 1 for value in found) < 1150


def test_many_at_once_and_each_alone_are_the_same() -> None:
    tensors = [drawn(count, torch.float32, count) for count in (0, 1, ROW, ROW + 1, 0, 3 * ROW + 7)]
    assert checksums.checksums(tensors) == [checksum(tensor) for tensor in tensors] == [reference(t) for t in tensors]
    assert checksums.checksums([]) == []


def test_rows_that_are_multiplied_together_have_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where tensors are not on a CPU; of four rows at once, so that there are several such."""
    tensor = drawn(9 * ROW + 5, torch.float32)
    alone = checksum(tensor)
    monkeypatch.setattr(checksums, "_ROWS_ELSEWHERE", 4)
    monkeypatch.setattr(checksums, "_sums_here", checksums._sums_of_many)
    assert checksum(tensor) == alone


def together(tensors: list[Tensor]) -> Summed:
    """As where tensors are not on a CPU."""
    return checksums._summed(tensors, alone=())


def odd_ones(seed: int) -> list[Tensor]:
    """Tensors of all kinds that there are."""
    tensors = [drawn(count, dtype, seed) for dtype in DTYPES for count in (0, 1, 3, 5, 1000)]
    tensors += [drawn(count, torch.float32, seed) for count in (ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 7)]
    tensors += [drawn(9, torch.bfloat16, seed)[1:], drawn(9, torch.int8, seed)[3:], drawn(12, torch.uint8, seed)[1:9]]
    tensors += [drawn(24, torch.float32, seed).view(4, 6).t(), drawn(ROW * 2, torch.bfloat16, seed).view(2, -1).t()]
    tensors += [drawn(30, torch.bfloat16, seed).view(5, 6)[:, 1:4], drawn(1, torch.float32, seed).view(())]
    tensors += [drawn(1, torch.int8, seed).view(()), torch.empty(0, 3), torch.ones(4).expand(3, 4), torch.ones(1, 1)]
    return [*tensors, torch.nn.Parameter(torch.full((3,), float(seed)))]


def test_tensors_that_are_put_together_have_the_checksums_that_they_have_alone() -> None:
    tensors = [tensor for seed in range(5) for tensor in odd_ones(seed)]
    sums = together(tensors)
    assert {len(places) for places, _ in sums.groups} > {5}, "of each form five are put together"
    assert not any(rows.requires_grad for _, rows in sums.groups)
    assert finished([sums]) == [checksum(tensor) for tensor in tensors] == [reference(tensor) for tensor in tensors]
    # Several batches, and one after another that was not put together.
    parts = [together(tensors[:100]), checksums.summed(tensors[100:130]), together([]), together(tensors[130:])]
    assert finished(parts) == finished([sums])


@pytest.mark.parametrize("size", [ROW, 2 * ROW + 9])
def test_more_tensors_than_are_put_together_at_a_time(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    tensors = [drawn(size, torch.float32, seed) for seed in range(11)] + [drawn(20 * size, torch.float32)]
    monkeypatch.setattr(checksums, "_TOGETHER", 4 * tensors[0].nbytes + 1)
    monkeypatch.setattr(checksums, "_ROWS_ELSEWHERE", 8)
    sums = together(tensors)
    assert [places for places, _ in sums.groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11]]
    assert finished([sums]) == [checksum(tensor) for tensor in tensors]


def test_only_what_is_of_one_device_dtype_and_shape_is_put_together() -> None:
    def of(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    kinds = [("cpu", torch.float32, 2, 3), ("meta", torch.float32, 2, 3), ("meta", torch.int32, 2, 3)]
    kinds += [("meta", torch.float32, 3, 2), ("meta", torch.float32, 6)]
    tensors = [of(*kind) for kind in kinds * 2]  # type: ignore[arg-type]
    assert list(checksums._groups(tensors, ())) == [[at, at + 5] for at in range(5)]
    assert sorted(checksums._groups(tensors, ("cpu",))) == [[0], [1, 6], [2, 7], [3, 8], [4, 9], [5]]


def test_what_a_cpu_sums_is_never_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_sums_of_many", None)
    tensors = [drawn(ROW + 1, torch.float32, seed) for seed in range(3)]
    assert checksums.checksums(tensors) == [reference(tensor) for tensor in tensors]


def test_the_tensors_of_a_model_take_few_calls() -> None:
    shapes = [(64, 32), (32, 32), (32, 32), (32, 64), (8,), (8,), (96, 32), (96, 32), (32, 96), (32,), (32,)] * 28
    tensors = [torch.zeros(300, 32), torch.zeros(32), *map(torch.zeros, shapes)]
    checksum(torch.zeros(1))  # makes the multipliers
    with Counted() as counted:
        finished([together(tensors)])
    assert len(tensors) == 310
    assert counted.calls.total() < 100


class Elsewhere:
    """What stands for a tensor that is not on a CPU, and is so large."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.nbytes, self.device = nbytes, torch.device(device)


def test_what_is_read_ahead_is_written_down_before_any_of_it_is_handed_on() -> None:
    sizes = [3, 3, 3, 100, 1, 9, 2]
    told: list[str] = []

    def given() -> Iterator[tuple[str, Any]]:
        for at, size in enumerate(sizes):
            told.append(f"given {at}")
            yield str(at), Elsewhere(size)

    for name, tensor in ahead(given(), 8, lambda batch: told.append(f"down {' '.join(name for name, _ in batch)}")):
        assert tensor.nbytes == sizes[int(name)]
        told.append(f"on {name}")
    assert told == [
        *("given 0", "given 1", "given 2", "down 0 1 2", "on 0", "on 1", "on 2"),
        *("given 3", "down 3", "on 3", "given 4", "given 5", "down 4 5", "on 4", "on 5", "given 6", "down 6", "on 6"),
    ]


def test_nothing_that_was_read_ahead_is_kept_when_it_was_handed_on() -> None:
    import weakref

    alive: list[Any] = []

    def given() -> Iterator[tuple[str, Any]]:
        for at in range(9):
            tensor = Elsewhere(4)
            alive.append(weakref.ref(tensor))
            yield str(at), tensor

    passing = ahead(given(), 12, lambda batch: None)
    for at, _ in enumerate(passing):
        del _
        assert sum(one() is not None for one in alive) <= 3 - at % 3 + 1


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    given = iter([(str(at), drawn(4, torch.float32, at)) for at in range(3)])
    recording = Recording(1)
    passing = recording.over(given)
    for at in range(3):
        assert next(passing)[0] == str(at)
        assert len(recording.forms) == at + 1
    assert next(passing, None) is None


def test_a_record_is_the_same_whatever_was_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.publishing import manifest

    pairs = [(str(at), tensor) for at, tensor in enumerate([*odd_ones(1), *odd_ones(2)])]
    plain = Recording(1)
    assert list(plain.over(pairs)) == pairs
    ahead_of_it = Recording(1)
    monkeypatch.setattr(manifest, "summed", together)
    monkeypatch.setattr(manifest, "ahead", partial(ahead, alone=()))
    monkeypatch.setattr(manifest, "_BATCH", 1 << 20)
    assert list(ahead_of_it.over(pairs)) == pairs
    assert 1 < len(ahead_of_it.parts) < len(pairs) / 2
    assert plain.manifest().entries == ahead_of_it.manifest().entries
    assert plain.bytes == ahead_of_it.bytes == sum(tensor.nbytes for _, tensor in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_of_many() -> None:
    tensors = [tensor for seed in range(5) for tensor in odd_ones(seed)]
    assert checksums.checksums(tensor.detach().cuda() for tensor in tensors) == checksums.checksums(tensors)
    recording = Recording(1)
    assert len(list(recording.over((str(at), tensor.detach().cuda()) for at, tensor in enumerate(tensors)))) == len(
        tensors
    )
    assert [entry.checksum for entry in recording.manifest().entries] == checksums.checksums(tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 1000, 700 * ROW + 3])
def test_a_gpu_gives_the_same(dtype: torch.dtype, count: int) -> None:
    tensor = drawn(count, dtype)
    assert checksum(tensor.cuda()) == checksum(tensor)
