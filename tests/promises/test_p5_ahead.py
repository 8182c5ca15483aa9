"""Promise 5, ahead of training: no prompt is lost or trained twice, and no token that was sampled is sampled again.

Runs are killed with SIGKILL, and the same command is given again until they are done. Which completions there are then
depends on the clock; which prompts are trained, in which steps, and how old tokens may be does not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ahead_runs import ages, by_step, trained, versions_of
from killed_processes import LONGEST, Process, kill_at, lines, write
from safetensors.numpy import load_file
from tiny_runs import recipe

from strop.rollout.journal import Note, from_arrays

pytestmark = pytest.mark.slow

BOUND = 2
STEPS = 12
"""Of four prompts each, of which there are 40: two steps belong to the second epoch."""
Start = Callable[[Path], Process]
Notes = dict[tuple[int, ...], Note]


def ahead(**changes: Any) -> dict[str, Any]:
    """Completions so long, and of such different lengths, that a checkpoint finds many of them under way."""
    return recipe(
        **{
            "run.steps": STEPS,
            "checkpoint.every": 2,
            "rollout.max_staleness": BOUND,
            "rollout.max_new_tokens": 24,
            "rollout.engine.max_sequences": 20,
            "training.optimizer.schedule": "constant",
            **changes,
        }
    )


CONVERSATIONS: dict[str, Any] = {
    "environment": {"kind": "python", "factory": "tiny_worlds:Asks", "arguments": {"pause": 0.002}},
    "rewards.verifiers": [{"kind": "environment"}],
    "model.create.context": 64,
    "rollout.max_new_tokens": 30,
    "environment.max_turn_tokens": 12,
    # So few that sampling is what a step waits for: then a checkpoint finds some half way, however quick the rest is.
    "rollout.engine.max_sequences": 6,
}


# --- what a run trained --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, str, int]]:
    """What a run trains that nobody disturbs, which does not sample ahead."""
    from strop.config.loading import load_config
    from strop.loops.train import train

    folder = tmp_path_factory.mktemp("order")
    data = ahead(**{"rollout.max_staleness": 0, "rollout.max_new_tokens": 4, "run.folder": str(folder)})
    found = trained(train(load_config(None, data=data)).folder)
    assert [group for _, group, _, _ in found] == list(range(4 * STEPS))
    assert len({prompt for _, _, prompt, _ in found}) == 40
    return found


def whole(run: Path, order: list[tuple[int, int, str, int]], *, bound: int = BOUND, steps: int = STEPS) -> None:
    """The run is done, trained every prompt once and in order, and no token older than the bound."""
    assert lines(run, "train") == list(range(1, steps + 1))
    assert trained(run) == [entry for entry in order if entry[0] <= steps]
    found = ages(run)
    assert min(found) >= 0
    assert max(found) <= bound
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def latest(run: Path) -> tuple[int, Notes]:
    """The step of the newest checkpoint, and what it says was under way."""
    folder = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    path = folder / "state" / "under-way.safetensors"
    return int(folder.name[5:]), from_arrays(load_file(path)) if path.exists() else {}


def went_on(run: Path, notes: Notes) -> tuple[int, int]:
    """Check that what was noted was trained as it was noted, token by token. Returns how many that had ended, and how
    many that had not and went on, half sampled before the kill and half after it."""
    episodes = {(r.group, r.sample): r for records in by_step(run).values() for r in records if r.stream == 0}
    ended = spanned = 0
    for stream, note in notes.items():
        record = episodes.get(stream[:2])
        if record is None:  # of a group that no step has trained
            continue
        turn = -stream[3] if len(stream) > 3 else 0
        starts, ends = runs_of(record.loss_mask)
        at, stop = starts[turn], ends[turn]
        size = len(note.result.tokens)
        assert size <= stop - at
        assert record.versions is not None
        assert record.sampler_logprobs is not None
        np.testing.assert_array_equal(record.tokens[:at], note.prompt)
        np.testing.assert_array_equal(record.tokens[at : at + size], note.result.tokens)
        np.testing.assert_array_equal(record.versions[at : at + size], note.result.versions)
        np.testing.assert_array_equal(record.sampler_logprobs[at : at + size], note.result.logprobs)
        ended += note.ended
        if note.ended:
            assert size == stop - at
        else:
            spanned += size < stop - at
    return ended, spanned


def runs_of(mask: np.ndarray) -> tuple[list[int], list[int]]:
    """Where the turns of the policy begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int))).tolist()
    return edges[::2], edges[1::2]


def output(folder: Path) -> str:
    return (folder / "output.txt").read_text()


# --- killed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "seed"), [({}, 1), (CONVERSATIONS, 2)], ids=["completions", "conversations"])
def test_killed_at_random_moments(
    tmp_path: Path, nursery: Start, order: list[Any], changes: dict[str, Any], seed: int
) -> None:
    folder = write(tmp_path / "killed", ahead(**changes))
    run = folder / "runs" / "recipe"
    chance = random.Random(seed)
    checkpoints = []
    for step in sorted(chance.sample(range(2, STEPS), 3)):
        kill_at(nursery(folder), run, step, after=chance.random() * 0.04)
        checkpoints.append(latest(run))
    assert nursery(folder).wait() == 0, output(folder)
    whole(run, order)
    assert len(json.loads((run / "run.json").read_text())["resumed"]) == 3
    # Of what an earlier checkpoint had, a later kill may have had the rest sampled anew, but never what was noted.
    found = [went_on(run, notes) for _, notes in checkpoints]
    assert sum(ended for ended, _ in found) >= 5, found
    assert sum(spanned for _, spanned in found) >= 3, found
    assert any(len(set(versions)) > 1 for versions in versions_of(run))


def test_a_conversation_is_told_again_and_not_sampled_again(tmp_path: Path, nursery: Start, order: list[Any]) -> None:
    """Turns that had ended are answered by the journal, so that the environment comes to where it was."""
    folder = write(tmp_path / "killed", ahead(**{**CONVERSATIONS, "run.steps": 6}))
    run = folder / "runs" / "recipe"
    kill_at(nursery(folder), run, 4, after=0.03)
    _, notes = latest(run)
    turns: dict[tuple[int, ...], list[int]] = {}
    for stream in notes:
        turns.setdefault(stream[:2], []).append(-stream[3] if len(stream) > 3 else 0)
    assert any(len(numbers) >= 2 for numbers in turns.values()), "no conversation was in its second turn"
    assert nursery(folder).wait() == 0, output(folder)
    whole(run, order, steps=6)
    assert went_on(run, notes)[0] >= 5


def test_interrupted_and_asked_to_leave(tmp_path: Path, nursery: Start, order: list[Any]) -> None:
    """SIGUSR1 saves what is under way; Ctrl-C and SIGTERM end at once, and nothing hangs."""
    folder = write(tmp_path / "killed", ahead(**CONVERSATIONS))
    run = folder / "runs" / "recipe"
    done = 1
    for number, code in [(signal.SIGINT, 130), (signal.SIGUSR1, 0), (signal.SIGTERM, 130)]:
        process = nursery(folder)
        # Its first step, so that many are left where the signal comes late.
        wait_for(process, run, done + 1)
        os.kill(process.pid, number)
        assert process.wait() == code, f"{number.name}, steps {lines(run, 'train')}\n{output(folder)}"
        done = lines(run, "train")[-1]
        status = json.loads((run / "run.json").read_text())["status"]
        assert status == "interrupted"
        if number == signal.SIGUSR1:
            step, notes = latest(run)
            assert step == done
            assert notes
    assert "Traceback" not in output(folder)
    assert "never retrieved" not in output(folder)
    assert nursery(folder).wait() == 0, output(folder)
    whole(run, order)
    went_on(run, notes)


def wait_for(process: Process, run: Path, step: int) -> None:
    give_up = time.monotonic() + LONGEST
    while step not in lines(run, "train"):
        assert process.poll() is None, output(process.folder)
        assert time.monotonic() < give_up
        time.sleep(0.002)


# --- going on otherwise --------------------------------------------------------------------------------------------


def go_on(nursery: Start, folder: Path, run: Path, bounds: list[int], order: list[Any], **others: Any) -> list[Notes]:
    """A run that is killed after every third step and goes on with another bound each time."""
    found = []
    for number, bound in enumerate(bounds):
        data = ahead(**{"rollout.max_staleness": bound, **others})
        (folder / "recipe.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        process = nursery(folder)
        if number + 1 < len(bounds):
            kill_at(process, run, 3 * number + 3, after=0.01)
            found.append(latest(run)[1])
        else:
            assert process.wait() == 0, output(folder)
    return found


@pytest.mark.parametrize("bounds", [[2, 1, 0], [0, 2, 0, 1], [1, 3]], ids=str)
def test_the_bound_may_change(tmp_path: Path, nursery: Start, order: list[Any], bounds: list[int]) -> None:
    folder = write(tmp_path / "killed", ahead())
    run = folder / "runs" / "recipe"
    # One step ahead is so little that all of it could have ended when the checkpoint looks, were it sampled together.
    slow = {"rollout.engine.max_sequences": 4} if bounds == [1, 3] else {}
    notes = go_on(nursery, folder, run, bounds, order, **slow)
    whole(run, order, bound=max(bounds))
    # After the last change none is older than it says.
    last = 3 * (len(bounds) - 1) + 1
    for step, records in by_step(run).items():
        if step <= last:
            continue
        for record in records:
            assert record.versions is not None
            assert (step - 1 - record.versions[record.loss_mask]).max() <= bounds[-1], step
    if bounds == [1, 3]:
        assert went_on(run, notes[0])[1] >= 1


def test_the_number_of_steps_may_change(tmp_path: Path, nursery: Start, order: list[Any]) -> None:
    """To fewer than what is under way, and to more than were to be: nothing is begun that no step trains."""
    folder = write(tmp_path / "killed", ahead())
    run = folder / "runs" / "recipe"
    kill_at(nursery(folder), run, 6, after=0.02)
    _, begun = latest(run)
    assert begun
    for steps in (7, STEPS):
        data = ahead(**{"run.steps": steps})
        (folder / "recipe.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        assert nursery(folder).wait() == 0, output(folder)
        whole(run, order, steps=steps)
    _, notes = latest(run)
    assert notes == {}
    went_on(run, begun)


@pytest.mark.parametrize("changes", [{"rollout.in_flight_updates": False}], ids=["one version"])
def test_completions_of_one_version_are_so_after_a_kill(
    tmp_path: Path, nursery: Start, order: list[Any], changes: dict[str, Any]
) -> None:
    folder = write(tmp_path / "killed", ahead(**changes))
    run = folder / "runs" / "recipe"
    for step in (3, 8):
        kill_at(nursery(folder), run, step, after=0.02)
    assert nursery(folder).wait() == 0, output(folder)
    whole(run, order)
    assert max(ages(run)) >= 1
    assert all(len(set(versions)) == 1 for versions in versions_of(run))
