"""A run outlives environments that fail now and then, and refuses those that could never be played."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tiny_runs import recipe, steps_of

from strop.config.loading import load_config
from strop.environments import Done
from strop.errors import UserError
from strop.loops.train import train
from strop.tracking.episodes import read_episodes


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path


class Moody:
    """Plays eight episodes as it should; later ones fail in turn, in other ways."""

    made: ClassVar[int] = 0

    def __init__(self) -> None:
        Moody.made += 1
        self.mood = Moody.made % 6 if Moody.made > 8 else 5
        if self.mood == 0:
            raise OSError("no place left")

    async def reset(self, row: Any) -> Any:
        return "Begin." if self.mood == 1 else None

    async def step(self, turn: Any) -> Any:
        if self.mood == 2:
            raise SystemExit("enough")
        if self.mood == 3:
            raise asyncio.CancelledError("never mind")
        if self.mood == 4:
            return Done(reward=float("nan"))
        return Done(reward=float(len(turn.text) % 2))

    async def close(self) -> None: ...


class Wordless(Moody):
    async def step(self) -> Any: ...  # type: ignore[override]


def moody(name: str) -> Mapping[str, Any]:
    return recipe(
        **{
            "environment": {"kind": "python", "factory": f"{__name__}:{name}"},
            "rollout": {"groups_per_step": 4, "group_size": 2, "max_new_tokens": 4},
            "rewards.verifiers": [{"kind": "environment"}],
            "rewards.max_error_share": 1.0,
        }
    )


def test_episodes_fail_and_the_run_goes_on() -> None:
    Moody.made = 0
    summary = train(load_config(None, data=moody("Moody")), fresh=True)
    assert len([line for kind, _, line in steps_of(summary.folder) if kind == "train"]) == 2
    records = read_episodes(summary.folder / "episodes" / "step-000002.parquet")
    told = "\n".join(record.detail for record in records)
    # Episodes that failed before their first turn have no tokens to record.
    for says in ("SystemExit: enough", "CancelledError: never mind", "whose reward is nan"):
        assert says in told
    assert Moody.made == 16
    assert {record.status for record in records if record.detail} == {"environment_error"}


def test_methods_with_other_arguments_are_refused_before_anything_is_written(workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    with pytest.raises(UserError, match=r"`step` of .* takes other arguments") as found:
        train(load_config(None, data=moody("Wordless")), fresh=True)
    assert found.value.exit_code == 2
    assert not [path for path in workplace.rglob("*.safetensors") if path not in before]
