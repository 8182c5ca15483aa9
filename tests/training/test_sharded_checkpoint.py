"""A checkpoint of some ranks goes on on any other number of them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Case, Later, Moved, held_of_rank, moved, moved_of_rank, run_ranks

ONE = Case()
WRITERS = {
    "fsdp2": Case(shards=2, fsdp=True),
    "ddp2": Case(shards=2),
    "tensor2": Case(tensor=2),
    "fsdp2-qwen3": Case(shards=2, fsdp=True, shape="qwen3"),
    "fsdp2-lora": Case(shards=2, fsdp=True, lora=True),
    "context2-moe": Case(context=2, fsdp=True, shape="qwen3_moe"),
    "fsdp2-bfloat16": Case(shards=2, fsdp=True, bfloat16=True),
    "tensor2-bfloat16": Case(tensor=2, bfloat16=True),
}
READERS = {
    "fsdp4": Case(shards=4, fsdp=True),
    "ddp4": Case(shards=4),
    "fsdp2-tensor2": Case(shards=2, tensor=2, fsdp=True),
    "hsdp4": Case(replicas=2, shards=2, fsdp=True),
}


def same_model(reader: Case, writer: Case) -> Case:
    return replace(reader, shape=writer.shape, lora=writer.lora, bfloat16=writer.bfloat16)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """What came next, by (who wrote, who read); a writer that goes on itself is its own reader."""
    folder: Path = tmp_path_factory.mktemp("moved")
    results: dict[tuple[str, str], Any] = {}
    written = run_ranks(
        2, moved_of_rank, [Moved(case, folder / name, load=False) for name, case in WRITERS.items()], folder / "two"
    )
    results |= {(name, name): result for name, result in zip(WRITERS, written, strict=True)}
    for name, case in WRITERS.items():
        results[name, "one"] = moved(Moved(same_model(ONE, case), folder / name, load=True))
    results["one", "one"] = moved(Moved(ONE, folder / "one", load=False))
    pairs = [(w, r) for w in WRITERS for r in READERS] + [("one", r) for r in READERS]
    work = [Moved(same_model(READERS[r], WRITERS.get(w, ONE)), folder / w, load=True) for w, r in pairs]
    work.append(Moved(READERS["fsdp2-tensor2"], folder / "four", load=False))
    read = run_ranks(4, moved_of_rank, work, folder / "read")
    results |= zip([*pairs, ("four", "four")], read, strict=True)
    results["four", "one"] = moved(Moved(ONE, folder / "four", load=True))
    return results


@pytest.mark.parametrize("writer", [*WRITERS, "one", "four"])
def test_a_checkpoint_goes_on_on_another_number_of_ranks(writer: str, found: dict[tuple[str, str], Any]) -> None:
    own = found[writer, writer]
    others = {reader: result for (by, reader), result in found.items() if by == writer and reader != writer}
    assert others
    rounding = 1e-2 if "bfloat16" in writer else 1e-5
    for reader, result in others.items():
        for name, master in own["masters"].items():
            torch.testing.assert_close(result["masters"][name], master, rtol=0, atol=0, msg=f"{reader}: {name}")
        assert result["model"].keys() == own["model"].keys()
        for name, weight in own["model"].items():
            torch.testing.assert_close(result["model"][name], weight, rtol=1e-6, atol=1e-7, msg=f"{reader}: {name}")
        assert result["loss"] == pytest.approx(own["loss"], rel=rounding, abs=rounding / 100), reader
        assert result["stats"]["loss"] == pytest.approx(own["stats"]["loss"], rel=rounding, abs=rounding / 100), reader
        assert result["stats"]["grad_norm"] == pytest.approx(own["stats"]["grad_norm"], rel=rounding), reader
        for name, weight in own["weights"].items() if "bfloat16" not in writer else ():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-4, atol=2e-5, msg=f"{reader}: {name}")


def files_of(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # It names the folder, and has a number that is drawn.
    about = pickle.loads(found.pop("sharded/.metadata"))
    about.storage_meta = None
    return found | {"metadata": repr(about).encode()}


HELD = {name: WRITERS[name] for name in ("fsdp2", "ddp2", "tensor2", "fsdp2-lora", "fsdp2-bfloat16")}


def test_what_ranks_hold_is_written_later_as_it_was(tmp_path: Path) -> None:
    work = [Later(case, tmp_path / name) for name, case in HELD.items()]
    for one, found in zip(work, run_ranks(2, held_of_rank, work, tmp_path / "ranks"), strict=True):
        at_once, later = (files_of(one.folder / name) for name in ("at-once", "later"))
        assert at_once.keys() == later.keys()
        assert {"sharded/__0_0.distcp", "sharded/__1_0.distcp", "model/model.safetensors"} <= at_once.keys()
        for name, content in at_once.items():
            assert later[name] == content, f"{one.case.name}: {name}"
        assert found["states"] == [{"updates": 1}, {"updates": 1}]
        assert found["updates"] == 3
        needed, free = found["room"]
        # At least the model. Of what is the same on all ranks each may hold a copy, and files have names in them.
        written = sum(len(content) for name, content in at_once.items() if name.endswith(("distcp", "safetensors")))
        assert len(at_once["model/model.safetensors"]) < needed < 2.5 * written
        assert free > 1 << 20
