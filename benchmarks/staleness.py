"""What old tokens cost: the quickstart's task, learned from tokens that are up to S versions old, corrected and not.

A run that samples ahead in one process (`usual`) trains tokens that are younger than it may. In the `oldest` runs every
step waits until all groups that may begin have been sampled, so that from step S on every token is exactly S versions
old: the worst that `rollout.max_staleness: S` allows, and what a run meets whose engine is the faster side. All else is
the run's own. Each of `--repeats` is another seed of the order of the prompts, of the draws and of the supervised
start; a seed's runs begin with the same weights. Measured: greedy accuracy on held-out sums every ten steps, the ages
of tokens, and how far sampler and trainer are apart.

`--work` is a folder in which starts and ended runs stay: another call goes on there. `--ways` chooses.
`--try NAME=JSON` measures another `algorithm:` section beside, with the oldest tokens of `--try-at`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import staleness_plot

MEANS = ("staleness/mean", "mismatch/effective_share", "policies/sampler_proximal_kl", "policies/sampler_current_kl")
"""Metrics of steps whose means are kept."""
MOST = ("staleness/max", "mismatch/weight_max")
"""Metrics of steps whose largest value is kept."""
ENDED = "ended.jsonl"
BESIDE = {
    "uncorrected": {"correction": {"kind": "none"}},
    "weights alone": {"correction": {"kind": "truncate", "high": 2.0}},
}
"""What a recipe may say in place of the default, which is `weights alone` and `off_policy: 0.1`."""


@dataclass(frozen=True)
class Way:
    """How a run is made. algorithm: what its section says beside the defaults."""

    name: str
    staleness: int
    oldest: bool = False
    algorithm: str = "{}"


def ways() -> list[Way]:
    """Those that are measured unless others are asked for."""
    found = [Way("S=0", 0)]
    for bound in (1, 2, 4):
        found += [Way(f"S={bound}, oldest", bound, True), Way(f"S={bound}, usual", bound)]
        found += [Way(f"S={bound}, oldest, {name}", bound, True, json.dumps(said)) for name, said in BESIDE.items()]
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=3)
    parser.set_defaults(threads=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--ways", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, nargs="*", help="only these, in place of --repeats")
    parser.add_argument("--try", dest="tried", nargs="*", default=[], metavar="NAME=JSON")
    parser.add_argument("--try-at", type=int, nargs="*", default=[4], help="of --try")
    parser.add_argument("--work", type=Path, help="folder of starts and ended runs; a temporary one if not set")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        measure.use_threads(options.threads)
        measure.tell(side(json.loads(options.side)))
        return {}
    with tempfile.TemporaryDirectory() as folder:
        work = (options.work or Path(folder)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        measured(options, work)
        numbers = numbers_of(ended(work), options)
    measure.write("staleness", numbers, options)
    if not options.smoke and options.out is None:
        staleness_plot.main([])
    return numbers


def ended(work: Path) -> dict[str, dict[str, Any]]:
    """The runs that have ended in a folder, by way and seed."""
    runs: dict[str, dict[str, Any]] = {}
    path = work / ENDED
    for line in path.read_text().splitlines() if path.exists() else []:
        found = json.loads(line)
        runs.setdefault(found.pop("way"), {})[str(found.pop("seed"))] = found
    return runs


def numbers_of(runs: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What the file of results holds."""
    runs = {name: dict(sorted(seeds.items())) for name, seeds in sorted(runs.items())}
    return {"sizes": sizes(options.smoke, options.steps), "ways": summaries(runs), "runs": runs}


def measured(options: argparse.Namespace, work: Path) -> None:
    """Make the runs that are wanted and have not ended in the folder, a share of them in each process."""
    seeds = options.seeds or list(range(1 if options.smoke else options.repeats))
    runs = ended(work)
    wanted = [(way, seed) for seed in seeds for way in chosen(options) if str(seed) not in runs.get(way.name, {})]
    shared = {"smoke": options.smoke, "steps": options.steps, "threads": options.threads, "work": str(work)}
    starts = [{**shared, "seed": seed} for seed in seeds if not (work / f"start-{seed}" / "config.json").exists()]
    jobs = [{**shared, "seed": seed, "way": asdict(way)} for way, seed in wanted]

    def ask(share: list[dict[str, Any]]) -> None:
        told = ["--side", json.dumps(share), "--threads", str(options.threads)]
        measure.fresh_process(
            Path(__file__), told, threads=options.threads, python_path=[measure.HERE], timeout=24 * 3600
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        for all_jobs in (starts, jobs):
            shares = [all_jobs[first :: options.jobs] for first in range(options.jobs)]
            list(pool.map(ask, filter(None, shares)))


def chosen(options: argparse.Namespace) -> Iterator[Way]:
    """The ways that were asked for."""
    for way in ways():
        if options.smoke and way.staleness > 1:
            continue
        if options.ways is None or way.name in options.ways:
            yield way
    for given in options.tried:
        name, _, algorithm = given.partition("=")
        for bound in options.try_at:
            yield Way(f"S={bound}, oldest, {name}", bound, True, algorithm)


def sizes(smoke: bool, steps: int) -> dict[str, int]:
    """Of the runs, as in recipes/quickstart.yaml but for the number of held-out sums."""
    if smoke:
        return {"steps": 3, "groups_per_step": 4, "group_size": 2, "warmup_steps": 3, "held_out": 8}
    return {"steps": steps, "groups_per_step": 64, "group_size": 8, "warmup_steps": 1000, "held_out": 900}


def recipe(job: dict[str, Any]) -> dict[str, Any]:
    """recipes/quickstart.yaml, quiet, with more held-out sums."""
    import yaml

    size = sizes(job["smoke"], job["steps"])
    data: dict[str, Any] = yaml.safe_load((measure.ROOT / "recipes" / "quickstart.yaml").read_text())
    data["data"]["eval"]["arguments"]["count"] = size["held_out"]
    data["warmup"]["steps"] = size["warmup_steps"]
    data["rollout"] |= {"groups_per_step": size["groups_per_step"], "group_size": size["group_size"]}
    data["evaluation"] = {"every": 10}
    data["checkpoint"] = {"every": 1000}
    data["tracking"] = {"display": "off", "tensorboard": False, "episodes_every": 0}
    data["hardware"] = {"threads": job["threads"], "device": "cpu"}
    data["run"] = {"steps": size["steps"], "seed": job["seed"]}
    return data


def side(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """What a process of its own is asked for: supervised starts, or runs from them, each noted when it has ended."""
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            if "way" not in job:
                warmed_up(job)
                continue
            way = Way(**job["way"])
            found = {"way": way.name, "seed": job["seed"], "algorithm": json.loads(way.algorithm), **trained(way, job)}
            with (Path(job["work"]) / ENDED).open("a") as notes:
                notes.write(json.dumps(found) + "\n")
            os.chdir(job["work"])
    return {"ended": len(jobs)}


def warmed_up(job: dict[str, Any]) -> None:
    """Write the model that a seed's runs begin with."""
    import shutil

    import strop
    from strop.config.loading import load_config

    data = recipe(job)
    warmup = data.pop("warmup")
    data["data"] = {"train": warmup["data"]}
    data["supervised"] = {"method": "sft", "batch_size": warmup["batch_size"]}
    data["training"] = {"optimizer": warmup["optimizer"]}
    data["run"]["steps"] = warmup["steps"]
    for section in ("rewards", "rollout", "evaluation"):
        del data[section]
    del data["tracking"]["episodes_every"]
    summary = strop.train(load_config(None, data=data), fresh=True)
    shutil.copytree(summary.model, start_of(job))


def start_of(job: dict[str, Any]) -> Path:
    """The folder of the model that a seed's runs begin with."""
    return Path(job["work"]) / f"start-{job['seed']}"


def trained(way: Way, job: dict[str, Any]) -> dict[str, Any]:
    """One run: the step and the accuracy of each evaluation, the ages of its tokens by step, and what MEANS and MOST
    name."""
    from strop.config.loading import load_config

    data = recipe(job)
    del data["warmup"]
    data["model"] = {"path": str(start_of(job))}
    data["rollout"] |= {"max_staleness": way.staleness}
    for key, value in json.loads(way.algorithm).items():
        data.setdefault("training" if key in ("mini_batches", "epochs") else "algorithm", {})[key] = value
    folder = asyncio.run(_run(load_config(None, data=data), oldest=way.oldest))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "train"]
    scores = [(record["step"], record["metrics"]["eval/accuracy"]) for record in records if record["kind"] == "eval"]
    ages = [metrics["staleness/mean"] for metrics in steps]
    if way.oldest and ages[way.staleness :] != [float(way.staleness)] * (len(ages) - way.staleness):
        raise RuntimeError(f"{way.name}: tokens were not all {way.staleness} versions old but {ages}")
    means = {name: statistics.fmean(m[name] for m in steps) for name in MEANS if name in steps[0]}
    most = {name: max(m[name] for m in steps) for name in MOST}
    return {
        "step": [step for step, _ in scores],
        "accuracy": [round(accuracy, 4) for _, accuracy in scores],
        **{name: round(value, 5) for name, value in {**means, **most}.items()},
    }


async def _run(config: Any, *, oldest: bool) -> Path:
    """The loop of loops/online.py; with `oldest`, each step waits for all that may be sampled ahead of it."""
    from strop.loops.online import open_run

    async with open_run(config, fresh=True) as run:
        await run.begin()
        while not run.done:
            if oldest:
                await asyncio.gather(*run.collector._tasks.values())
            groups = await run.collect()
            batch = await run.build_batch(groups)
            stats = await run.update(batch)
            run.step += 1
            await run.publish()
            await run.look(groups)
            run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
        await run.finish()
        return Path(run.folder).absolute()


def summaries(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds of each way, in points of per cent where it is accuracy."""
    found: dict[str, Any] = {}
    for name, seeds in runs.items():
        final = [100 * run["accuracy"][-1] for run in seeds.values()]
        found[name] = {
            "accuracy": round(statistics.fmean(final), 2),
            "of_seeds": [round(one, 2) for one in final],
            "curve": [
                round(100 * statistics.fmean(at), 2)
                for at in zip(*(run["accuracy"] for run in seeds.values()), strict=True)
            ],
            "age": round(statistics.fmean(run["staleness/mean"] for run in seeds.values()), 3),
        }
    return found


if __name__ == "__main__":
    main()
