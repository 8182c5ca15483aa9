"""The benchmarks run, and their sides compute the same thing; how fast they are is not a matter for tests."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

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


def smoke(name: str, out: Path, *options: str, results: str | None = None) -> dict[str, Any]:
    """Numbers of a smoke run, as its file has them. results: the file's own name, if it is not the script's."""
    module(name).main(["--smoke", "--threads=1", f"--out={out}", *options])
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["benchmark"] == (results or name)
    assert f"benchmarks/{name}.py" in result["command"]
    assert result["smoke"] is True
    assert result["versions"]["torch"] == torch.__version__
    numbers: dict[str, Any] = result["numbers"]
    return numbers


def test_no_helper_of_the_tests_has_the_name_of_a_benchmark() -> None:
    """They are imported by name, whichever folder was on the path first."""
    helpers = {path.stem for path in FOLDER.parent.glob("tests/**/*.py")}
    assert not helpers & {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}


def test_the_consistent_mode_has_no_mismatch_and_the_ordinary_one_has(tmp_path: Path) -> None:
    numbers = smoke("consistent", tmp_path / "r.json", "--dtype=bfloat16")
    assert numbers["consistent"]["mismatch_max"] == 0 < numbers["ordinary"]["mismatch_max"]
    for what in ("sampling", "training"):
        assert numbers[f"times_as_long_{what}"] > 0
        assert numbers["consistent"][f"{what}_tokens_per_second"] > 0


def test_sampling_gives_rates_and_the_trainers_logprobs(tmp_path: Path) -> None:
    numbers = smoke("sampling", tmp_path / "r.json")
    for case in ("ragged", "groups"):
        rates = numbers[case]["tokens_per_second"]
        assert math.isclose(numbers[case]["ratio"], rates["local"] / rates["generate"])
    for gap in numbers["agreement"].values():
        assert gap["tokens"] == numbers["sizes"]["sequences"] * numbers["sizes"]["new_tokens"]
        assert gap["mean"] < 1e-5


def tables(results: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Rows of the tables that `docs/performance.md` would have of these results, by their first cells."""
    monkeypatch.syspath_prepend(str(FOLDER.parent / "docs"))
    lines = [line for line in module("measured").section(results).splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_engines_are_timed_by_size_and_give_the_trainers_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["local", "generate", "generate-static"]
    numbers = smoke("engines", tmp_path / "engines_gpu.json", "--only", *asked, results="engines_gpu")
    job = numbers["job"]
    assert list(numbers["sides"]) == asked
    for side in numbers["sides"].values():
        assert "failed" not in side
        [run] = side["runs"]
        for size in job["sizes"]:
            assert len(run["seconds"][str(size)]) == 1 + job["runs"]
            rate = size * job["new_tokens"] / run["seconds"][str(size)][1]
            assert side["tokens_per_second"][str(size)] == pytest.approx(rate)
        assert side["distance"]["tokens"] == 16 * job["new_tokens"]
        assert side["distance"]["max"] < 1e-4
    rows = tables(tmp_path, monkeypatch)
    assert list(rows[""])[:2] == [str(size) for size in job["sizes"]]
    local = numbers["sides"]["local"]
    assert rows["strop, `local`, graphs only"][1] == f"{local['tokens_per_second']['1']:,.0f}"
    assert rows["strop, `local`, graphs only"][2] == f"{local['distance']['mean']:.2g}"
    assert len(rows["strop, `local`, graphs only"]) == len(rows[""]) == len(rows["transformers, `generate`"])


def test_a_decoding_step_is_divided_among_its_kernels(tmp_path: Path) -> None:
    numbers = smoke("decoding", tmp_path / "decoding_gpu.json", results="decoding_gpu")
    side, job = numbers["sides"]["local-compiled"], numbers["job"]
    steps = job["new_tokens"] - 1
    prompts, whole = (sorted(side["seconds"][name])[len(side["seconds"][name]) // 2] for name in ("prompts", "whole"))
    assert side["prefill_ms"] == pytest.approx(1e3 * prompts)
    assert side["step_ms"] == pytest.approx(1e3 * (whole - prompts) / steps)
    kinds, floor = side["kinds"], side["floor_ms"]
    # What they took is the difference of two runs on a machine with other work, of either sign.
    assert {"attention", "matrix products"} <= kinds.keys()
    kind_of = module("decoding").kind_of
    assert {kind_of(name) for name in side["kernels"]} <= kinds.keys()
    parts = [floor[name] for name in ("weights", "keys and values", "logits")]
    assert 0 < sum(parts) == pytest.approx(floor["together"])


def test_kernels_are_told_apart_by_their_names() -> None:
    kind_of = module("decoding").kind_of
    assert kind_of("_decode") == "attention"
    assert kind_of("nvjet_tst_128x64_64x8_2x1_v_bz_TNT") == "matrix products"
    assert kind_of("triton_red_fused__to_copy_addmm_mean_mul_pow_rsqrt_0") == "compiled"
    assert kind_of("void at::native::index_kernel<std::common_type>") == "drawing and others"
    assert kind_of("void at::native::reduce_kernel<512, 1>") == "drawing and others"


def test_the_distance_of_logprobs_is_told_from_that_of_bfloat16() -> None:
    from strop.config.model import NewModel
    from strop.models.create import create_model
    from strop.models.forward import score_streams

    model, _ = create_model(NewModel(hidden_size=32, layers=2, context=32), seed=0)
    model.bfloat16()
    tokens = [[5, 9, 4, 4], [8, 7, 6, 5]]
    exact = [score_streams(copy.deepcopy(model).float(), [torch.tensor([3, *t]).numpy()])[0][1:] for t in tokens]
    found = module("engines").distance(model, [[3], [3]], tokens, [one + 0.5 for one in exact])
    assert found["engine_float32_mean"] == pytest.approx(0.5)
    assert 0 < found["trainer_float32_mean"] < 0.1
    assert 0.4 < found["mean"] < 0.6
    assert found["tokens"] == 8


def test_sandboxes_are_timed(tmp_path: Path) -> None:
    numbers = smoke("sandbox", tmp_path / "r.json")
    assert set(numbers["latency_ms"]) == {"warm", "cold", "check", "ten_ms", "interpreter"}
    for spread in numbers["latency_ms"].values():
        assert 0 < spread["least"] <= spread["median"] <= spread["p95"] <= spread["largest"]
    assert numbers["latency_ms"]["ten_ms"]["least"] > 10
    assert numbers["throughput"]["jobs_per_second"] > 0


def test_sampling_ahead_is_timed_against_taking_turns(tmp_path: Path) -> None:
    numbers = smoke("overlap", tmp_path / "r.json", "--kinds", "sleeping", results="overlap_sleeping")
    assert set(numbers["cases"]) == {"sleeping, S=0", "sleeping, S=1"}
    for name, case in numbers["cases"].items():
        assert case["staleness/max"] == int(name[-1])
        assert sum(case["seconds"].values()) == pytest.approx(case["seconds_of_a_step"], abs=1e-3)
        assert case["seconds"]["training"] >= numbers["sizes"]["seconds"]
    waited = [case["seconds"]["waited for the window"] for case in numbers["cases"].values()]
    assert waited[1] < waited[0]
    [ratio] = numbers["against S = 0"]["sleeping, S=1"]["repeats"]
    [turns], [ahead] = (case["repeats"] for case in numbers["cases"].values())
    assert ratio == pytest.approx(ahead / turns, abs=2e-3)


def test_old_tokens_are_as_old_as_they_are_said_to_be_and_are_drawn(tmp_path: Path) -> None:
    work = tmp_path / "work"
    numbers = smoke("staleness", tmp_path / "r.json", "--work", str(work))
    ways = {"S=0", "S=1, oldest", "S=1, oldest, uncorrected", "S=1, oldest, weights alone", "S=1, usual"}
    assert set(numbers["runs"]) == ways
    # Three steps: nothing is older than the first of them when that is trained.
    assert [numbers["ways"][way]["age"] for way in sorted(ways)][:4] == [0.0, 0.667, 0.667, 0.667]
    assert numbers["runs"]["S=1, oldest, uncorrected"]["0"]["algorithm"] == {"correction": {"kind": "none"}}
    # All begin with the same weights.
    assert len({way["curve"][0] for way in numbers["ways"].values()}) == 1
    # What has ended is not made again.
    before = (work / "ended.jsonl").read_text()
    assert smoke("staleness", tmp_path / "again.json", "--work", str(work)) == numbers
    assert (work / "ended.jsonl").read_text() == before
    page = module("staleness_plot").main([str(tmp_path / "r.json"), "--out", str(tmp_path / "plot.svg")]).read_text()
    root = ElementTree.fromstring(page)
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) >= 4


def test_a_curriculum_is_compared_with_dynamic_sampling(tmp_path: Path) -> None:
    numbers = smoke("curriculum", tmp_path / "r.json")
    ways = numbers["ways"]
    assert set(ways) == {"as it is", "curriculum", "dynamic sampling", "both"}
    for name, way in ways.items():
        [run] = way["runs"]
        assert run["step"] == [0, 2, 4]
        assert way["accuracy_after"] == round(run["accuracy"][-1], 4)
        assert way["tokens_sampled"] == run["tokens"][-1] > 0
        assert bool(run["solved"]) == (name in ("curriculum", "both"))
    # All begin with the same weights, and dynamic sampling samples more for a step.
    assert len({way["accuracy_before"] for way in ways.values()}) == 1
    assert ways["dynamic sampling"]["tokens_sampled"] > ways["as it is"]["tokens_sampled"]


def test_the_mix_is_half_copies_a_quarter_impossible_and_held_out_sums_are_others() -> None:
    benchmark = module("curriculum")
    rows, kept = benchmark.mixed(400), benchmark.held_out(50)
    assert sum("+" not in row["prompt"] for row in rows) == 200
    assert sum(row["answer"] == benchmark.IMPOSSIBLE for row in rows) == 100
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in kept}
    shown = benchmark.shown(2000)
    wrong = [row for row in shown if eval(row["prompt"][:-1]) != int(row["answer"])]
    assert all("+" in row["prompt"] for row in wrong)
    assert 0.4 < len(wrong) / len(shown) < 0.5


def test_a_checkpoint_is_written_in_both_ways(tmp_path: Path) -> None:
    found = smoke("saving", tmp_path / "s.json")
    assert found["seconds"].keys() == {"at once", "behind"}
    # Twelve bytes of each weight, and the optimizer's counts.
    assert found["copied_bytes"] == pytest.approx(12 * found["weights"], rel=0.01)


def test_the_timeline_and_the_load_are_written_as_in_a_run(tmp_path: Path) -> None:
    found = smoke("tracking_cost", tmp_path / "t.json")
    assert list(found["milliseconds"]) == ["step, all at once", "step, one after another", "look at the machine"]
    # Eight phases, as many intervals as are kept of engine and verifiers, and the list of all.
    assert found["spans"] == 8 + 24 + 24 + 1


def test_ranks_are_compared_with_one_process(tmp_path: Path) -> None:
    ways = smoke("ranks", tmp_path / "r.json", "--only", "ddp 2", "tensor 2, sequence")["ways"]
    assert list(ways) == ["one, float32", "one", "ddp 2", "tensor 2, sequence"]
    for way in ways.values():
        assert max(way["gradient_difference"].values()) < 1e-5
        assert way["loss"] == pytest.approx(ways["one"]["loss"], rel=1e-5)
        assert way["seconds"] > 0


@pytest.mark.slow
def test_every_transport_moves_all_tensors_between_two_processes(tmp_path: Path) -> None:
    numbers = smoke("publishing", tmp_path / "r.json")
    moved = {name: case for name, case in numbers["moving"].items() if name.startswith("cpu")}
    assert {case["case"]["transport"] for case in moved.values()} == {"broadcast", "ipc", "disk", "delta"}
    for name, case in moved.items():
        assert case["tensors"] == 2 * 9 + 2
        assert (case["bytes_moved"] < case["bytes"]) == ("delta" in name)
        assert 0 < case["seconds"]["checksums"] < case["seconds"]["move"]
    assert numbers["proof"]["checksum_gigabytes_per_second"]["cpu"] > 0
    assert set(numbers["proof"]["probe cpu"]) == {"trainer_seconds", "engine_seconds"}
    benchmark = module("publishing")
    shapes = benchmark.weights(benchmark.SMOLLM2)
    assert len(shapes) == 272
    assert sum(map(math.prod, shapes.values())) == 134_515_008


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_loop_alone_is_timed_part_by_part(kind: str, tmp_path: Path) -> None:
    numbers = smoke("driver_overhead", tmp_path / "r.json", "--kinds", kind)
    assert set(numbers["cases"]) == {f"{kind}, with episodes", f"{kind}, without episodes"}
    for case in numbers["cases"].values():
        [steps] = case["whole"]
        assert len(steps) == numbers["sizes"]["steps"]
        found = case["milliseconds"]
        parts = {name: value for name, value in found.items() if not name.startswith("cpu of ") and name != "whole"}
        assert {"collect", "build_batch", "update", "look", "record"} <= set(parts)
        assert all(0 <= part < found["whole"] for part in parts.values())
        assert found["cpu of whole"] > 0
        assert set(found) == {"whole", "cpu of whole", *parts, *(f"cpu of {name}" for name in parts)}


def test_the_loop_alone_is_timed_beside_that_of_another_checkout(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    numbers = smoke("driver_overhead", tmp_path / "r.json", "--kinds", "local", "--against", str(root))
    names = ["local, with episodes", "local, without episodes"]
    assert list(numbers["cases"]) == [both for name in names for both in (name, f"{name}, other checkout")]
    for name, ratios in numbers["ratios"].items():
        ours, theirs = (numbers["cases"][which]["least"]["whole"] for which in (name, f"{name}, other checkout"))
        assert ratios["least"] == pytest.approx(ours / theirs, rel=0.01)
        assert set(ratios) == {"least", "tenth", "median"}


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


def test_more_tokens_told_apart_lose_less(tmp_path: Path) -> None:
    numbers = smoke("distillation", tmp_path / "r.json")
    assert numbers["seconds"].keys() == {"logprobs", "topk"}
    few, many = (numbers["noise_0.3"][k] for k in ("4", "16"))
    assert few["coverage"] < many["coverage"] < 1
    for kind in ("forward_kl", "reverse_kl", "jensen_shannon"):
        assert few[kind]["share_of_whole"] < many[kind]["share_of_whole"] <= 1
        assert few[kind]["gradient_error"] > many[kind]["gradient_error"]
        assert numbers["noise_0.3"]["16 float16"][kind]["share_of_whole"] == pytest.approx(
            many[kind]["share_of_whole"], abs=0.01
        )


def test_math_answers_are_what_they_were_made_to_be_and_poison_is_harmless(tmp_path: Path) -> None:
    numbers = smoke("math_answers", tmp_path / "r.json")
    poisoned, clean = numbers["poisoned"], numbers["clean"]
    assert numbers["executed"] is False
    for side in (poisoned, clean):
        assert side["misjudged"] == 0, side["first_misjudged"]
        assert 100 < side["right_by_construction"] < 200
    assert poisoned["poisoned"] == 300 // 10
    assert poisoned["poisoned_called_right"] == 0
    assert sum(poisoned["poisoned_statuses"].values()) == poisoned["poisoned"]
    # A worker is killed when the time is up, and not long after.
    assert poisoned["longest_item_seconds"] < numbers["timeout"] + 2
    assert clean["poisoned"] == 0


def test_poison_is_of_every_kind(tmp_path: Path) -> None:
    made = list(module("answers").items(300, 10, tmp_path / "canary"))
    poison = [item.completion for item in made if item.right is None]
    assert max(map(len, poison)) >= 1_000_000
    for sample in ("10^{10^{10}}", "((((", "__import__('os').system", str(tmp_path / "canary")):
        assert any(sample in text for text in poison), sample
    assert made == list(module("answers").items(300, 10, tmp_path / "canary"))


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


def test_a_step_on_a_gpu_is_split_and_written_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "against_trl_gpu.json"
    numbers = smoke("against_trl_gpu", out, "--only", "strop-local")
    job, side = numbers["job"], numbers["sides"]["strop-local"]
    completions = job["prompts"] * job["group_size"]
    assert side["tokens"] == completions * job["new_tokens"]
    assert side["prompt_tokens"] == completions * job["prompt_tokens"]
    assert side["mismatch_mean"] < 1e-5
    [steps] = [one["steps"] for one in side["runs"]]
    assert len(steps) == 1 + job["steps"]
    for step in steps:
        assert math.isclose(
            step["total"], sum(step[part] for part in ("sampling", "scoring", "training", "publishing", "other"))
        )
    assert side["seconds"]["total"] == steps[1]["total"]
    assert tables(tmp_path, monkeypatch)["measured steps"] == [str(job["steps"])]
    if importlib.util.find_spec("trl") is not None:
        numbers = smoke("against_trl_gpu", out, "--add", "--only", "trl-transformers")
        assert numbers["sides"]["strop-local"] == side
        theirs = numbers["sides"]["trl-transformers"]
        assert (theirs["tokens"], theirs["prompt_tokens"]) == (side["tokens"], side["prompt_tokens"])
        ratio = numbers["ratios"]["trl-transformers / strop-local"]["training"]
        assert ratio == theirs["seconds"]["training"] / side["seconds"]["training"]


def test_a_side_that_fails_on_a_gpu_leaves_the_others_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = module("against_trl_gpu")
    step = {"total": 2.0, "sampling": 1.0, "scoring": 0.0, "training": 1.0, "publishing": 0.0, "other": 0.0}
    step |= {"tokens": 6.0, "prompt_tokens": 4.0}

    def fresh_process(script: Path, arguments: list[str], **others: Any) -> dict[str, Any]:
        asked = json.loads(arguments[0])
        told = {"steps": [step, step], "start_seconds": 1.0}
        if asked["engine"] == {"kind": "vllm"}:
            raise RuntimeError("out of memory")
        if asked["engine"] == "transformers":
            # It had done two steps when its time was up.
            Path(asked["progress"]).write_text(json.dumps(told))
            raise RuntimeError("took longer than 600 s")
        return told

    monkeypatch.setattr(module("measure"), "fresh_process", fresh_process)
    monkeypatch.setattr(module("against_trl"), "install_trl", lambda: None)
    sides = smoke("against_trl_gpu", tmp_path / "against_trl_gpu.json", "--only", *benchmark.SIDES)["sides"]
    assert sides["strop-vllm"]["failed"] == "out of memory"
    assert "seconds" not in sides["strop-vllm"]
    assert sides["trl-transformers"]["failed"] == "took longer than 600 s"
    for name in ("strop-local", "trl-vllm", "trl-transformers"):
        assert sides[name]["tokens_per_second"] == 5.0
    rows = tables(tmp_path, monkeypatch)
    assert rows[""] == ["strop, `local`", "TRL, vLLM", "TRL, `generate`"]
    assert rows["whole step"] == ["2"] * 3
    assert rows["tokens/s, prompts too"] == ["5"] * 3
    page = module("measured").section(tmp_path)
    assert "strop, vLLM did not get to its end: out of memory" in page
    assert "TRL, vLLM takes 1.00 times as long as strop, `local`." in page
    assert rows["used of the card at the end of a step, GiB"] == ["–"] * 3


def test_the_page_shows_commands_without_what_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.parent / "docs"))
    given = "python benchmarks/engines.py --only local vllm --runs 2 --add --out=/a/b.json --limit 500 --sizes 64 1"
    assert module("measured")._command({"command": given}) == "python benchmarks/engines.py --runs 2 --sizes 64 1"


def test_trls_step_on_a_gpu_tells_weights_on_their_way_from_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module("trl_side").time, "perf_counter", lambda: now[0])

    def takes(seconds: float, result: Any = None) -> Any:
        now[0] += seconds
        return result

    clock = module("against_trl_gpu_trl_side").CardClock(tmp_path / "progress.json")
    publish = clock.timed("publishing", lambda: takes(1.0))
    sample = clock.sampling(lambda prompts: takes(4.0, publish() or ([[7, 8, 9]] * 2, None)))
    rollout = clock.timed("rollout", lambda: takes(2.0, sample([[5, 6]] * 2)))
    clock.begin()
    for _ in range(2):
        rollout()
        takes(8.0)
        clock.end_step()
    told = json.loads((tmp_path / "progress.json").read_text())
    assert told["card"]
    assert told["steps"] == clock.steps
    for step in clock.steps:
        assert step["total"] == 15.0
        assert [step[part] for part in ("publishing", "sampling", "scoring", "training")] == [1.0, 4.0, 2.0, 8.0]
        assert (step["tokens"], step["prompt_tokens"]) == (6.0, 4.0)


def test_both_sides_know_the_settings_of_a_gpu() -> None:
    benchmark = module("against_trl_gpu")
    options = {"shape": "qwen3-0.6b", "prompts": 64, "steps": 4, "batch_size": 32, "threads": 8, "max_sequences": 512}
    job = asdict(benchmark.make_job(argparse.Namespace(smoke=False, **options)))
    engine = {"kind": "vllm", "memory": 0.3, "max_sequences": 512}
    config = module("strop_side").recipe({**job, "model": "m", "data": "d", "engine": engine}, "runs")
    assert (config.hardware.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.rollout.engine.kind, config.rollout.engine.max_sequences) == ("vllm", 512)
    settings = module("against_trl_gpu_trl_side").settings({**job, "engine": "vllm"})
    assert settings["bf16"]
    assert settings["vllm_max_model_length"] >= job["prompt_tokens"] + job["new_tokens"]
    trl = pytest.importorskip("trl")
    assert settings.keys() <= trl.GRPOConfig.__dataclass_fields__.keys()


def test_random_models_never_write_their_end_of_text_token_and_texts_come_back(tmp_path: Path) -> None:
    from strop.config.model import ModelSettings
    from strop.models.load import load_model

    models = module("random_models")
    models.write_model(tmp_path, "tiny", dtype="float32", context=64)
    loaded = load_model(ModelSettings(path=str(tmp_path)), device="cpu", seed=0)
    assert loaded.eos_ids == (models.EOS,)
    prompts = models.prompts("tiny", [40, 3, 64, 1])
    vocabulary = models.words(models.SHAPES["tiny"].vocabulary - models.FIRST)
    for ids in prompts:
        text = models.text_of(ids, vocabulary)
        assert loaded.tokenizer(text)["input_ids"] == ids
        assert loaded.tokenizer.decode(ids) == text
        with torch.no_grad():
            logprobs = torch.log_softmax(loaded.model(torch.tensor([ids])).logits, -1)
        assert logprobs[..., models.EOS].max() < -models.BELOW / 2
        others = logprobs[..., models.FIRST :]
        assert others.min() > -4 - math.log(others.shape[-1])


def supervised_job(method: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A job of two measured steps on a tiny model, as the side gets it."""
    benchmark = module("supervised_against_trl")
    path = benchmark.model_folder("tiny", folder / "model")
    options = argparse.Namespace(rows=3, steps=2, median=20, threads=1)
    made = benchmark.make_job("tiny", path, method, "ragged", folder, options)
    return {**asdict(made), **changes}


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_strops_side_of_supervised_steps_shows_what_it_was_trained_on(method: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    job = supervised_job(method, tmp_path)
    found = module("supervised_strop_side").main(job)
    assert len(found["steps"]) == 3  # the warm-up is the first
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    for number, step in enumerate(found["steps"]):
        chosen = rows[3 * number : 3 * number + 3]
        examples = [
            # As TRL reads them: prompt and completion together, then the end-of-text token.
            (tokenizer(row["prompt"])["input_ids"], tokenizer(row["prompt"] + row[name] + "<eos>")["input_ids"])
            for row in chosen
            for name in row.keys() - {"prompt"}
        ]
        masks = [(ids, [at >= len(before) for at in range(len(ids))]) for before, ids in examples]
        assert step["digest"] == module("rows").digest(masks)
        assert step["tokens"] == sum(len(ids) for ids, _ in masks)
        assert step["trained_tokens"] == sum(sum(mask) for _, mask in masks)
        assert step["total"] > 0
    assert found["steps"][0]["loss"] == pytest.approx(math.log(2 if method == "dpo" else 69), abs=0.1)


@pytest.mark.parametrize("padding_free", [False, True])
def test_both_sides_show_the_same_digest(padding_free: bool) -> None:
    examples = [([5, 6, 7, 8], [False, True, True, True]), ([9, 3], [False, True])]
    if padding_free:
        inputs = {
            "input_ids": torch.tensor([[9, 3, 5, 6, 7, 8]]),
            "labels": torch.tensor([[-100, 3, -100, 6, 7, 8]]),
            "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
        }
    else:
        inputs = {
            "input_ids": torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]]),
            "completion_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        }
    digest = module("rows").digest
    seen = list(module("supervised_trl_side").examples_of(inputs))
    assert digest(seen) == digest(examples)
    assert digest(seen) != digest([([5, 6, 7, 8], [False, False, True, True]), examples[1]])


def test_rows_have_the_lengths_asked_for(character_tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    benchmark, rows = module("supervised_against_trl"), module("rows")
    tokenizer = AutoTokenizer.from_pretrained(benchmark.model_folder("tiny", tmp_path / "model"))
    drawn = rows.ragged_lengths(300, median=90)
    assert min(drawn) >= rows.SHORTEST
    assert max(drawn) <= rows.LONGEST
    assert 80 < sorted(drawn)[150] < 100
    for pairs, name in ((False, "completion"), (True, "chosen")):
        made = rows.example_rows(tokenizer, drawn[:20], pairs=pairs, even=False)
        lengths = [len(tokenizer(row["prompt"] + row[name] + "<eos>")["input_ids"]) for row in made]
        assert lengths == [max(length, len(row["prompt"]) + 4) for length, row in zip(drawn, made, strict=False)]
    even = rows.example_rows(tokenizer, [40] * 5, pairs=True, even=True)
    assert {(len(row["prompt"]), len(row["chosen"]), len(row["rejected"])) for row in even} == {(16, 23, 23)}


def test_the_fastest_way_of_trl_that_computes_the_same_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = module("supervised_against_trl")
    job = benchmark.Job(model="m", data="d", method="sft", rows=8, steps=1, learning_rate=1.0, threads=1)
    names = [way.name for way in benchmark.options_of(job, None, even=False)]
    assert names == [
        "padded, 1 in a pass",
        "padded, 4 in a pass",
        "padded, 8 in a pass",
        "padding-free, 4 in a pass",
        "padding-free, 8 in a pass",
        "rebalanced, 4 in a pass",
    ]
    answers = {
        "same": {"steps": [{"loss": 1.0005, "digest": 7}, {"total": 3.0, "cpu": 3.0}], "peak": 2**20},
        "faster": {"steps": [{"loss": 1.1, "digest": 7}, {"total": 1.0, "cpu": 1.0}], "peak": 2**20},
        "fastest": {"steps": [{"loss": 1.0, "digest": 8}, {"total": 0.5, "cpu": 0.5}], "peak": 2**20},
        "broken": RuntimeError("no\nout of memory"),
    }

    def run(script: str, asked: Any) -> Any:
        answer = answers[asked]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(benchmark, "run", run)
    trials = {name: benchmark.tried(name, {"loss": 1.0, "digest": 7}) for name in answers}
    assert benchmark.fastest(trials) == "same"
    assert "first loss" in trials["faster"]["left_out"]
    assert "other rows" in trials["fastest"]["left_out"]
    assert trials["broken"]["left_out"] == "it fails: out of memory"
    with pytest.raises(RuntimeError, match="no way"):
        benchmark.fastest({"broken": trials["broken"]})


def test_supervised_ratios_say_who_is_faster() -> None:
    def one(seconds: list[float], peak: int, losses: list[float]) -> dict[str, Any]:
        same = {"tokens": 9, "trained_tokens": 5}
        pairs = zip(seconds, losses, strict=True)
        steps = [{"total": time, "cpu": 2 * time, "loss": loss, **same} for time, loss in pairs]
        return {"steps": steps, "peak": peak * 2**20, "versions": {}}

    found = module("supervised_against_trl").comparison(
        {
            "strop": [one([50.0, 1.0, 3.0], 100, [2.0, 1.5, 1.2])] * 3,
            "trl": [one([90.0, 4.0, 6.0], 400, [2.0, 1.4, 1.0])] * 3,
        }
    )
    assert (found["ratio"], found["ratio_of_minima"], found["ratio_of_medians"]) == (2.5, 4.0, 2.5)
    assert found["ratio_of_cpu_seconds"] == 2.5
    assert found["ratio_of_peak_memory"] == 0.25
    assert found["losses_differ_by_at_most"] == pytest.approx(0.2)
    check = module("supervised_against_trl").check_same
    check([{"digest": 1, "loss": 2.0}], [{"digest": 1, "loss": 2.0009}])
    with pytest.raises(RuntimeError, match="first losses"):
        check([{"digest": 1, "loss": 2.0}], [{"digest": 1, "loss": 2.002}])
    with pytest.raises(RuntimeError, match="same tokens"):
        check([{"digest": 1, "loss": 2.0}], [{"digest": 2, "loss": 2.0}])


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


def test_weights_that_stand_still_show_no_drift(tmp_path: Path) -> None:
    sides = smoke("drift", tmp_path / "r.json", "--only", "local", "consistent", results="drift_gpu")["sides"]
    side = sides["local"]
    assert sides["consistent"]["distances"]["mismatch/abs_max"]["largest"] == 0
    assert side["weights_moved"] == sides["consistent"]["weights_moved"] == 0
    assert len(side["steps"]) == 5
    mean = side["distances"]["mismatch/mean"]
    assert 0 < mean["mean"] <= mean["largest"] < 1e-4
    assert side["distances"]["publish/probe_gap"]["largest"] < 1e-4


def test_a_drift_is_told_from_rounding() -> None:
    benchmark = module("drift")
    rounding = [0.01 + 0.001 * (at * 7919 % 11 - 5) / 5 for at in range(50)]

    def drifts(values: list[float]) -> bool:
        steps = [dict.fromkeys(benchmark.DISTANCES, value) for value in values]
        return bool(benchmark.summary(steps)["distances"]["mismatch/mean"]["drifts"])

    assert not drifts(rounding)
    assert drifts([value + 1e-4 * at for at, value in enumerate(rounding)])
    assert benchmark.summary([]) == {}


def test_an_engine_of_its_own_changes_no_metric(tmp_path: Path) -> None:
    asked = ("--only", "one process", "ray, two cards")
    places = smoke("placements", tmp_path / "r.json", *asked, results="placements_gpu")["places"]
    assert "speed_up" not in places["one process"]
    apart = places["ray, two cards"]["apart"]
    assert apart
    assert max(apart.values()) < 1e-5
    assert places["ray, two cards"]["median"]["publish/seconds"] > 0
    kept = {"steps": places["one process"]["steps"][:3], "failed": "took too long"}
    assert module("placements").summary(kept, None)["median"]["seconds"] == kept["steps"][2]["seconds"]
    assert module("placements").summary({"failed": "at once"}, None) == {}


def test_every_seed_learns_from_the_same_start(tmp_path: Path) -> None:
    side = smoke("learning_gpu", tmp_path / "r.json", "--only", "local", "--seeds", "0", "1")["sides"]["local"]
    assert [run["seed"] for run in side["runs"]] == [0, 1]
    assert side["runs"][0]["accuracy"][0] == side["runs"][1]["accuracy"][0] == side["accuracy_before"]
    assert all(len(run["reward"]) == 2 and 0 < run["mismatch_max"] < 1e-4 for run in side["runs"])


def test_cases_of_an_earlier_run_of_the_trainer_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    smoke("trainer", out, "--only", "SFT, 8192", "--repeats=1", results="trainer_gpu")
    cases = smoke("trainer", out, "--add", "--only", "RL, LoRA", "--repeats=1", results="trainer_gpu")["cases"]
    assert list(cases) == ["SFT, 8192", "RL, LoRA"]
    assert all(case["tokens_per_second"] > 0 for case in cases.values())


def test_the_viewer_opens_a_long_run_as_a_short_one(tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("NO BROWSER: the viewer was NOT measured; install one with `apt-get install chromium`")
    numbers = smoke("viewer", tmp_path / "r.json")
    for side in ("long", "short"):
        found = numbers[side]
        assert 0 < found["open_overview_seconds"] < 60
        assert found["poll_overview_bytes"] == 0
        assert 0 < found["poll_nothing_new_bytes"] < found["poll_one_step_bytes"] < 1000
        assert found["scroll_steps_frame_ms"] > 0
        assert found["scroll_steps_processor_ms_a_frame"] > 0
    # 30 steps, of which those that are not seen are not there.
    assert 10 < numbers["long"]["steps_rows_in_page"] < 30


def test_the_readme_has_the_command_of_each_script() -> None:
    readme = (FOLDER / "README.md").read_text()
    scripts = [path.name for path in FOLDER.glob("*.py") if "measure.arguments(" in path.read_text()]
    assert len(scripts) >= 4
    assert [name for name in scripts if f"`python benchmarks/{name}`" not in readme] == []


@pytest.mark.slow
def test_a_service_is_read_while_a_run_trains(tmp_path: Path) -> None:
    numbers = smoke("service_load", tmp_path / "r.json")
    assert numbers["clients"] == 5
    assert numbers["answers"] > 0
    assert numbers["events"] > 0
    assert (numbers["refused"], numbers["failed"]) == (0, 0)
    [alone], [read] = numbers["steps_per_second"].values()
    assert numbers["slower"] == [pytest.approx(1 - read / alone)]
    assert 0 < numbers["processor_share"]["service"] < 2
