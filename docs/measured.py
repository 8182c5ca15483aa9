"""The section "Measured on a GPU" of `performance.md`, from the files in `benchmarks/results/`; see `generate.py`.

A benchmark that is still to be run has no file, and gets no table. For another one: a function of its result in TABLES.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BEGIN, END = "<!-- written by docs/generate.py: begin -->", "<!-- written by docs/generate.py: end -->"
HEAD = "## Measured on a GPU\n\nWritten by `python docs/generate.py` from the files that each table names."
Result = Mapping[str, Any]

PARTS = {
    "total": "whole step",
    "sampling": "sampling",
    "scoring": "scoring",
    "training": "training",
    "publishing": "publishing",
    "other": "metrics and alarms",
}
SIDES = {
    "strop-vllm": "strop, vLLM",
    "strop-local": "strop, `local`",
    "trl-vllm": "TRL, vLLM",
    "trl-transformers": "TRL, `generate`",
}
ENGINES = {
    "vllm": "strop, `vllm`",
    "local": "strop, `local`, graphs only",
    "local-compiled": "strop, `local`",
    "generate": "transformers, `generate`",
    "generate-static": "transformers, `generate`, static cache",
}

DRIFT = {"local": "`local`", "vllm": "`vllm`", "consistent": "`local`, consistent mode"}


def with_section(page: str, results: Path = RESULTS) -> str:
    """A page whose section is that of the results.

    Raises:
        ValueError: the page has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section(results)}\n\n{END}{after}"


def section(results: Path) -> str:
    """The tables of all results that are there, under their heading."""
    parts = [HEAD]
    for name, table in TABLES.items():
        file = results / f"{name}.json"
        if file.exists():
            parts += table(json.loads(file.read_text(encoding="utf-8")))
            parts[-1] += f" (`benchmarks/results/{name}.json`)."
    return "\n\n".join(parts)


def steps_against_trl(result: Result) -> Iterator[str]:
    """Parts of a GRPO step of each side, tokens a second, memory and the distance of sampler and trainer."""
    numbers = result["numbers"]
    job, sides = numbers["job"], {name: numbers["sides"][name] for name in SIDES if name in numbers["sides"]}
    done = {name: side for name, side in sides.items() if "seconds" in side}
    yield f"A whole GRPO step of strop and of TRL, `{_command(result)}`:"
    yield (
        f"{job['shape']} with random weights, {job['dtype']}, {job['prompts']} prompts of {job['prompt_tokens']} "
        f"tokens, {job['group_size']} completions of {job['new_tokens']} tokens each; medians, in seconds."
    )
    if done:
        rows = [[label, *(_number(side["seconds"][part]) for side in done.values())] for part, label in PARTS.items()]
        rows.append(["tokens/s, prompts too", *(f"{side['tokens_per_second']:,.0f}" for side in done.values())])
        for label, key in (
            ("peak of PyTorch, given out, GiB", "allocated_gib"),
            ("peak of PyTorch, held, GiB", "reserved_gib"),
            ("used of the card at the end of a step, GiB", "used_gib"),
            ("distance of log-probabilities, mean", "mismatch_mean"),
            ("measured steps", "steps"),
        ):
            rows.append([label, *(_number(side.get(key)) for side in done.values())])
        yield _table(["", *(SIDES[name] for name in done)], rows)
    for pair, ratio in (numbers.get("ratios") or {}).items():
        theirs, ours = pair.split(" / ")
        yield f"{SIDES[theirs]} takes {ratio['total']:.2f} times as long as {SIDES[ours]}."
    yield from _failures(sides, SIDES)
    yield _where_of(result, sides)


def trainer(result: Result) -> Iterator[str]:
    """Tokens a second and memory of the trainer's updates."""
    cases = result["numbers"]["cases"]
    done = {name: case for name, case in cases.items() if "failed" not in case}
    yield f"Updates of the trainer, `{_command(result)}`:"
    yield (
        "Forward, backward and optimizer over whole streams of one length, of models with random weights in bfloat16 "
        "with float32 masters; MFU counts causal attention, and nothing that is recomputed."
    )
    rows = [
        [
            name,
            case["shape"],
            f"{case['length']:,}",
            f"{case['tokens_per_second']:,.0f}",
            "–" if case.get("mfu") is None else f"{case['mfu']:.1%}",
            _number(case.get("allocated_gib")),
            _number(case["first"]),
        ]
        for name, case in done.items()
    ]
    yield _table(["", "model", "stream", "tokens/s", "MFU", "peak, GiB", "first update, s"], rows)
    yield from _failures(cases, {name: name for name in cases})
    card = next((case["card"] for case in done.values()), "an unknown card")
    yield _where(result, card, *(case["versions"] for case in done.values()))


def engines(result: Result) -> Iterator[str]:
    """Tokens a second of each engine by the number of sequences, and the distances of log-probabilities."""
    numbers = result["numbers"]
    job, sides = numbers["job"], {name: numbers["sides"][name] for name in ENGINES if name in numbers["sides"]}
    sizes = [str(size) for size in job["sizes"]]
    yield f"Sampling, `{_command(result)}`:"
    yield (
        f"{job['shape']} with random weights, {job['dtype']}, prompts of {job['prompt_tokens']} tokens, "
        f"{job['new_tokens']} new ones each; completion tokens a second, by how many sequences are sampled together. "
        "The distance is that of a token's log-probability to the trainer's, in nats, on average; and to that of the "
        "same weights in float32."
    )
    rows = []
    for name, side in sides.items():
        rates, distance = side.get("tokens_per_second", {}), side.get("distance", {})
        cells = [f"{rates[size]:,.0f}" if size in rates else "–" for size in sizes]
        cells += [_number(distance.get(key)) for key in ("mean", "engine_float32_mean")]
        rows.append([ENGINES[name], *cells, _number(side.get("start_seconds"))])
    yield _table(["", *sizes, "distance", "to float32", "start, s"], rows)
    exact = [side["distance"]["trainer_float32_mean"] for side in sides.values() if "distance" in side]
    if exact:
        yield f"The trainer's own distance to float32 is {_number(exact[0])}."
    yield from _failures(sides, ENGINES)
    yield _where_of(result, sides)


def publishing(result: Result) -> Iterator[str]:
    """Time of each way in which weights were moved."""
    numbers = result["numbers"]
    yield f"Moving weights between two processes, `{result['command']}`:"
    rows = [
        [
            name,
            f"{case['tensors']}",
            _number(case["bytes"] / 1e9),
            *(_number(case["seconds"][part]) for part in ("move", "checksums", "verify")),
            _number(case["gigabytes_per_second"]),
        ]
        for name, case in numbers["moving"].items()
    ]
    heads = ["", "tensors", "GB", "moving, s", "its checksums, s", "verifying, s", "GB/s"]
    yield _table(heads, rows)
    cards = numbers["devices"]
    yield _where(result, f"{len(cards)} × {cards[0]}")


def drift(result: Result) -> Iterator[str]:
    """Distances over steps that change no weight."""
    numbers = result["numbers"]
    job = numbers["job"]
    yield f"Distance of sampler and trainer while no weight changes, `{_command(result)}`:"
    yield (
        f"{job['shape']} with random weights, {job['dtype']}, whole steps of a run with "
        f"{job['prompts']} × {job['group_size']} completions of {job['new_tokens']} tokens at a learning rate at which "
        "no weight moves; nats. The slope is by least squares, with its standard error."
    )
    rows = []
    for name, side in numbers["sides"].items():
        found = side.get("distances", {}).get("mismatch/mean", {})
        cells = [_number(found.get(key)) for key in ("mean", "largest", "slope", "slope_error")]
        label = DRIFT[name] + ", eager" * side.get("eager", False)
        rows.append([label, f"{len(side.get('steps', []))}", *cells])
    yield _table(["", "steps", "mean of a step", "largest of them", "slope, a step", "its error"], rows)
    yield from _failures(numbers["sides"], DRIFT)
    card = next((side["card"] for side in numbers["sides"].values() if "card" in side), "an unknown card")
    yield _where(result, card, *(side.get("versions", {}) for side in numbers["sides"].values()))


def consistent(result: Result) -> Iterator[str]:
    """What the consistent mode costs."""
    numbers = result["numbers"]
    sizes = numbers["sizes"]
    yield f"The consistent mode, `{_command(result)}`:"
    yield (
        f"{sizes['shape']} with random weights, {sizes['dtype']}, {sizes['sequences']} sequences of {sizes['prompt']} "
        f"+ {sizes['new_tokens']} tokens; no blocks are compiled in either mode."
    )
    rows = [
        [
            what,
            *(form.format(numbers[mode][key]) for mode in ("ordinary", "consistent")),
            f"{numbers[times]:.2f}" if times else "",
        ]
        for what, key, form, times in (
            ("sampling, tokens/s", "sampling_tokens_per_second", "{:,.0f}", "times_as_long_sampling"),
            ("update, tokens/s", "training_tokens_per_second", "{:,.0f}", "times_as_long_training"),
            ("distance, mean", "mismatch_mean", "{:.2g}", None),
            ("distance, largest", "mismatch_max", "{:.2g}", None),
        )
    ]
    yield _table(["", "ordinary", "consistent", "times as long"], rows)
    yield _where(result, numbers["card"])


def recipes(result: Result) -> Iterator[str]:
    """What whole recipes came to."""
    yield "Whole recipes, to their end:"
    rows = [
        [
            f"`{case['command']}`",
            f"{case['steps']}",
            f"{case['accuracy_before']:.1%}",
            f"{case['accuracy_after']:.1%}",
            f"{case['seconds']}",
        ]
        for case in result["numbers"].values()
    ]
    yield _table(["command", "steps", "accuracy before", "after", "seconds"], rows)
    yield _where(result, result["card"])


TABLES: dict[str, Callable[[Result], Iterator[str]]] = {
    "trainer_gpu": trainer,
    "against_trl_gpu": steps_against_trl,
    "engines_gpu": engines,
    "drift_gpu": drift,
    "consistent_gpu": consistent,
    "publishing_h200": publishing,
    "recipes_h200": recipes,
}
"""Names of the files, in the order of their tables, and what makes a table of one."""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """A number for people: at least two digits that count; a dash where there is none."""
    if value is None:
        return "–"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"


def _failures(sides: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    for name, side in sides.items():
        if "failed" in side:
            yield f"{names[name]} did not get to its end: {side['failed'][:200]}"


def _command(result: Result) -> str:
    """Less what does not change a number. Sides may come from several runs, and the table shows which there are."""
    return re.sub(r" --(?:out|only|limit)(?:[ =][^-\s]\S*)+| --add", "", result["command"])


def _where_of(result: Result, sides: Mapping[str, Any]) -> str:
    """`_where`, by what the processes of the sides said of themselves; one that failed may not have."""
    runs = [run for side in sides.values() for run in side["runs"]]
    card = next((run["card"] for run in runs if "card" in run), "an unknown card")
    return _where(result, card, *(run.get("versions", {}) for run in runs))


def _where(result: Result, card: str, *told: Mapping[str, str]) -> str:
    """Card, date and versions. told: versions that processes of their own found."""
    versions = dict(result["versions"])
    for one in told:
        versions |= one
    known = [f"{name} {versions[name]}" for name in ("torch", "transformers", "vllm", "trl") if name in versions]
    return f"{card}, {result['date'][:10]}, {', '.join(known)}"
