"""A checksum tells apart what is not the same, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.publishing import checksums
from strop.publishing.checksums import ROW, checksum

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 1000, 700 * ROW + 3])
def test_a_gpu_gives_the_same(dtype: torch.dtype, count: int) -> None:
    tensor = drawn(count, dtype)
    assert checksum(tensor.cuda()) == checksum(tensor)
