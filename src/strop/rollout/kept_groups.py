"""Past groups as flat arrays, for a checkpoint: what comes back trains bit for bit as what was there.

Turns that several episodes share (trees) are kept once, and shared again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from strop.rollout.episode import Episode, Group, Status, Turn
from strop.rollout.past_groups import PastGroup

Arrays = dict[str, np.ndarray]
_NONE = -1
"""In the place of a number where there is none."""


def as_arrays(kept: Sequence[PastGroup]) -> Arrays:
    """Flat arrays with lengths; `from_arrays` reads them."""
    episodes = [e for one in kept for e in [*one.group.episodes, *([] if one.baseline is None else [one.baseline])]]
    turns = list({id(turn): turn for episode in episodes for turn in episode.turns}.values())
    place = {id(turn): at for at, turn in enumerate(turns)}
    return {
        "groups": np.array([one.number for one in kept], np.int64),
        "group_sizes": np.array([len(one.group.episodes) for one in kept], np.int64),
        "group_baselines": np.array([one.baseline is not None for one in kept], np.int8),
        "group_versions": np.array([one.version for one in kept], np.int64),
        "group_advantages": np.array([one.advantage for one in kept], np.float64),
        "group_pass_rates": np.array([one.pass_rate for one in kept], np.float64),
        **_texts("group_prompts", [one.group.prompt_id for one in kept]),
        "samples": np.array([e.sample for e in episodes], np.int64),
        "rewards": np.array([e.reward for e in episodes], np.float64),
        **_ragged("episode_turns", [[place[id(turn)] for turn in e.turns] for e in episodes], np.int64),
        **_texts("episodes", [json.dumps(_described(e), default=str) for e in episodes]),
        **_ragged("turn_tokens", [turn.tokens for turn in turns], np.int32),
        **_ragged("turn_logprobs", [turn.logprobs for turn in turns], np.float32),
        **_ragged("turn_versions", [turn.versions for turn in turns], np.int32),
        "turn_parents": np.array([_NONE if turn.parent is None else turn.parent for turn in turns], np.int64),
        **_texts("turns", [json.dumps([turn.role, turn.finish]) for turn in turns]),
    }


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[PastGroup]:
    """The groups that `as_arrays` was given; their turns cannot be written to."""
    turns = [
        _turn(*parts)
        for parts in zip(
            _parts(arrays, "turns", _text),
            _parts(arrays, "turn_tokens"),
            _parts(arrays, "turn_logprobs"),
            _parts(arrays, "turn_versions"),
            arrays["turn_parents"].tolist(),
            strict=True,
        )
    ]
    numbers, sizes, baselines = (arrays[name].tolist() for name in ("groups", "group_sizes", "group_baselines"))
    prompts = _parts(arrays, "group_prompts", _text)
    belongs = [at for at, size in enumerate(sizes) for _ in range(size + baselines[at])]
    episodes = [
        Episode(
            group=numbers[at],
            sample=sample,
            prompt_id=prompts[at],
            reward=reward,
            turns=[turns[turn] for turn in own.tolist()],
            **_read(json.loads(text)),
        )
        for at, sample, reward, own, text in zip(
            belongs,
            arrays["samples"].tolist(),
            arrays["rewards"].tolist(),
            _parts(arrays, "episode_turns"),
            _parts(arrays, "episodes", _text),
            strict=True,
        )
    ]
    rest = iter(episodes)
    return [
        PastGroup(
            Group(number, prompt, [next(rest) for _ in range(size)]), next(rest) if has_baseline else None, *numeric
        )
        for number, prompt, size, has_baseline, *numeric in zip(
            numbers,
            prompts,
            sizes,
            baselines,
            *(arrays[f"group_{name}"].tolist() for name in ("versions", "advantages", "pass_rates")),
            strict=True,
        )
    ]


def _described(episode: Episode) -> dict[str, Any]:
    """What of an episode is neither a token nor a number that is computed with."""
    return {
        "row": episode.row,
        "status": None if episode.status is None else str(episode.status),
        "components": {name: float(score) for name, score in episode.components.items()},
        "correct": None if episode.correct is None else bool(episode.correct),
        "detail": episode.detail,
        "failed": episode.failed,
        "completion": episode.completion,
        "messages": episode.messages,
        "turn_rewards": [(turn, float(reward)) for turn, reward in episode.turn_rewards.items()],
        "branch": episode.branch,
        "branched": episode.branched,
        "role": episode.role,
    }


def _read(found: dict[str, Any]) -> dict[str, Any]:
    """`_described` as arguments of `Episode`."""
    return found | {
        "status": None if found["status"] is None else Status(found["status"]),
        "turn_rewards": {int(turn): float(reward) for turn, reward in found["turn_rewards"]},
        "branch": tuple(found["branch"]),
        "branched": tuple(found["branched"]),
    }


def _turn(text: str, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, parent: int) -> Turn:
    role, finish = json.loads(text)
    arrays = (tokens.astype(np.int64), logprobs.copy(), versions.copy())
    for array in arrays:
        array.setflags(write=False)
    return Turn(role, *arrays, parent=None if parent == _NONE else parent, finish=finish)


def _ragged(name: str, parts: Sequence[Any], dtype: Any) -> Arrays:
    flat = np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])
    return {name: flat, f"{name}_lengths": np.array([len(part) for part in parts], np.int64)}


def _texts(name: str, texts: Iterable[str]) -> Arrays:
    return _ragged(name, [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts], np.uint8)


def _text(part: np.ndarray) -> str:
    return part.tobytes().decode("utf-8", "surrogatepass")


def _parts(
    arrays: Mapping[str, np.ndarray], name: str, read: Callable[[np.ndarray], Any] = lambda part: part
) -> list[Any]:
    lengths = arrays[f"{name}_lengths"]
    return [read(part) for part in np.split(arrays[name], np.cumsum(lengths)[:-1])] if len(lengths) else []
