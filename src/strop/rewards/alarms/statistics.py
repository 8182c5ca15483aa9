"""What alarms look at: plain functions of the completions of a step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from strop.rewards.final_answer import boxed, different, stated

GRAM = 4
"""Tokens of an n-gram, as in seq-rep-4 (arXiv 1908.04319)."""
NEARLY = 0.8
"""Share of common n-grams from which two completions count as the same."""
_FACTOR = np.uint32(0x85EBCA6B)
BLOCK = 1 << 16
"""Columns of the table of common n-grams that are filled at a time."""
MOST_PROMPTS = 64
"""Of more prompts the first are compared with each other."""


def _items(word: str, digit: str) -> re.Pattern[str]:
    """Choices and numbers behind what may stand before them, of which there is less to look at than of what they begin
    with, in alternatives that the first character decides.

    word, digit: the characters of words and of numbers, as in brackets.
    """
    one = f"[{digit}]"
    rest = rf"(?:{one}{{0,2}}(?:,{one}{{3}})+(?![{digit},])|{one}*(?:\.{one}+)?)"
    return re.compile(rf"[^{word}.\\]({one}{rest}|-{one}{rest}|[A-Z])(?![{word}])")


_ITEM = _items(r"\w", r"\d")
_ASCII_ITEM = _items("A-Za-z0-9_", "0-9")
"""The same in a text of ASCII, in half the time: no character need be looked up."""
# What may stand between two of them in a list.
_BETWEEN = re.compile(r"[\s,;/|&()\[\].:'\"*]+(?:(?:or|and)[\s(\[]+)?")


class Outcome(NamedTuple):
    """A scored completion, as the alarms see it.

    group, sample, prompt_id: of its episode. answer: the reference answer as text, None if there is none. text: what
    was said last. tokens: everything that was sampled. components: score of each verifier, times its weight. decider:
    name of the verifier that decides `correct`.
    """

    group: int
    sample: int
    prompt_id: str
    text: str
    tokens: Sequence[int] | np.ndarray
    reward: float
    answer: str | None = None
    correct: bool | None = None
    components: Mapping[str, float] = MappingProxyType({})
    decider: str = ""


@dataclass(frozen=True)
class Found:
    """The value of a statistic, and the completion that shows it best."""

    value: float
    example: Outcome | None = None
    about: str = ""


def rewarded(outcomes: Sequence[Outcome], lowest: float) -> list[Outcome]:
    """Those that are worth the step's mean or more, and more than the lowest reward that the run has seen."""
    if not outcomes:
        return []
    # Rounding of the mean must not leave out what is worth just that.
    mean = sum(one.reward for one in outcomes) / len(outcomes) - 1e-9
    return [one for one in outcomes if one.reward >= mean and one.reward > lowest]


def repetition(outcomes: Sequence[Outcome]) -> Found:
    """Mean share of n-grams that stood in the same completion before."""
    return _mean(outcomes, _repeats([one.tokens for one in outcomes]))


def repeated(tokens: Sequence[int]) -> float:
    """Share of n-grams that are not the first of their kind; 0 where there is none."""
    return _repeats([tokens])[0]


def stuffing(outcomes: Sequence[Outcome]) -> Found:
    """Mean number of different answers in a completion."""
    return _mean(outcomes, [float(candidates(one.text)) for one in outcomes])


def candidates(text: str) -> int:
    """How many different answers a text gives: in boxes, stated as the answer, or in a row with nothing but commas and
    the like between them, whichever are most."""
    return max(different(boxed(text)), different(stated(text)), _listed(text))


def length(outcomes: Sequence[Outcome]) -> Found:
    """Mean number of sampled tokens."""
    return _mean(outcomes, [float(len(one.tokens)) for one in outcomes])


def sameness(outcomes: Sequence[Outcome]) -> Found | None:
    """Share of pairs that say the same, among completions to prompts with different answers; None without such pairs.

    One completion, the first, stands for its prompt. Where there are no answers, all prompts are different.
    """
    first: dict[str, Outcome] = {}
    for one in outcomes:
        first.setdefault(one.prompt_id, one)
    compared = list(first.values())[:MOST_PROMPTS]
    sizes, common = _overlaps([one.tokens for one in compared])
    known: dict[str | int, int] = {}
    answers = [one.answer if one.answer is not None else at for at, one in enumerate(compared)]
    kinds = np.array([known.setdefault(answer, len(known)) for answer in answers])
    pairs = np.triu(kinds[:, None] != kinds, 1)
    count = np.count_nonzero(pairs)
    if not count:
        return None
    # |a or b| = |a| + |b| - |a and b|, and no second set.
    same = pairs & (common >= NEARLY * (sizes[:, None] + sizes - common))
    found = np.count_nonzero(same)
    return Found(found / count, compared[int(same.any(1).argmax())] if found else None)


def dominance(outcomes: Sequence[Outcome]) -> Found | None:
    """The largest share that a verifier other than the decider has of the variance of rewards within groups.

    The share of a component c of the sum s is cov(c, s) / var(s), so that all shares add up to 1. None where nothing
    differs within a group, or there is one verifier only.
    """
    groups: dict[int, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        groups[one.group].append(one)
    # One verifier decides for the row of a group, or one for each role.
    deciders = {number: {one.decider for one in members} for number, members in groups.items()}
    if all(one.components.keys() <= deciders[one.group] for one in outcomes):
        return None
    whole = 0.0
    shares: dict[str, float] = defaultdict(float)
    for number, members in groups.items():
        totals = _centred([math.fsum(one.components.values()) for one in members])
        whole += math.fsum(total * total for total in totals)
        for name in {name for one in members for name in one.components}:
            scores = _centred([one.components.get(name, 0.0) for one in members])
            products = math.fsum(score * total for score, total in zip(scores, totals, strict=True))
            shares["" if name in deciders[number] else name] += products
    others = {name: share for name, share in shares.items() if name}
    if whole <= 1e-12 or not others:
        return None
    name = max(sorted(others), key=others.__getitem__)
    best = max(outcomes, key=lambda one: one.components.get(name, -math.inf))
    return Found(others[name] / whole, best, name)


def mean_and_noise(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Mean reward, and the standard error that the draw of prompts and completions gives it."""
    groups: dict[int, list[float]] = defaultdict(list)
    for one in outcomes:
        groups[one.group].append(one.reward)
    means = [math.fsum(rewards) / len(rewards) for rewards in groups.values()]
    mean = math.fsum(means) / len(means)
    if len(means) < 2:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((one - mean) ** 2 for one in means) / (len(means) - 1) / len(means))


def lower_bound(wrong: int, asked: int, z: float = 2.0) -> float:
    """Lowest share that `wrong` of `asked` is compatible with.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927); z = 2 is 97.7 %.
    """
    if not asked:
        return 0.0
    share, square = wrong / asked, z * z / asked
    spread = z * math.sqrt(share * (1 - share) / asked + square / (4 * asked))
    return max(0.0, (share + square / 2 - spread) / (1 + square))


def _listed(text: str) -> int:
    """Most different items in one list; a single number or letter is a list of one."""
    most, items, end = 0, set[str](), -1
    text = f" {text}"
    for found in (_ASCII_ITEM if text.isascii() else _ITEM).finditer(text):
        start, after = found.span(1)
        if end < 0 or not _BETWEEN.fullmatch(text, end, start):
            items = set()
        items.add(found[1])
        most, end = max(most, len(items)), after
    return most


def _repeats(completions: Sequence[Sequence[int] | np.ndarray]) -> list[float]:
    """Share of the n-grams of each completion that are not the first of their kind; 0 where there is none."""
    ordered, edges = _ordered(completions)
    new = ordered[1:] != ordered[:-1]
    # One and those that differ from the one before.
    return [
        1 - (1 + np.count_nonzero(new[start : end - 1])) / (end - start) if end > start else 0.0 for start, end in edges
    ]


def _distinct(ordered: np.ndarray) -> np.ndarray:
    """Each number once, of [n] in order."""
    return ordered[np.concatenate([np.ones(min(1, len(ordered)), dtype=np.bool_), ordered[1:] != ordered[:-1]])]


def _overlaps(completions: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Different n-grams of each completion [n], and those that each two have in common [n, n]. A completion of fewer
    tokens than an n-gram has is one itself."""
    ordered, edges = _ordered(completions)
    sets = [
        _distinct(ordered[start:end] if len(tokens) >= GRAM else _grams(tokens, len(tokens)))
        for tokens, (start, end) in zip(completions, edges, strict=True)
    ]
    grams = np.concatenate(sets)
    owners = np.repeat(np.arange(len(sets)), [len(one) for one in sets])
    # Most n-grams are of one completion alone, and count for no pair.
    whole = np.sort(grams)
    shared = _distinct(whole[1:][whole[1:] == whole[:-1]])
    common = np.zeros((len(sets), len(sets)), dtype=np.int64)
    for start in range(0, len(shared), BLOCK):
        block = shared[start : start + BLOCK]
        has = np.zeros((len(sets), len(block)), dtype=np.float32)
        # Where each n-gram of each completion would stand in the block, and whether it does.
        at = np.minimum(np.searchsorted(block, grams), len(block) - 1)
        found = block[at] == grams
        has[owners[found], at[found]] = 1.0
        common += (has @ has.T).astype(np.int64)
    return np.array([len(one) for one in sets]), common


def _ordered(completions: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The n-grams of each completion in order, and from where to where they lie; of fewer tokens than an n-gram has,
    nowhere. Those that reach into the next completion lie between."""
    ends = [0, *accumulate(map(len, completions))]
    grams = _grams(np.concatenate(completions, dtype=np.uint32, casting="unsafe"))
    edges = [(start, max(start, end - GRAM + 1)) for start, end in pairwise(ends)]
    for start, end in edges:
        grams[start:end].sort()
    return grams, edges


def _grams(tokens: Sequence[int] | np.ndarray, size: int = GRAM) -> np.ndarray:
    """[n - size + 1] uint32, a hash of each n-gram; two that differ have the same with a probability of 2^-32 or so.

    Of a completion of 10,000 tokens that is one in a hundred times a single n-gram too many; numbers of 64 bits would
    take five times as long to make and to sort.
    """
    ids = np.asarray(tokens, dtype=np.uint32) + np.uint32(1)
    found = np.zeros(max(0, len(ids) - size + 1), dtype=np.uint32)
    for at in range(size):
        # In place: new memory for each number costs as much as the numbers do.
        found ^= found >> np.uint32(15)
        found *= _FACTOR
        found += ids[at : at + len(found)]
    return found


def _mean(outcomes: Sequence[Outcome], values: Sequence[float]) -> Found:
    most = max(range(len(values)), key=values.__getitem__)
    return Found(math.fsum(values) / len(values), outcomes[most])


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
