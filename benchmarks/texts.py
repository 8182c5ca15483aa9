"""English prompts of given lengths, and the reward of the benchmarks: both from nothing but a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from strop.data.arithmetic import word_problems


def prompts_of(tokenizer: Any, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Token ids of distinct prompts with exactly these lengths: word problems one after another, then cut."""
    stories = [row["prompt"] for row in word_problems(count=1000, seed=seed, largest=100, steps=2)]
    found = []
    for number, length in enumerate(lengths):
        ids: list[int] = []
        at = number * 7
        while len(ids) < length:
            ids += tokenizer(stories[at % len(stories)] + " ", add_special_tokens=False)["input_ids"]
            at += 1
        found.append(ids[:length])
    return found


def texts_of_at_least(tokenizer: Any, count: int, tokens: int, *, seed: int = 0) -> list[str]:
    """Distinct prompts of whole word problems, each with at least so many tokens, and at most some forty more."""
    stories = iter(word_problems(count=8 * count, seed=seed, largest=100, steps=2))
    found = []
    for _ in range(count):
        text = ""
        while len(tokenizer(text)["input_ids"]) < tokens:
            text += next(stories)["prompt"] + " "
        found.append(text.rstrip())
    return found


def coin(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """0 or 1 by a checksum of the completion: costs nothing, and no group is left without an advantage."""
    return [float(crc32(text.encode()) & 1) for text in completions]
