"""The single writer: whatever is appended, streams hold exactly what was sampled, once (promise P3)."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.engine import SampleResult
from strop.rollout.episode import Episode, Status, Streams, append_prompts, append_samples

TOKENS = st.lists(st.integers(0, 50_000), max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> Episode:
    """An episode of random turns, each hung below any earlier one."""
    episode = Episode(0, 0)
    root = episode.append_prompt(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)))
    turns = [root]
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from(turns))
        kind = draw(st.sampled_from(["sampled", "observation", "prompt"]))
        tokens = draw(TOKENS)
        if kind == "sampled":
            logprobs = draw(st.lists(st.floats(-50, 0), min_size=len(tokens), max_size=len(tokens)))
            versions = draw(st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens)))
            turns.append(episode.append_sampled(tokens, logprobs, versions, parent=parent, finish="stop"))
        elif kind == "observation":
            turns.append(episode.append_observation(tokens, parent=parent))
        else:
            turns.append(episode.append_prompt(tokens, parent=parent))
    return episode


@settings(max_examples=200, deadline=None)
@given(trees())
def test_each_sampled_token_is_trained_in_exactly_one_stream(episode: Episode) -> None:
    streams = episode.streams()
    assert sum(int(s.loss_mask.sum()) for s in streams) == episode.sampled_tokens()
    leaves = [n for n in range(len(episode.turns)) if n not in {t.parent for t in episode.turns}]
    assert [s.turns[-1] for s in streams] == leaves
    trained: dict[int, int] = {}
    for stream in streams:
        size = len(stream.tokens)
        assert stream.loss_mask.shape == stream.logprobs.shape == stream.versions.shape == (size,)
        assert stream.tokens.dtype == np.int64
        assert stream.logprobs.dtype == np.float32
        assert stream.versions.dtype == np.int32
        assert (np.isnan(stream.logprobs) == ~stream.loss_mask).all()
        assert ((stream.versions == -1) == ~stream.loss_mask).all()
        # The path is connected, and the stream is the turns on it end to end, unchanged.
        assert episode.turns[stream.turns[0]].parent is None
        start = 0
        for above, turn_id in zip((None, *stream.turns), stream.turns, strict=False):
            turn = episode.turns[turn_id]
            assert turn.parent == above
            span = slice(start, start + len(turn.tokens))
            start = span.stop
            assert (stream.tokens[span] == turn.tokens).all()
            mask = stream.loss_mask[span]
            assert not len(mask) or mask.all() or not mask.any()
            if mask.any():
                assert turn.sampled
                trained[turn_id] = trained.get(turn_id, 0) + 1
                assert (stream.logprobs[span] == turn.logprobs).all()
                assert (stream.versions[span] == turn.versions).all()
        assert start == size
    assert trained == {n: 1 for n, t in enumerate(episode.turns) if t.sampled and len(t.tokens)}


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), max_size=4))
def test_streams_of_several_episodes_are_those_of_one_after_the_other(episodes: list[Episode]) -> None:
    # The second is given twice: what is trained in one place is context in the other.
    episodes = [*episodes, *episodes[1:2]]
    taken: set[int] = set()
    alone = [episode.streams(taken) for episode in episodes]
    together = Streams(episodes)
    assert [id(owner) for owner in together.owners] == [
        id(episode) for episode, streams in zip(episodes, alone, strict=True) for _ in streams
    ]
    assert together.lengths == [len(stream.tokens) for stream in together] == [len(one.tokens) for one in together[:]]
    assert len(together.flat.tokens) == sum(together.lengths)
    if together:
        assert together[-1].turns == together[len(together) - 1].turns
    with pytest.raises(IndexError):
        together[len(together)]
    for ours, theirs in zip(together, chain.from_iterable(alone), strict=True):
        assert ours.turns == theirs.turns
        for one, other in zip(ours[:4], theirs[:4], strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_what_is_written_together_is_what_is_written_one_by_one() -> None:
    results = [
        SampleResult([5, 6], [-1.0, 3e-7], [0, 1], "stop"),
        SampleResult([], [], [], "aborted"),
        SampleResult(np.array([7], np.int32), np.array([-0.5], np.float32), np.array([2], np.int32), "length"),
    ]
    together, alone = ([Episode(0, sample) for sample in range(3)] for _ in range(2))
    append_prompts(together, [1, 2])
    assert append_samples([(episode, 0) for episode in together], results) == [1, 1, 1]
    for episode, result in zip(alone, results, strict=True):
        prompt = episode.append_prompt([1, 2])
        episode.append_sampled(result.tokens, result.logprobs, result.versions, parent=prompt, finish=result.finish)
    for one, other in zip(together, alone, strict=True):
        for ours, theirs in zip(one.turns, other.turns, strict=True):
            assert (ours.role, ours.parent, ours.finish) == (theirs.role, theirs.parent, theirs.finish)
            for name in ("tokens", "logprobs", "versions"):
                found, expected = getattr(ours, name), getattr(theirs, name)
                assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
                assert not found.flags.writeable


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (SampleResult([5, 6], [-1.0, 0.5], [0, 0], "stop"), "sampled token 1 has log-probability 0.5"),
        (SampleResult([5, 6], [None, -1.0], [0, 0], "stop"), "sampled token 0 has log-probability None"),  # type: ignore[list-item]
        (SampleResult([5, 6], [-1.0, -1.0], [0, -3], "stop"), "sampled token 1 has weight version -3"),
        (SampleResult([5, 6], [-1.0], [0, 0], "stop"), "2 sampled tokens need as many"),
        (SampleResult([5, -6], [-1.0, -1.0], [0, 0], "stop"), "token ids of at least 0"),
    ],
)
def test_one_that_is_refused_leaves_nothing_in_any_episode_and_is_told_by_its_own_token(
    wrong: SampleResult, told: str
) -> None:
    episodes = [Episode(0, sample) for sample in range(3)]
    append_prompts(episodes, [1])
    right = SampleResult([1, 2, 3], [-1.0] * 3, [0] * 3, "stop")
    with pytest.raises(ValueError, match=told):
        append_samples([(episode, 0) for episode in episodes], [right, wrong, right])
    assert [len(episode.turns) for episode in episodes] == [1, 1, 1]


def episode_with_prompt() -> tuple[Episode, int]:
    episode = Episode(0, 0)
    return episode, episode.append_prompt([1, 2])


def sampled(episode: Episode, parent: int, **changes: Any) -> int:
    given_: dict[str, Any] = {"tokens": [5, 6], "logprobs": [-1.0, -2.0], "versions": [0, 0], **changes}
    return episode.append_sampled(
        given_["tokens"], given_["logprobs"], given_["versions"], parent=parent, finish="stop"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-1.0]},
        {"versions": [0]},
        {"tokens": [5]},
        {"logprobs": [-1.0, None]},
        {"logprobs": [math.nan, -1.0]},
        {"logprobs": [-1.0, 0.5]},
        {"logprobs": [-1.0, -math.inf]},
        {"versions": [0, -1]},
        {"tokens": [5, -1]},
        {"tokens": [[5], [6]]},
    ],
    ids=str,
)
def test_the_writer_refuses_what_is_not_one_logprob_and_version_a_token(changes: dict[str, Any]) -> None:
    episode, prompt = episode_with_prompt()
    with pytest.raises(ValueError):
        sampled(episode, prompt, **changes)
    assert len(episode.turns) == 1, "a refused turn must leave nothing behind"
    sampled(episode, prompt)


def test_rounding_above_zero_is_taken_for_zero() -> None:
    episode, prompt = episode_with_prompt()
    sampled(episode, prompt, logprobs=[3e-7, -1.0])
    assert episode.streams()[0].logprobs[2] == 0.0


def test_nothing_is_appended_after_the_end() -> None:
    episode, prompt = episode_with_prompt()
    sampled(episode, prompt)
    episode.status = Status.STOP
    for append in (
        lambda: sampled(episode, prompt),
        lambda: episode.append_observation([1], parent=prompt),
        lambda: episode.append_prompt([1], parent=prompt),
    ):
        with pytest.raises(ValueError, match="ended"):
            append()
    assert len(episode.turns) == 2


def test_only_a_prompt_begins_a_path_and_there_are_no_gaps() -> None:
    episode, _ = episode_with_prompt()
    with pytest.raises(ValueError, match="only a prompt"):
        episode.append_observation([3], parent=None)  # type: ignore[arg-type]
    for parent in (1, 7, -1):
        with pytest.raises(ValueError, match="does not exist"):
            episode.append_observation([3], parent=parent)
    with pytest.raises(ValueError, match="append_sampled"):
        episode.append_observation([3], parent=0, role="assistant")


def test_a_rewritten_prompt_begins_a_path_of_its_own() -> None:
    episode, prompt = episode_with_prompt()
    sampled(episode, prompt)
    again = episode.append_prompt([9, 9])
    episode.append_sampled([4], [-0.5], [0], parent=again, finish="stop")
    first, second = episode.streams()
    assert second.tokens.tolist() == [9, 9, 4]
    assert episode.path_tokens(3) == [9, 9, 4]
    assert int(first.loss_mask.sum() + second.loss_mask.sum()) == episode.sampled_tokens()


def test_what_was_written_cannot_be_edited() -> None:
    episode, prompt = episode_with_prompt()
    sampled(episode, prompt)
    for turn in episode.turns:
        for array in (turn.tokens, turn.logprobs, turn.versions):
            if len(array):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 9
    # A stream is a copy: what a reader does to it stays with the reader.
    episode.streams()[0].tokens[:] = 0
    assert episode.streams()[0].tokens.tolist() == [1, 2, 5, 6]


def test_what_the_caller_does_to_its_arrays_does_not_reach_the_episode() -> None:
    episode, prompt = episode_with_prompt()
    buffer = np.asarray([5, 6, 7, 8], dtype=np.int64)
    versions = np.asarray([1, 2, 0, 0], dtype=np.int32)
    logprobs = np.asarray([-1.0, -2.0, 0.0, 0.0], dtype=np.float32)
    sampled(episode, prompt, tokens=buffer[:2], logprobs=logprobs[:2], versions=versions[:2])
    buffer[:] = 0
    versions[:] = 9
    logprobs[:] = -9
    stream = episode.streams()[0]
    assert stream.tokens.tolist() == [1, 2, 5, 6]
    assert stream.versions.tolist() == [-1, -1, 1, 2]
    assert stream.logprobs[2:].tolist() == [-1.0, -2.0]


def test_the_end_token_that_was_sampled_is_trained_even_where_it_pads() -> None:
    end = 0
    episode = Episode(0, 0)
    prompt = episode.append_prompt([end, end, 4])
    sampled(episode, prompt, tokens=[4, end])
    assert episode.streams()[0].loss_mask.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(("status", "trainable"), [(s, s in ("stop", "length")) for s in Status])
def test_an_error_is_never_trainable(status: Status, trainable: bool) -> None:
    assert status.trainable == trainable


def test_what_was_recorded_elsewhere_keeps_its_version_and_unknown_log_probabilities_stay_unknown() -> None:
    known, unknown = Episode(0, 0), Episode(0, 1)
    for episode, logprobs in ((known, [-0.5, -1.5]), (unknown, None)):
        turn = episode.append_prompt([1, 2])
        episode.append_recorded([3, 4], logprobs, 7, parent=turn, finish="stop")
        [stream] = episode.streams()
        assert stream.loss_mask.tolist() == [False, False, True, True]
        assert stream.versions.tolist() == [-1, -1, 7, 7]
        assert episode.sampled_tokens() == 2
    assert known.streams()[0].logprobs[2:].tolist() == [-0.5, -1.5]
    assert np.isnan(unknown.streams()[0].logprobs).all()
    # The writer of what this run samples still refuses a token without its log-probability.
    episode = Episode(0, 0)
    turn = episode.append_prompt([1])
    for wrong in ([math.nan], [0.5], [-1.0, -1.0]):
        with pytest.raises(ValueError, match="log-probabilit"):
            episode.append_recorded([3], wrong, 0, parent=turn, finish="stop")
    with pytest.raises(ValueError, match="version -1"):
        episode.append_recorded([3], None, -1, parent=turn, finish="stop")
