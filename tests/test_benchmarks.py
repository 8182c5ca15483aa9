"""The benchmarks run, and their sides compute the same thing; how fast they are is not a matter for tests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts find each other beside themselves; what they change in this process is put back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def module(name: str) -> ModuleType:
    return import_module(name)


def smoke(name: str, out: Path) -> dict[str, Any]:
    """Numbers of a smoke run, as its file has them."""
    module(name).main(["--smoke", "--threads=1", f"--out={out}"])
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["smoke"] is True
    assert result["versions"]["torch"] == torch.__version__
    numbers: dict[str, Any] = result["numbers"]
    return numbers


def test_sampling_gives_rates_and_the_trainers_logprobs(tmp_path: Path) -> None:
    numbers = smoke("sampling", tmp_path / "r.json")
    for case in ("ragged", "groups"):
        rates = numbers[case]["tokens_per_second"]
        assert math.isclose(numbers[case]["ratio"], rates["local"] / rates["generate"])
    for gap in numbers["agreement"].values():
        assert gap["tokens"] == numbers["sizes"]["sequences"] * numbers["sizes"]["new_tokens"]
        assert gap["mean"] < 1e-5


def test_sandboxes_are_timed(tmp_path: Path) -> None:
    numbers = smoke("sandbox", tmp_path / "r.json")
    assert set(numbers["latency_ms"]) == {"warm", "cold", "check", "ten_ms", "interpreter"}
    for spread in numbers["latency_ms"].values():
        assert 0 < spread["least"] <= spread["median"] <= spread["p95"] <= spread["largest"]
    assert numbers["latency_ms"]["ten_ms"]["least"] > 10
    assert numbers["throughput"]["jobs_per_second"] > 0


def test_packing_computes_what_padding_does(tmp_path: Path) -> None:
    numbers = smoke("packing", tmp_path / "r.json")
    assert set(numbers["ragged"]["seconds"]) == {"padded", "block_mask", "packed"}
    assert set(numbers["groups"]["seconds"]) == {"padded", "packed", "shared"}
    for case in numbers.values():
        assert case["tokens"] < case["padded_tokens"]
        for side in case["difference_to_padded"].values():
            assert side["logprobs_max"] < 1e-5
            assert side["gradients_relative"] < 1e-5


def test_logprobs_in_chunks_have_the_same_gradients(tmp_path: Path) -> None:
    found = smoke("logprob_memory", tmp_path / "r.json")["trained_head"]
    assert set(found["largest_difference"]) == {"logprobs", "gradient_hidden", "gradient_weight"}
    for name, difference in found["largest_difference"].items():
        assert difference < 1e-5 * max(1.0, found["largest_value"][name])
    assert found["chunked"]["peak_mib"] > 0


def test_strops_side_of_a_grpo_step_splits_its_time(tmp_path: Path) -> None:
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.save import save_model

    save_model(*create_model(NewModel(hidden_size=16, layers=1, heads=2, context=32), seed=0), tmp_path / "model")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(9)))
    job = module("against_trl").Job(
        model=str(tmp_path / "model"),
        data=str(data),
        prompts=3,
        group_size=4,
        new_tokens=5,
        learning_rate=1e-3,
        steps=2,
        threads=1,
    )
    found = module("strop_side").main(vars(job))
    assert len(found["steps"]) == 2  # the warm-up is not among them
    for step in found["steps"]:
        parts = ("sampling", "scoring", "training", "publishing", "other")
        assert math.isclose(step["total"], sum(step[part] for part in parts))
        assert all(step[part] > 0 for part in parts)
        assert 12 <= step["tokens"] <= 12 * 5
        assert step["prompt_tokens"] == 12 * 4
    summary = module("against_trl").summary([found], 12)
    assert math.isclose(summary["completions_per_minute"] * summary["seconds"]["total"], 60 * 12)


def test_sides_take_turns() -> None:
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    module("measure").interleaved(sides, 3)
    assert order == list("ababab")


def test_a_side_that_fails_says_why() -> None:
    measure = module("measure")
    with pytest.raises(RuntimeError, match="No such file"):
        measure.fresh_process(FOLDER / "absent.py", [], threads=1)


def test_the_prompts_have_the_lengths_asked_for(character_tokenizer: Any) -> None:
    lengths = [3, 40, 7, 3]
    found = module("texts").prompts_of(character_tokenizer, lengths)
    assert [len(ids) for ids in found] == lengths
    assert len(set(map(tuple, found))) == len(found)


def test_the_readme_has_the_command_of_each_script() -> None:
    readme = (FOLDER / "README.md").read_text()
    scripts = [path.name for path in FOLDER.glob("*.py") if "measure.arguments(" in path.read_text()]
    assert len(scripts) >= 4
    assert [name for name in scripts if f"`python benchmarks/{name}`" not in readme] == []
