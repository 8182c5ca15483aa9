"""Files of episodes are written while the run goes on; nothing of that is lost, and no error is."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import recipe

from strop.config.loading import load_config
from strop.loops.online import open_run
from strop.loops.step_record import episode_columns
from strop.tracking import episodes
from strop.tracking.episodes import (
    EpisodeColumns,
    EpisodeRecord,
    EpisodeWriter,
    columns_of,
    episode_table,
    read_episodes,
    records_of,
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def one(sample: int) -> EpisodeColumns:
    tokens, mask = np.arange(3), np.ones(3, dtype=bool)
    return columns_of([EpisodeRecord(0, sample, "row-0", "a", "b", None, "stop", 1.0, None, tokens, mask)])


async def one_step(run: Any) -> None:
    groups = await run.collect()
    batch = await run.build_batch(groups)
    stats = await run.update(batch)
    run.step += 1
    await run.publish()
    run.record(groups, batch, stats)


def test_files_are_written_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, order, write = threading.Event(), [], episodes.write_table

    def slow(path: Path, table: Any) -> None:
        go.wait(30)
        order.append(path.name)
        write(path, table)

    monkeypatch.setattr(episodes, "write_table", slow)
    writer = EpisodeWriter()
    writer.write(tmp_path / "first", one(1))
    assert not (tmp_path / "first").exists()
    second = threading.Thread(target=writer.write, args=(tmp_path / "second", one(2)))
    second.start()
    second.join(0.1)
    assert second.is_alive()  # at most one set of records is held
    go.set()
    second.join(30)
    assert writer.close() is None
    assert order == ["first", "second"]
    assert [read_episodes(tmp_path / name)[0].sample for name in order] == [1, 2]


@pytest.mark.parametrize("then", ["write", "wait", "close"])
def test_what_could_not_be_written_is_said_once(then: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")
    writer = EpisodeWriter()
    writer.write(tmp_path / "a file" / "x.parquet", one(1))
    if then == "close":
        assert isinstance(writer.close(), OSError)
        return
    with pytest.raises(OSError, match="a file"):
        writer.write(tmp_path / "second", one(2)) if then == "write" else writer.wait()
    writer.write(tmp_path / "third", one(3))
    assert writer.close() is None
    assert read_episodes(tmp_path / "third")[0].sample == 3


def test_a_checkpoint_waits_for_the_episodes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), episodes.write_table

    def slow(path: Path, table: Any) -> None:
        go.wait(30)
        write(path, table)

    async def steps() -> None:
        async with open_run(load_config(None, data=recipe())) as run:
            await run.begin()
            monkeypatch.setattr(episodes, "write_table", slow)
            await one_step(run)
            path = run.folder / "episodes" / "step-000001.parquet"
            assert not path.exists()
            threading.Timer(0.2, go.set).start()
            await run.save()
            assert len(read_episodes(path)) == 16
            assert (run.folder / "checkpoints" / "latest").read_text().strip() == "step-000001"

    asyncio.run(steps())


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_whose_episodes_cannot_be_written_fails(saves: bool) -> None:
    found: list[Path] = []

    async def steps() -> None:
        async with open_run(load_config(None, data=recipe())) as run:
            await run.begin()
            found.append(run.folder)
            (run.folder / "episodes").write_text("in the way")
            await one_step(run)
            if saves:
                await run.save()

    with pytest.raises(OSError, match="episodes"):
        asyncio.run(steps())
    assert (found[0] / "checkpoints" / "latest").read_text().strip() == "step-000000"


def test_what_belongs_to_another_sequence_is_not_written(tmp_path: Path) -> None:
    episode = SimpleNamespace(
        group=0, sample=0, prompt_id="row-0", completion="", status="stop", reward=1.0, correct=None, components={},
        detail="", row={},
    )  # fmt: skip
    prompts = SimpleNamespace(text=lambda prompt_id: "", answer=lambda episode: None)

    def stream(length: int) -> Any:
        ones = np.ones(length)
        fields = {"tokens": ones.astype(int), "loss_mask": ones > 0, "logprobs": ones, "versions": ones.astype(int)}
        return SimpleNamespace(**fields, number=0, past=False)

    def batch(*lengths: int) -> Any:
        flat = torch.arange(sum(lengths)).float()
        return SimpleNamespace(advantages=flat, extra={"logprobs": -flat}, lengths=lambda: torch.tensor(lengths))

    streams: Any = [(episode, stream(2)), (episode, stream(3))]
    records = records_of(episode_columns(streams, batch(2, 3), [], prompts))  # type: ignore[arg-type]
    assert [one.advantages.tolist() for one in records if one.advantages is not None] == [[0, 1], [2, 3, 4]]
    failed: Any = SimpleNamespace(**vars(episode), streams=lambda: [stream(4)])
    records = records_of(episode_columns(streams, batch(2, 3), [failed], prompts))  # type: ignore[arg-type]
    assert [len(one.tokens) for one in records] == [2, 3, 4]
    assert [None if one.advantages is None else one.advantages.tolist() for one in records] == [[0, 1], [2, 3, 4], None]
    assert [one.trainer_logprobs is None for one in records] == [False, False, True]
    for lengths in ((3, 2), (3, 3), (2, 3, 4), (2,)):
        with pytest.raises(ValueError, match=r"entries for|argument"):
            episode_table(episode_columns(streams, batch(*lengths), [], prompts))  # type: ignore[arg-type]
