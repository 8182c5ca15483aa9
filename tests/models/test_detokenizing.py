"""Text by a table is what the tokenizer itself says, for every id and every order of them; and where it cannot be,
there is no table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from strop.config.model import NewModel
from strop.models.create import create_tokenizer
from strop.models.detokenizing import _table, detokenizer

TEXTS = ["The answer is 42, isn't it?", "größer als 漢字 🙂🙃", "a  b\n\tc  d", "1,234.5 + x = y"] * 3


def byte_level(**named: Any) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    backend.train_from_iterator(TEXTS, trainer)
    # Written as they are: letters of the byte-level alphabet, letters outside of it, and both.
    backend.add_tokens([AddedToken("<tool>"), AddedToken("漢漢"), AddedToken("Ġx"), AddedToken(" é🙂")])
    backend.add_tokens([AddedToken("=" * 40)])  # longer than a cell of the table
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", **named)


def characters() -> Any:
    return create_tokenizer(NewModel(characters="0123456789+= é漢🙂", hidden_size=8, layers=1, heads=1, context=8))


def word_piece(**named: Any) -> Any:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[PAD]"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", **named)


def unigram() -> Any:
    """As SentencePiece writes: a mark for a space, of which the first is dropped."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=90, special_tokens=["<s>", "<unk>"], unk_token="<unk>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


def byte_fallback() -> Any:
    """As Gemma and Llama 2 do: bytes that are in no token have tokens of their own."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "漢": 258, "<s>": 259}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


KINDS: dict[str, tuple[Callable[[], Any], bool]] = {
    "byte level": (byte_level, True),
    "characters": (characters, True),
    "word piece": (word_piece, False),
    "word piece, cleaned up": (lambda: word_piece(clean_up_tokenization_spaces=True), False),
    "byte level, cleaned up": (lambda: byte_level(clean_up_tokenization_spaces=True), False),
    "unigram": (unigram, False),
    "byte fallback": (byte_fallback, False),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: Any) -> tuple[Any, bool]:
    make, tabled = KINDS[request.param]
    return make(), tabled


def test_a_table_is_made_where_it_can_be(kind: tuple[Any, bool]) -> None:
    tokenizer, tabled = kind
    assert (_table(tokenizer, len(tokenizer)) is not None) == tabled


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_text_is_the_tokenizers(kind: tuple[Any, bool], data: st.DataObject) -> None:
    tokenizer, _ = kind
    # Ids that no token has too: a model's vocabulary may be larger than its tokenizer's.
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40))
    text = detokenizer(tokenizer)(np.array(ids, dtype=np.int64))
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_bytes_that_are_no_text_are_replaced_as_the_tokenizer_replaces_them() -> None:
    """Every beginning of a character of several bytes, before every kind of byte that may follow."""
    tokenizer = byte_level()
    vocabulary, letters = tokenizer.get_vocab(), bytes_to_unicode()
    edges = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF]
    edges += [0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF]
    said = detokenizer(tokenizer)
    lines = [(a, b, c, d) for a in edges for b in edges for c in edges for d in (0x41, 0x80, 0xE0)]
    ids = [[vocabulary[letters[byte]] for byte in line] for line in lines]
    theirs = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert [said(np.array(one)) for one in ids] == theirs


def test_tokens_that_are_added_are_seen_by_the_next_table() -> None:
    tokenizer = byte_level()
    before = detokenizer(tokenizer)
    tokenizer.add_tokens(["<new>"])
    number = np.array([tokenizer.convert_tokens_to_ids("<new>")])
    assert before(number) == ""
    assert detokenizer(tokenizer)(number) == "<new>"


def test_a_tokenizer_with_its_own_way_is_asked() -> None:
    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *given: Any, **named: Any) -> str:
            return super()._decode(*given, **named).upper()

    own = Own(tokenizer_object=characters().backend_tokenizer)
    assert detokenizer(own)(np.array([3, 14])) == own.decode([3, 14], skip_special_tokens=True)
    assert _table(own, len(own)) is None


def test_whatever_else_decodes_is_asked_too() -> None:
    class Letters:
        def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
            assert skip_special_tokens
            return "".join(chr(97 + number) for number in token_ids)

    assert detokenizer(Letters())(np.array([0, 1, 2])) == "abc"
