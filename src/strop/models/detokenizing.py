"""Token ids to text: by a table of what each token stands for, where a tokenizer's text is nothing but its tokens in a
row. `tokenizers` makes a string of every token of every completion, which takes five times as long."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

Detokenize = Callable[[np.ndarray], str]
"""The text of [n] int64 token ids, without special tokens."""
_WIDEST = 16
"""Bytes of a cell in a table, at most; few tokens are longer."""
_FILLER, _MARK = b"\0", b"\xff"
_LINE = 64
"""Tokens that are decoded together where a table is compared with its tokenizer."""


def detokenizer(tokenizer: Any) -> Detokenize:
    """What gives the same as `tokenizer.decode(ids, skip_special_tokens=True)` for all ids.

    A table is for tokenizers whose decoder is `ByteLevel`, as that of most byte-level BPE models is, or `Fuse`. Before
    it is used it is compared with the tokenizer, every token in several places; others, where the text of a token
    depends on those beside it (SentencePiece, WordPiece), decode themselves. Tokens that are added later are not seen.
    """
    from transformers import PreTrainedTokenizerFast

    fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    table = _table(tokenizer, len(tokenizer)) if fast else None
    # As an array: of a list, transformers looks at each number first.
    return table or (lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))


@lru_cache(maxsize=4)
def _table(tokenizer: Any, size: int) -> Detokenize | None:
    """By a table, None where that is not possible. It takes half a second for a large vocabulary, so it is kept for as
    long as the tokenizer has this number of tokens."""
    pieces = _pieces(tokenizer)
    if pieces is None:
        return None
    known, cells = len(pieces), _cells(pieces)

    def text(ids: np.ndarray) -> str:
        try:
            found = cells[ids].tobytes()
        except IndexError:  # an id without a token, in the padding of a model's vocabulary
            ids = ids[ids < known]
            found = cells[ids].tobytes()
        # A third of the time of putting the tokens together one by one.
        found = b"".join(pieces[ids].tolist()) if _MARK in found else found.translate(None, _FILLER)
        return found.decode("utf-8", "replace")

    draw = np.random.default_rng(0)
    lines = [line for _ in range(3) for line in np.array_split(draw.permutation(known), known // _LINE + 1)]
    theirs = tokenizer.batch_decode([line.tolist() for line in lines], skip_special_tokens=True)
    return text if [text(line) for line in lines] == theirs else None


def _pieces(tokenizer: Any) -> np.ndarray | None:
    """[ids] bytes of each token, empty for special ones; None for a tokenizer that does more than put them together."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = kind.decode is not PreTrainedTokenizerFast.decode or kind._decode is not PreTrainedTokenizerFast._decode
    if own or tokenizer.clean_up_tokenization_spaces:
        return None
    backend = tokenizer.backend_tokenizer
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())["type"]
    if decoder not in ("ByteLevel", "Fuse"):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    letters = _byte_letters() if decoder == "ByteLevel" else {}
    pieces = np.full(max(vocabulary.values(), default=-1) + 1, b"", dtype=object)
    for number in range(len(pieces)):
        token = backend.id_to_token(number)
        if token is not None and token not in special:
            pieces[number] = _bytes(token, letters)
    return pieces


def _cells(pieces: np.ndarray) -> np.ndarray:
    """[ids] the bytes of each token in a cell of equal size, filled up with `_FILLER`; `_MARK` where that cannot be:
    in long tokens and in those that hold one of the two."""
    width = min(_WIDEST, max(map(len, pieces), default=1) or 1)
    plain = [len(piece) <= width and _MARK not in piece and _FILLER not in piece for piece in pieces]
    return np.where(plain, pieces, _MARK).astype(f"S{width}")


def _bytes(token: str, letters: dict[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:  # an added token, which is written as it is
        return token.encode()


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: itself where it can be printed, else the next
    letter from U+0100 on (GPT-2)."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + at): byte for at, byte in enumerate(others)}
