"""Tokens as the text that each adds: together they are the whole, and a character of several tokens is not broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from viewer_runs import make_run

from strop.serve.viewer.token_texts import texts, tokenizer_of


def byte_tokenizer() -> Tokenizer:
    """One token a byte, as the byte-level tokenizers of large models fall back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_the_texts_of_all_tokens_are_the_text(text: str) -> None:
    tokens = TOKENIZER.encode(text).ids
    assert "".join(one or "" for one in texts(TOKENIZER, tokens)) == text


def test_the_last_token_of_a_character_has_it() -> None:
    tokens = TOKENIZER.encode("é😀x").ids
    assert texts(TOKENIZER, tokens) == ["", "é", "", "", "", "😀", "x"]


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 40, 999])
def test_a_number_that_is_no_token_has_no_text(token: int) -> None:
    known = TOKENIZER.encode("ab").ids
    assert texts(TOKENIZER, [known[0], token, known[1]]) == ["a", None, "b"]


def test_bytes_that_are_no_text_do_not_spoil_what_follows() -> None:
    broken = TOKENIZER.encode("😀").ids[1:3]
    found = texts(TOKENIZER, [*broken, *TOKENIZER.encode("hello there, all of you").ids])
    assert len(found) == 2 + len("hello there, all of you")
    assert "".join(one or "" for one in found).endswith("there, all of you")


def test_the_tokenizer_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    found = tokenizer_of(run)
    assert found is not None
    assert texts(found, [3, 4, 1]) == ["0", "1", "<eos>"]
    newer = run / "checkpoints" / "step-000009" / "model" / "tokenizer.json"
    newer.parent.mkdir(parents=True)
    newer.write_text("{")
    assert tokenizer_of(run) is not None, "one that cannot be read is passed over"
    TOKENIZER.save(str(newer))
    assert texts(tokenizer_of(run), TOKENIZER.encode("q").ids) == ["q"]


def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", tokenizer=False)
    assert tokenizer_of(run) is None
    assert texts(None, [1, 2]) == [None, None]
