"""The episode: the single writer of what was sampled (docs/architecture.md, section 5.1).

Tokens, masks, log-probabilities and weight versions are written here once and never edited; everything else, the
trainer included, only reads `Episode.streams()`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from strop.rollout.engine import FinishReason, SampleResult

TurnId = int
_NO_TOKENS, _NO_LOGPROBS, _NO_VERSIONS = (np.zeros(0, dtype=kind) for kind in (np.int64, np.float32, np.int32))
"""The last two are those of a turn that nobody sampled."""
for _array in (_NO_LOGPROBS, _NO_VERSIONS):
    _array.flags.writeable = False
_HAIR, _ONE = np.float32(1e-4), np.float32(0.0)
"""Largest log-probability that is one, and that of what is certain."""
# What `min` and `max` call, without a wrapper that takes as long as a completion's numbers do.
_least, _most = np.minimum.reduce, np.maximum.reduce


class Status(StrEnum):
    """How an episode ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ENVIRONMENT_ERROR = "environment_error"
    VERIFIER_ERROR = "verifier_error"
    TIMEOUT = "timeout"

    def __init__(self, name: str) -> None:
        self.trainable = name in ("stop", "length")
        """Whether the reward can be believed; an error is never a reward of 0."""


ENDED: dict[str, Status] = {str(status): status for status in Status}
"""Each by its name, in a fifth of the time that an enumeration takes to find it."""


class Turn(NamedTuple):
    """A run of tokens by one speaker, appended once.

    `logprobs` (float32) and `versions` (int32) have one entry for each token of a sampled turn and are empty otherwise.
    """

    role: str
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    parent: TurnId | None
    finish: str | None

    @property
    def sampled(self) -> bool:
        return self.role == "assistant"


class TokenStream(NamedTuple):
    """One path from the root of an episode to a leaf, as the trainer sees it; all arrays have length L.

    tokens: int64. loss_mask: bool, True only where the token was sampled and is trained in this stream.
    logprobs: float32, the sampler's at the sampling temperature, NaN where the mask is False.
    versions: int32, the weights that sampled the token, -1 where the mask is False.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turns: tuple[TurnId, ...]


@dataclass
class Episode:
    """One rollout of one prompt: a tree of turns, append-only.

    Args:
        group: admission number of the group, the same for all completions of a prompt.
        sample: index within the group.
        row: the data row: prompt, answer and every other column.
        prompt_id: stable name of the row in its dataset.
        failed: name of the verifier that could not score the completion, or `environment`; empty otherwise, and where
            no verifier applies.
        completion: text of the policy's last turn, without special tokens.
        messages: the whole conversation, where there was one of several turns.
        turn_rewards: what the environment gave for turns of the policy.
        branch: in tree sampling, the completion that the episode began as and the branches that it took since; an
            episode is then one path from the root to a leaf, and shares its first turns with others of its group.
        branched: how many turns there were at each of these branchings.
        role: whose turns these are, where the policy plays several roles.
    """

    group: int
    sample: int
    row: dict[str, Any] = field(default_factory=dict)
    prompt_id: str = ""
    status: Status | None = None
    reward: float = math.nan
    components: dict[str, float] = field(default_factory=dict)
    correct: bool | None = None
    detail: str = ""
    failed: str = ""
    completion: str = ""
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: dict[TurnId, float] = field(default_factory=dict)
    branch: tuple[int, ...] = ()
    branched: tuple[int, ...] = ()
    role: str = ""

    def fork(self, sample: int) -> Episode:
        """Another episode that begins with the turns of this one, as they are; what is appended to one is not in the
        other. The turns themselves are shared: whoever trains both trains them once (`streams`)."""
        return replace(
            self,
            sample=sample,
            components=dict(self.components),
            turns=list(self.turns),
            messages=list(self.messages),
            turn_rewards=dict(self.turn_rewards),
        )

    def append_prompt(self, tokens: Sequence[int] | np.ndarray, *, parent: TurnId | None = None) -> TurnId:
        """Append given tokens that no one sampled: the prompt, or the messages of a later turn.

        Without a parent it is the beginning of a path: the episode's first prompt, or another one where a chat template
        rewrites even that once other turns follow.
        """
        return self._append("user", tokens, parent)

    def append_sampled(
        self,
        tokens: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        versions: Sequence[int] | np.ndarray,
        *,
        parent: TurnId,
        finish: FinishReason,
    ) -> TurnId:
        """Append what the policy sampled: one log-probability and one weight version for each token.

        Raises:
            ValueError: a length differs, a log-probability is missing (None), NaN, infinite or above 0, a version is
                negative.
        """
        return append_samples([(self, parent)], [SampleResult(tokens, logprobs, versions, finish)])[0]

    def append_recorded(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        version: int,
        *,
        parent: TurnId,
        finish: FinishReason,
    ) -> TurnId:
        """Append what some policy sampled before this run, as it was recorded.

        Args:
            logprobs: one for each token, None where nobody knows them: they are NaN then, and never a number.
            version: of the weights that sampled it, in the count of whatever run they belonged to.

        Raises:
            ValueError: as `append_sampled`.
        """
        if logprobs is not None:
            return self.append_sampled(tokens, logprobs, [version] * len(tokens), parent=parent, finish=finish)
        if version < 0:
            raise ValueError(f"a recorded completion has weight version {version}")
        unknown = np.full(len(tokens), np.nan, dtype=np.float32)
        served = np.full(len(tokens), version, dtype=np.int32)
        unknown.flags.writeable = served.flags.writeable = False
        return self._append("assistant", tokens, parent, unknown, served, finish)

    def append_observation(self, tokens: Sequence[int] | np.ndarray, *, parent: TurnId, role: str = "tool") -> TurnId:
        """Append what the environment answered; never trained."""
        if role == "assistant":
            raise ValueError("an observation cannot have the role 'assistant': sampled tokens go to append_sampled")
        return self._append(role, tokens, parent)

    def streams(self, taken: set[int] | None = None) -> list[TokenStream]:
        """Every path from the root to a leaf, in order of the leaves; each sampled token is trained in exactly one.

        A turn shared by several paths is trained in the first; in the others it is context.

        Args:
            taken: `id` of the turns that are trained elsewhere, to which those of this episode are added.
        """
        return list(Streams([self], taken))

    def path_tokens(self, leaf: TurnId) -> list[int]:
        """Token ids from the beginning of a turn's path to its end."""
        tokens: list[int] = np.concatenate([self.turns[turn].tokens for turn in self._path(leaf)]).tolist()
        return tokens

    def sampled_ids(self) -> np.ndarray:
        """Token ids of all sampled turns, in order: int64, not to be written to."""
        if (alone := self._completion()) is not None:
            return alone.tokens
        found = [turn.tokens for turn in self.turns if turn.role == "assistant"]
        return found[0] if len(found) == 1 else np.concatenate([_NO_TOKENS, *found])

    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled in the whole tree."""
        if (alone := self._completion()) is not None:
            return len(alone.tokens)
        return sum([len(turn.tokens) for turn in self.turns if turn.role == "assistant"])

    def _completion(self) -> Turn | None:
        """The second turn of an episode that is a prompt and its completion, as most are; None of others."""
        if len(self.turns) != 2:
            return None
        prompt, completion = self.turns
        return completion if completion.role == "assistant" and prompt.role != "assistant" else None

    def _append(
        self,
        role: str,
        tokens: Sequence[int] | np.ndarray,
        parent: TurnId | None,
        logprobs: np.ndarray = _NO_LOGPROBS,
        versions: np.ndarray = _NO_VERSIONS,
        finish: str | None = None,
    ) -> TurnId:
        self._check_place(role, parent)
        return self._add(Turn(role, _ids([tokens]), logprobs, versions, parent, finish))

    def _check_place(self, role: str, parent: TurnId | None) -> None:
        """Raise ValueError where no turn of this role can be appended behind `parent`."""
        if self.status is not None:
            raise ValueError(f"the episode has ended ({self.status}); nothing can be appended")
        if parent is None and role != "user":
            raise ValueError("only a prompt has no parent")
        if parent is not None and not 0 <= parent < len(self.turns):
            raise ValueError(f"turn {parent} does not exist; the episode has {len(self.turns)} turns")

    def _add(self, turn: Turn) -> TurnId:
        self.turns.append(turn)
        return len(self.turns) - 1

    def _path(self, leaf: TurnId) -> tuple[TurnId, ...]:
        path: list[TurnId] = []
        at: TurnId | None = leaf
        while at is not None:
            path.append(at)
            at = self.turns[at].parent
        return tuple(reversed(path))

    def paths(self) -> list[tuple[TurnId, ...]]:
        """The turns from the root to each leaf, in order of the leaves."""
        if len(self.turns) == 2 and self.turns[1].parent == 0:  # a prompt and its completion, as most have
            return [(0, 1)]
        parents = {turn.parent for turn in self.turns}
        return [self._path(leaf) for leaf in range(len(self.turns)) if leaf not in parents]


@dataclass
class Group:
    """The episodes of one prompt, in order of their sample index.

    baseline: the most likely completion, which the others are compared with, where the algorithm asks for it.
    """

    number: int
    prompt_id: str
    episodes: list[Episode]
    baseline: Episode | None = None


def append_prompts(episodes: Sequence[Episode], tokens: Sequence[int]) -> None:
    """Append the same prompt to each of some episodes, which share the turn. Raises ValueError as `append_prompt`."""
    for episode in episodes:
        episode._check_place("user", None)
    turn = Turn("user", _ids([tokens]), _NO_LOGPROBS, _NO_VERSIONS, None, None)
    for episode in episodes:
        episode._add(turn)


def append_samples(places: Sequence[tuple[Episode, TurnId]], results: Sequence[SampleResult]) -> list[TurnId]:
    """Append a sampled turn to each of some episodes, behind the turn given; nothing where one of them is refused.

    What belongs to the turns are cuts of arrays that they share: numbers of several are looked at as quickly as those
    of one.

    Raises:
        ValueError: as `Episode.append_sampled`.
    """
    sizes = []
    for (episode, parent), result in zip(places, results, strict=True):
        episode._check_place("assistant", parent)
        size = len(result.tokens)
        if not size == len(result.logprobs) == len(result.versions):
            raise ValueError(
                f"{size} sampled tokens need as many log-probabilities and versions, "
                f"got {len(result.logprobs)} and {len(result.versions)}"
            )
        sizes.append(size)
    # None becomes NaN, which is in no range. A hair above 0 is rounding of log-sum-exp; anything more is a
    # log-probability of something else.
    sure = _joined([result.logprobs for result in results], np.float32)
    served = _joined([result.versions for result in results], np.int32)
    ends = [0, *accumulate(sizes)]
    highest = _most(sure, initial=-np.inf)
    if ends[-1] and not (_least(sure) > -np.inf and highest <= _HAIR):
        which, position = _place(ends, int(np.argmin((sure > -np.inf) & (sure <= _HAIR))))
        raise ValueError(f"sampled token {position} has log-probability {results[which].logprobs[position]}")
    if ends[-1] and _least(served) < 0:
        which, position = _place(ends, int(np.argmax(served < 0)))
        raise ValueError(f"sampled token {position} has weight version {results[which].versions[position]}")
    ids = _ids([result.tokens for result in results])
    if highest > _ONE:
        np.minimum(sure, _ONE, out=sure)
    sure.flags.writeable = served.flags.writeable = False
    found = []
    for (episode, parent), result, at, to in zip(places, results, ends, ends[1:], strict=False):
        found.append(len(episode.turns))
        episode.turns.append(Turn("assistant", ids[at:to], sure[at:to], served[at:to], parent, result.finish))
    return found


class Streams(Sequence[TokenStream]):
    """The streams of some episodes, which lie end to end; each is cut out when it is asked for.

    flat: all of them as a single one, of no turns. lengths: tokens of each. owners: the episode of each.
    """

    def __init__(self, episodes: Sequence[Episode], taken: set[int] | None = None) -> None:
        """Lay out what `Episode.streams` gives of one episode after the other, in a quarter of the time."""
        taken = set() if taken is None else taken
        self.owners: list[Episode] = []
        self._paths: list[tuple[TurnId, ...]] = []
        parts: list[np.ndarray] = []
        trained: list[bool] = []
        sampled: list[Turn] = []
        for episode in episodes:
            for path in episode.paths():
                self.owners.append(episode)
                self._paths.append(path)
                for place in path:
                    turn = episode.turns[place]
                    parts.append(turn.tokens)
                    own = turn.role == "assistant" and id(turn) not in taken
                    trained.append(own)
                    if own:
                        taken.add(id(turn))
                        sampled.append(turn)
        sizes = list(map(len, parts))
        ends = [0, *accumulate(sizes)]
        edges = [0, *accumulate(map(len, self._paths))]
        self._ends = [ends[edge] for edge in edges]
        self.lengths = [end - start for start, end in pairwise(self._ends)]
        mask = np.repeat(np.array(trained, dtype=np.bool_), sizes)
        tokens = np.concatenate([_NO_TOKENS, *parts])
        logprobs, versions = np.full(len(mask), np.nan, dtype=np.float32), np.full(len(mask), -1, dtype=np.int32)
        if sampled:
            logprobs[mask] = np.concatenate([turn.logprobs for turn in sampled])
            versions[mask] = np.concatenate([turn.versions for turn in sampled])
        self.flat = TokenStream(tokens, mask, logprobs, versions, ())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        path = self._paths[at]
        at %= len(self)
        here = slice(self._ends[at], self._ends[at + 1])
        tokens, mask, logprobs, versions, _ = self.flat
        return TokenStream(tokens[here], mask[here], logprobs[here], versions[here], path)


def _joined(parts: Sequence[Sequence[Any] | np.ndarray], dtype: type) -> np.ndarray:
    """What is given end to end, in an array of its own: one of the caller's must neither be locked nor be able to
    change what was written."""
    arrays = [part if isinstance(part, np.ndarray) else np.asarray(part, dtype=dtype) for part in parts]
    # One of several that is not flat cannot be put beside the others.
    if len(arrays[0].shape) != 1:
        raise ValueError("what is appended must be flat: one entry for each token")
    return np.concatenate(arrays, dtype=dtype, casting="unsafe")


def _ids(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Token ids end to end, not to be written to. Raises ValueError where one is below 0."""
    ids = _joined(parts, np.int64)
    if len(ids) and _least(ids) < 0:
        raise ValueError("tokens must be a flat sequence of token ids of at least 0")
    ids.flags.writeable = False
    return ids


def _place(ends: Sequence[int], position: int) -> tuple[int, int]:
    """Which part a position is in, and where in it. ends: 0, and where each part ends."""
    which = bisect_right(ends, position) - 1
    return which, position - ends[which]
