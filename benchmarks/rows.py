"""Rows to learn from, of given lengths, and a digest of what a step was trained on, by which two sides are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from strop.data.arithmetic import word_problems

SHORTEST, LONGEST = 8, 512
# Completions begin with it, and nothing merges with a line break: a prompt and its completion are the same tokens apart
# and together.
BREAK = "\n"


def ragged_lengths(count: int, *, median: float, spread: float = 0.9, seed: int = 0) -> list[int]:
    """Tokens of each of `count` examples, log-normal between 8 and 512, as instruction data are."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), spread, size=count)
    return [int(length) for length in np.clip(drawn.round(), SHORTEST, LONGEST)]


def prompt_share(count: int, *, seed: int = 1) -> list[float]:
    """Which part of each example is prompt: a fifth to three fifths."""
    return np.random.default_rng(seed).uniform(0.2, 0.6, size=count).tolist()


def example_rows(tokenizer: Any, lengths: Sequence[int], *, pairs: bool, even: bool) -> list[dict[str, str]]:
    """Rows of a prompt and a completion, or of a prompt, a chosen and a rejected one, with these numbers of tokens.

    Args:
        lengths: tokens of each example, with the token that ends it; of the chosen one in a pair.
        pairs: add a rejected completion, as long as the chosen one of another row.
        even: all prompts are equally long, and so are all completions.
    """
    stories = Stories(tokenizer)
    shares = [0.4] * len(lengths) if even else prompt_share(len(lengths))
    before = [max(2, round(share * length)) for share, length in zip(shares, lengths, strict=True)]
    after = [max(4, length - head) for length, head in zip(lengths, before, strict=True)]
    rows = []
    for at, (head, tail) in enumerate(zip(before, after, strict=True)):
        prompt = stories.text(head)
        names = ("chosen", "rejected") if pairs else ("completion",)
        # Room for the longest prompt before the longest completion.
        sizes = (tail, min(after[at - 1], LONGEST - head))
        row = {"prompt": prompt}
        for name, size in zip(names, sizes, strict=False):
            row[name] = BREAK + stories.text(size - 2)
        rows.append(row)
    check(tokenizer, rows)
    return rows


class Stories:
    """Texts of exactly so many tokens, cut out of word problems; no two begin alike."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stories = [row["prompt"] for row in word_problems(count=4000, seed=0, largest=100, steps=2)]
        self._next = 0

    def text(self, length: int) -> str:
        """A text that the tokenizer reads as `length` tokens."""
        while True:
            text, ids = "", []
            while len(ids) < length:
                text += self._stories[self._next % len(self._stories)] + " "
                self._next += 1
                ids = self._tokens(text)
            cut: str = self._tokenizer.decode(ids[:length]).strip()
            # What ends within a word may be read otherwise than it was cut; the next story has another word there.
            if len(self._tokens(cut)) == length:
                return cut

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def check(tokenizer: Any, rows: Iterable[dict[str, str]]) -> None:
    """Raise ValueError if a row has other tokens together than its two parts have."""

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    for row in rows:
        for name in row.keys() - {"prompt"}:
            if tokens(row["prompt"] + row[name]) != tokens(row["prompt"]) + tokens(row[name]):
                raise ValueError(f"{row['prompt']!r} and {row[name]!r} are other tokens together than apart")


def digest(examples: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> int:
    """A number for the (tokens, which of them are trained) of a step, whatever their order."""
    total = 0
    for ids, trained in examples:
        total += crc32(np.asarray(ids, dtype=np.int64).tobytes() + np.asarray(trained, dtype=np.bool_).tobytes())
    return total % 2**32
