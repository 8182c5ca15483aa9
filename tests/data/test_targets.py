"""Files of targets: what is written is read again, compactly, and only for the example that it was written for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data import targets
from strop.data.targets import (
    TargetsFile,
    TargetsHeader,
    TargetsWriter,
    TeacherRecord,
    example_fingerprint,
    tokenizer_fingerprint,
)
from strop.errors import DataError

K, VOCABULARY = 5, 40
TEACHERS = (TeacherRecord("runs/larger", "0123456789abcdef", 0.25), TeacherRecord("other", "fedcba9876543210", 0.75))


def header(k: int = K, vocabulary: int = VOCABULARY) -> TargetsHeader:
    return TargetsHeader(k=k, temperature=1.5, vocabulary=vocabulary, tokenizer="t", teachers=TEACHERS)


def told(tokens: int, *, seed: int = 0, k: int = K, scale: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n, k] and log-probabilities [n, k + 1] of random distributions."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(tokens, VOCABULARY)) * scale
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logp, axis=1)[:, :k]
    kept = np.take_along_axis(logp, ids, 1)
    with np.errstate(divide="ignore"):
        rest = np.log(np.maximum(1 - np.exp(kept).sum(1, keepdims=True), 0.0))
    return ids.astype(np.int32), np.concatenate([kept, rest], 1).astype(np.float32)


def write(path: Path, lengths: list[int], *, k: int = K) -> list[tuple[np.ndarray, np.ndarray]]:
    written = [told(length, seed=seed, k=k) for seed, length in enumerate(lengths)]
    with TargetsWriter(path, header(k)) as writer:
        for number, (ids, logprobs) in enumerate(written):
            writer.add(number * 7919, ids, logprobs)
    assert (writer.examples, writer.tokens) == (len(lengths), sum(lengths))
    return written


def test_what_is_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "GROUP_TOKENS", 10)
    monkeypatch.setattr(targets, "HELD_GROUPS", 2)
    lengths = [4, 1, 9, 3, 0, 12, 2]
    written = write(tmp_path / "t.parquet", lengths)
    file = TargetsFile(tmp_path / "t.parquet")
    assert file.header == header()
    assert len(file) == len(lengths)
    for number in (3, 0, 6, 5, 1, 2, 4, 0):
        ids, logprobs = file.read(number * 7919, K)
        assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
        assert np.array_equal(ids, written[number][0])
        # float16 keeps 11 bits of a log-probability.
        np.testing.assert_allclose(logprobs, written[number][1], rtol=1e-3, atol=2e-3)
        np.testing.assert_allclose(np.exp(logprobs.astype(np.float64)).sum(1), 1.0, atol=1e-6)
    assert 7919 in file
    assert 7918 not in file
    with pytest.raises(KeyError):
        file.read(7918, K)


@settings(max_examples=20, deadline=None)
@given(k=st.integers(1, K), seed=st.integers(0, 100))
def test_fewer_tokens_can_be_told_apart_than_were_written(tmp_path_factory: Any, k: int, seed: int) -> None:
    path = tmp_path_factory.mktemp("targets") / "t.parquet"
    ids, logprobs = told(6, seed=seed)
    with TargetsWriter(path, header()) as writer:
        writer.add(1, ids, logprobs)
    fewer_ids, fewer = TargetsFile(path).read(1, k)
    whole = np.exp(logprobs.astype(np.float64))
    expected = np.concatenate([whole[:, :k], whole[:, k:].sum(1, keepdims=True)], 1)
    assert np.array_equal(fewer_ids, ids[:, :k])
    np.testing.assert_allclose(np.exp(fewer), expected, atol=2e-3)


def test_a_tail_of_no_token_stays_one(tmp_path: Path) -> None:
    """The whole vocabulary is told apart, and a very unlikely token is not lost in float16."""
    logprobs = np.array([[-1e-6, -80000.0, -np.inf]], dtype=np.float32)
    with TargetsWriter(tmp_path / "t.parquet", header(k=2, vocabulary=2)) as writer:
        writer.add(1, np.array([[1, 0]]), logprobs)
    _, read = TargetsFile(tmp_path / "t.parquet").read(1, 2)
    assert read[0, 2] == -np.inf
    assert read[0, 1] == pytest.approx(targets.FLOOR, rel=1e-3)
    assert read[0, 0] == 0.0


def test_the_bytes_of_a_token(tmp_path: Path) -> None:
    """What docs/distillation.md says: 4 bytes an id and 2 a log-probability, less what compression saves."""
    draw = np.random.default_rng(0)
    k, tokens = 64, 20_000
    ids = draw.integers(0, 49_152, size=(tokens, k), dtype=np.int32)
    logprobs = np.log(draw.dirichlet(np.full(k + 1, 0.1), size=tokens) + 1e-12).astype(np.float32)
    with TargetsWriter(tmp_path / "t.parquet", header(k=k, vocabulary=49_152)) as writer:
        for start in range(0, tokens, 200):
            writer.add(start, ids[start : start + 200], logprobs[start : start + 200])
    each = (tmp_path / "t.parquet").stat().st_size / tokens
    assert each < 4 * k + 2 * (k + 1)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with TargetsWriter(tmp_path / "t.parquet", header()) as writer:
        ids, logprobs = told(3)
        with pytest.raises(ValueError, match="targets of shapes"):
            writer.add(1, ids[:, :2], logprobs)
        with pytest.raises(ValueError, match="targets of shapes"):
            writer.add(1, ids, logprobs[:, :-1])


def test_an_example_is_named_by_its_tokens_and_what_is_trained() -> None:
    tokens, mask = np.array([3, 1, 4, 1]), np.array([False, False, True, True])
    name = example_fingerprint(tokens, mask)
    assert name == example_fingerprint(tokens.astype(np.int32), mask.astype(np.uint8))
    assert 0 <= name < 2**64
    others = [
        example_fingerprint(np.array([3, 1, 4, 2]), mask),
        example_fingerprint(tokens, np.array([False, True, True, True])),
        example_fingerprint(tokens[:-1], mask[:-1]),
    ]
    assert name not in others
    assert len(set(others)) == 3


def test_a_tokenizer_is_named_by_its_vocabulary(tokenizer: Any, tokenizer_with: Any) -> None:
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(tokenizer_with(chat_template=None, bos=False))
    other = tokenizer_with()
    other.add_tokens(["<new>"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize("content", [None, b"", b"PAR1 nonsense PAR1", b"{}"])
def test_files_that_are_none_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        TargetsFile(path)
    assert ("no such file" if content is None else "not a file that") in caught.value.what
    assert caught.value.where == str(path)


def test_other_parquet_files_and_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"example": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="not a file that `strop teach` wrote"):
        TargetsFile(tmp_path / "other.parquet")
    write(tmp_path / "t.parquet", [2])
    monkeypatch.setattr(targets, "FORMAT", "2")
    with pytest.raises(DataError, match="format 1, and this version of strop reads 2"):
        TargetsFile(tmp_path / "t.parquet")
