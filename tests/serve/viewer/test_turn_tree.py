"""Streams of an episode put together again as the tree that they came from."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.rollout.episode import Episode
from strop.serve.viewer.turn_tree import turn_tree


def tree(*streams: tuple[list[int], list[int]]) -> list[tuple[int, int, int, int, bool, tuple[int, ...]]]:
    tokens = [np.array(ids, dtype=np.int32) for ids, _ in streams]
    masks = [np.array(mask, dtype=np.bool_) for _, mask in streams]
    return [(n.parent, n.stream, n.start, n.end, n.sampled, n.streams) for n in turn_tree(tokens, masks)]


def test_one_stream_is_a_chain_of_turns() -> None:
    assert tree(([1, 2, 3, 4, 5], [0, 0, 1, 1, 0])) == [
        (-1, 0, 0, 2, False, (0,)),
        (0, 0, 2, 4, True, (0,)),
        (1, 0, 4, 5, False, (0,)),
    ]


def test_a_turn_trained_in_one_stream_is_context_in_the_other() -> None:
    """The second stream does not train tokens 3 and 4 again; they were sampled all the same."""
    assert tree(([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1]), ([1, 2, 3, 4, 7, 8], [0, 0, 0, 0, 0, 1])) == [
        (-1, 0, 0, 2, False, (0, 1)),
        (0, 0, 2, 4, True, (0, 1)),
        (1, 0, 4, 5, False, (0,)),
        (2, 0, 5, 6, True, (0,)),
        (1, 1, 4, 5, False, (1,)),
        (4, 1, 5, 6, True, (1,)),
    ]


def test_two_that_are_trained_are_two_turns_though_they_begin_alike() -> None:
    nodes = tree(([1, 2, 3], [0, 1, 1]), ([1, 2, 9], [0, 1, 1]))
    assert nodes == [(-1, 0, 0, 1, False, (0, 1)), (0, 0, 1, 3, True, (0,)), (0, 1, 1, 3, True, (1,))]


def test_streams_of_nothing_and_of_nothing_shared() -> None:
    assert tree() == []
    assert tree(([], [])) == []
    assert tree(([1], [0]), ([2], [0])) == [(-1, 0, 0, 1, False, (0,)), (-1, 1, 0, 1, False, (1,))]
    # One that ends where another goes on.
    assert tree(([1, 2], [0, 1]), ([1, 2, 3], [0, 0, 1])) == [
        (-1, 0, 0, 1, False, (0, 1)),
        (0, 0, 1, 2, True, (0, 1)),
        (1, 1, 2, 3, True, (1,)),
    ]


IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(st.integers(0, 100), IDS, st.booleans()), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompt=IDS, turns=TURNS)
def test_every_stream_is_a_path_and_every_sampled_token_is_there_once(
    prompt: list[int], turns: list[tuple[int, list[int], bool]]
) -> None:
    episode = Episode(group=0, sample=0, prompt_id="row-000000", row={})
    episode.append_prompt(prompt)
    for where, tokens, sampled in turns:
        parent = where % len(episode.turns)
        if sampled:
            episode.append_sampled(tokens, [-1.0] * len(tokens), [0] * len(tokens), parent=parent, finish="stop")
        else:
            episode.append_observation(tokens, parent=parent)
    streams = episode.streams()
    nodes = turn_tree([s.tokens for s in streams], [s.loss_mask for s in streams])
    for number, stream in enumerate(streams):
        mine = [node for node in nodes if number in node.streams]
        assert [node.start for node in mine] == [0, *(node.end for node in mine[:-1])]
        assert (
            np.concatenate([streams[n.stream].tokens[n.start : n.end] for n in mine]).tolist() == stream.tokens.tolist()
        )
        for node in mine:
            if node.stream == number and node.sampled:
                assert stream.loss_mask[node.start : node.end].all()
    assert sum(node.end - node.start for node in nodes if node.sampled) == episode.sampled_tokens()
