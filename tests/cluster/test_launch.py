"""`strop launch`: what it writes is valid, is refused where it would not run, and cannot be broken by names."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.cli import app
from strop.cluster.launch.job import hosts_of, kubernetes_name, seconds_of, slurm_name
from strop.cluster.launch.node import wait_for_nodes
from strop.config.loading import load_config
from strop.errors import UserError

RECIPE = "model: {path: m}\ndata: {train: {path: d.jsonl}}\nrewards: {verifiers: [{kind: exact}]}\n"
LARGE = ("cluster.trainer.ranks=8", "cluster.engines.count=4")
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
SBATCH = set((Path(__file__).parent / "sbatch-options.txt").read_text().split())
"""The long options of sbatch(1), Slurm 22.05."""
KINDS = {
    "ray": (["ray"], "r.ray.sh"),
    "slurm": (["slurm", "--nodes", "1"], "r.slurm.sh"),
    "kubernetes": (["kubernetes", "--nodes", "1", "--image", "strop:1"], "r.kubernetes.yaml"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def launch(kind: str, *arguments: str, recipe: str = "r.yaml") -> Any:
    return CliRunner().invoke(app, ["launch", KINDS[kind][0][0], recipe, *KINDS[kind][0][1:], *arguments])


def fake(folder: Path, name: str, body: str) -> Path:
    """A program in `folder/bin`."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def check_script(text: str) -> None:
    parsed = subprocess.run(
        ["bash", "-n"], input=text.encode(errors="surrogateescape"), capture_output=True, check=False
    )
    assert parsed.returncode == 0, parsed.stderr


def shellcheck(path: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run([program, "--norc", str(path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def documents(path: Path) -> tuple[Any, Any]:
    config_map, ray_job = yaml.safe_load_all(path.read_text())
    for value, name in ((config_map, "ConfigMap"), (ray_job, "RayJob")):
        jsonschema.validate(value, {**SCHEMA, "$ref": f"#/$defs/{name}"})
    return config_map, ray_job


# --- the three files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--hosts", "gpu2,me@gpu3"]])
def test_the_script_for_ray(folder: Path, arguments: list[str]) -> None:
    result = launch("ray", *arguments, "run.steps=3")
    assert result.exit_code == 0, result.output
    assert f"runs in  {folder} (relative paths" in result.stdout
    script = folder / "r.ray.sh"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    check_script(text)
    shellcheck(script)
    assert f"TRAIN=(strop train {folder}/r.yaml run.steps=3 cluster.kind=ray cluster.address=auto)" in text
    assert f"NODES={3 if arguments else 1}\n" in text
    assert ("WORKERS=(gpu2 me@gpu3)" if arguments else "WORKERS=()") in text
    assert "--num-gpus=8" in text
    assert "--num-cpus" not in text
    # Only what the script started is stopped.
    assert not re.search(r"^[^#]*\bray stop\b", text, re.MULTILINE)


def test_the_script_for_slurm(folder: Path) -> None:
    options = ["--time", "1-12:00:00", "--partition", "gpu", "--account", "lab", "--memory-per-node", "200"]
    command = ["launch", "slurm", "r.yaml", "--nodes", "3", "--gpus-per-node", "4", *options, *LARGE]
    assert CliRunner().invoke(app, command).exit_code == 0
    script = folder / "r.slurm.sh"
    text = script.read_text()
    check_script(text)
    shellcheck(script)
    lines = text.splitlines()
    until = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if "#SBATCH" in line)
    # sbatch reads no directive behind the first command.
    assert sum(line.startswith("#SBATCH --") for line in lines[:until]) == len(directives)
    assert set(directives) <= SBATCH
    assert directives == {
        "job-name": "strop-r",
        "nodes": "3",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "32",
        "mem": "200G",
        "time": "1-12:00:00",
        "partition": "gpu",
        "account": "lab",
        "output": "strop-r-%j.out",
        "open-mode": "append",
        "signal": "B:USR1@300",
        "requeue": "",
    }


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_manifest_for_kubernetes(folder: Path, nodes: int) -> None:
    (folder / "base.yaml").write_text(RECIPE)
    (folder / "r.yaml").write_text("extends: base.yaml\nrun: {steps: 9}\n")
    options = ["--nodes", str(nodes), "--time", "2:00:00", "--memory-per-node", "64", "--gpus-per-node", "2"]
    result = launch("kubernetes", *options, "run.seed=4")
    assert result.exit_code == 0, result.output
    config_map, ray_job = documents(folder / "r.kubernetes.yaml")
    (folder / "inside.yaml").write_text(config_map["data"]["recipe.yaml"])
    inside = load_config(folder / "inside.yaml")
    assert (inside.run.name, inside.run.steps, inside.run.seed, inside.cluster.kind) == ("r", 9, 4, "ray")
    for name in ("main.sh", "stop.sh"):
        (folder / name).write_text(config_map["data"][name])
        check_script(config_map["data"][name])
        shellcheck(folder / name)
    assert "TRAIN=(strop train /etc/strop/recipe.yaml)" in config_map["data"]["main.sh"]
    spec = ray_job["spec"]
    assert (spec["entrypoint"], spec["shutdownAfterJobFinishes"]) == ("bash /etc/strop/main.sh", True)
    assert spec["activeDeadlineSeconds"] == 7200
    cluster = spec["rayClusterSpec"]
    groups = cluster.get("workerGroupSpecs", [])
    assert [group["replicas"] for group in groups] == ([2] if nodes == 3 else [])
    for group in [cluster["headGroupSpec"], *groups]:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert pod["terminationGracePeriodSeconds"] == 300
        assert container["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "2"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert pod["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]


def test_the_schema_refuses_what_kuberay_would(folder: Path) -> None:
    launch("kubernetes")
    _, ray_job = documents(folder / "r.kubernetes.yaml")
    for change in (
        lambda job: job["spec"].update(entryPoint="x"),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"].pop("rayStartParams"),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0].pop("name"),
    ):
        broken = json.loads(json.dumps(ray_job))
        change(broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, {**SCHEMA, "$ref": "#/$defs/RayJob"})


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run.stpes=3"], "did you mean `run.steps`?"),
        (["cluster.kind=local"], "`cluster.kind` is set by `strop launch`"),
        (["cluster.address=ray://h:1"], "`cluster.address` is set by `strop launch`"),
        (LARGE, "needs 12 GPUs (8 trainer ranks + 4 engines), and 1 node x 8 GPUs make 8"),
        (
            ["--gpus-per-node", "0", "hardware.device=cuda"],
            "needs 1 GPU (1 trainer rank, whose GPU the engine shares), and",
        ),
        (["--gpus-per-node", "1", "cluster.engines.placement=separate"], "needs 2 GPUs (1 trainer rank + 1 engine)"),
        (
            ["--gpus-per-node", "4", "rollout.engine.kind=vllm", "rollout.engine.tensor=4"],
            "needs 5 GPUs (1 trainer rank + 1 engine of 4 GPUs), and 1 node x 4 GPUs make 4",
        ),
        (["--output", "r.yaml", "--force"], "this would replace the recipe"),
        (["--output", "no/where.sh"], "there is no folder no"),
        (["--output", "."], "is a folder"),
    ],
)
def test_what_would_not_run_is_refused_and_nothing_written(
    folder: Path, kind: str, arguments: list[str], text: str
) -> None:
    result = launch(kind, *arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert [path.name for path in folder.iterdir()] == ["r.yaml"]
    assert (folder / "r.yaml").read_text() == RECIPE


SUPERVISED = """
model: {create: {characters: "0123456789+=", hidden_size: 32, layers: 1, heads: 2, context: 32}}
data: {train: {path: "strop.data.arithmetic:problems", arguments: {count: 40, digits: 1}}}
supervised: {method: sft, batch_size: 4}
hardware: {device: cuda}
"""


@pytest.mark.parametrize(
    ("recipe", "changes", "needed"),
    [
        (RECIPE, [], 1),
        (RECIPE, ["cluster.engines.count=3"], 4),
        (RECIPE, ["rollout.engine.kind=vllm", "rollout.engine.tensor=2", "cluster.engines.count=2"], 5),
        (RECIPE, ["rollout.max_staleness=1"], 2),
        # Nothing is sampled, or somebody else does it.
        (SUPERVISED, ["cluster.trainer.ranks=8"], 8),
        (RECIPE, ["cluster.trainer.ranks=8", "rollout.engine={kind: openai, server: {urls: ['http://h:1']}}"], 8),
    ],
)
def test_gpus_that_are_needed(folder: Path, recipe: str, changes: list[str], needed: int) -> None:
    (folder / "r.yaml").write_text(recipe)
    result = launch("ray", "--gpus-per-node", "8", *changes)
    assert result.exit_code == 0, result.stderr
    assert f"1 x 8 GPUs, of which the recipe needs {needed}" in result.stdout


def test_one_gpu_is_shared_by_what_would_be_apart_on_two(folder: Path) -> None:
    result = launch("ray", "--gpus-per-node", "1", "rollout.max_staleness=1")
    assert "of which the recipe needs 1" in result.stdout


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("ray", ["--nodes", "3", "--hosts", "a"], "--nodes 3 with this machine is 2 more, and --hosts names 1"),
        ("ray", ["--nodes", "2"], "--hosts names 0"),
        ("ray", ["--hosts", "a,-oProxyCommand=x"], "'-oProxyCommand=x' is not a host"),
        ("ray", ["--hosts", "a,a"], "a is there twice"),
        ("ray", ["--hosts", "./none"], "the list of hosts cannot be read"),
        ("slurm", ["--time", "soon"], "'soon' is not a time limit"),
        ("slurm", ["--partition", "a\n#SBATCH --uid=0"], "is not a name that Slurm takes"),
        ("slurm", ["--account", "a b"], "is not a name that Slurm takes"),
        ("kubernetes", ["--image", "a b"], "'a b' is not an image"),
        ("kubernetes", ["--claim", "A_b"], "is not the name of a volume claim"),
    ],
)
def test_options_are_checked(folder: Path, kind: str, arguments: list[str], text: str) -> None:
    result = launch(kind, *arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert [path.name for path in folder.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_for_cpus_needs_no_gpus(folder: Path, kind: str) -> None:
    result = launch(kind, "--gpus-per-node", "0", *LARGE)
    assert result.exit_code == 0, result.output
    assert "nodes    1, no GPUs" in result.stdout
    assert "gpu:" not in (folder / KINDS[kind][1]).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_replaced_only_with_force(folder: Path, kind: str) -> None:
    made = folder / KINDS[kind][1]
    made.write_text("mine")
    refused = launch(kind)
    assert refused.exit_code == 2
    assert "is there already" in refused.stderr
    assert made.read_text() == "mine"
    assert launch(kind, "--force").exit_code == 0
    assert made.read_text() != "mine"
    assert launch(kind, "--output", "other").exit_code == 0
    assert (folder / "other").read_text() == made.read_text()
    assert len(list(folder.iterdir())) == 3


def test_a_pipeline_needs_what_its_largest_stage_needs(folder: Path) -> None:
    (folder / "r.yaml").write_text(
        "stages:\n"
        "  small: {model: {path: m}, data: {train: {path: d}}, rewards: {verifiers: [{kind: exact}]}}\n"
        "  large: {model: {path: m}, data: {train: {path: d}}, rewards: {verifiers: [{kind: exact}]},\n"
        "          cluster: {kind: ray, trainer: {ranks: 6}, engines: {count: 3}}}\n"
    )
    assert "needs 9 GPUs (6 trainer ranks + 3 engines)" in launch("ray").stderr
    refused = launch("ray", "stages.small.cluster.kind=local")
    assert "`stages.small.cluster.kind` is set by `strop launch`" in refused.stderr
    assert launch("ray", "stages.large.cluster.engines.count=2").exit_code == 0
    assert "stages.small.cluster.kind=ray stages.small.cluster.address=auto" in (folder / "r.ray.sh").read_text()
    assert launch("kubernetes", "stages.large.cluster.engines.count=2").exit_code == 0
    config_map, _ = documents(folder / "r.kubernetes.yaml")
    assert yaml.safe_load(config_map["data"]["recipe.yaml"])["name"] == "r"


# --- handing it in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_submit_runs_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, program: str) -> None:
    fake(folder, program, f'pwd >{folder}/called; printf "%s\\n" "$@" >>{folder}/called; exit "${{CODE:-0}}"')
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    assert launch(kind, "--submit").exit_code == 0
    made = str(folder / KINDS[kind][1])
    expected = [made] if kind == "slurm" else ["apply", "-f", made]
    assert (folder / "called").read_text().splitlines() == [str(folder), *expected]
    monkeypatch.setenv("CODE", "7")
    failed = launch(kind, "--submit", "--force")
    assert failed.exit_code == 1
    assert f"{program} ended with 7" in failed.stderr


def test_submit_for_ray_becomes_the_script(folder: Path) -> None:
    fake(folder, "ray", "exit 0")
    # Found before the real one; what it runs with is the script, and its exit code is the command's.
    (folder / "bin" / "bash").write_text(f'#!/bin/sh\necho "$@" >{folder}/called\nexit 5\n')
    (folder / "bin" / "bash").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "strop", "launch", "ray", "r.yaml", "--submit"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert (folder / "called").read_text() == f"{folder}/r.ray.sh\n"
    assert done.stdout.startswith("r.ray.sh\n")


@pytest.mark.parametrize(("kind", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl"), ("ray", "bash")])
def test_a_missing_program_is_the_users_to_mend(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, program: str
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    result = launch(kind, "--submit")
    assert result.exit_code == 2
    assert f"--submit needs the program '{program}'" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["r.yaml"]


# --- names --------------------------------------------------------------------------------------------------------

NASTY = st.text(
    st.sampled_from(" '\"$()`\\\n\t;&|<>*?!#~={}[]-.aZ9é\udcff")
    | st.characters(codec="utf-8", exclude_characters="/\0"),
    min_size=1,
    max_size=24,
).filter(lambda text: text not in (".", "..") and len(text.encode(errors="surrogateescape")) < 120)
QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(place=NASTY, stem=NASTY, name=NASTY)
def test_names_reach_the_driver_as_they_are_and_nothing_else_happens(
    tmp_path_factory: pytest.TempPathFactory, place: str, stem: str, name: str
) -> None:
    """The lines that assign are run by bash, which then says what it understood."""
    root = tmp_path_factory.mktemp("names")
    inside = root / place
    inside.mkdir()
    recipe = inside / f"{stem}.yaml"
    recipe.write_text(RECIPE)
    before = os.getcwd()
    os.chdir(inside)
    try:
        for kind in ("ray", "slurm"):
            made = inside / "made.sh"
            override = f"run.folder={name}"
            result = launch(kind, "--output", str(made), "--force", override, recipe=f"./{stem}.yaml")
            assert result.exit_code == 0, result.output
            text = os.fsdecode(made.read_bytes())
            check_script(text)
            values = text[: text.index("STARTED=()")] + 'printf \'%s\\0\' "$FOLDER" "${TRAIN[@]}"\n'
            said = subprocess.run(
                ["bash"], input=values.encode(errors="surrogateescape"), capture_output=True, check=True, cwd=root
            ).stdout
            expected = [inside, "strop", "train", recipe, override, "cluster.kind=ray", "cluster.address=auto"]
            assert said == b"".join(os.fsencode(str(part)) + b"\0" for part in expected)
            assert all("\n" not in line and len(line) < 200 for line in text.splitlines() if line.startswith("#SBATCH"))
        assert sorted(path.name for path in root.iterdir()) == [place]
    finally:
        os.chdir(before)


@given(stem=st.text(max_size=80))
def test_names_of_jobs_are_allowed(stem: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", slurm_name(stem), re.ASCII)
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", kubernetes_name(stem), re.ASCII)


@QUIET
@given(name=NASTY.filter(lambda text: "\udcff" not in text))
def test_the_manifest_stays_two_documents_whatever_a_recipe_holds(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    root = tmp_path_factory.mktemp("manifest")
    (root / "r.yaml").write_text(RECIPE)
    made = root / "made.yaml"
    override = f"run.folder=x\n---\n{name}"
    result = launch("kubernetes", "--output", str(made), override, recipe=str(root / "r.yaml"))
    assert result.exit_code == 0, result.output
    config_map, _ = documents(made)
    (root / "inside.yaml").write_text(config_map["data"]["recipe.yaml"])
    assert load_config(root / "inside.yaml").run.folder == load_config(root / "r.yaml", [override]).run.folder


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("12:00:00", 43200), ("2-0", 172800), ("1-1:30", 91800), ("1-1:30:5", 91805)],
)
def test_times_are_those_of_slurm(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:0", "1:2:3:4", "1h", "-1", "1-", "１"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match="is not a time limit"):
        seconds_of(text)


def test_hosts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# mine\ngpu2 slots=8\n\nme@gpu3  # slow\n[fe80::1%eth0]\n".replace("[fe80", "fe80").replace("]", "")
    )
    assert hosts_of(str(file)) == ["gpu2", "me@gpu3", "fe80::1%eth0"]
    file.write_text("# none\n")
    with pytest.raises(UserError, match="no host in the list"):
        hosts_of(str(file))


# --- waiting ------------------------------------------------------------------------------------------------------


def node(name: str, gpus: int, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerHostname": name, "Resources": {"GPU": gpus} if gpus else {}}


def answers(*given: Any) -> Callable[[], Any]:
    left = list(given)

    def nodes() -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return nodes


def test_waiting_ends_when_all_nodes_have_joined_with_their_gpus() -> None:
    steps = answers(ConnectionError(), [node("a", 4)], [node("a", 4), node("b", 0)], [node("a", 4), node("b", 4)])
    assert wait_for_nodes(steps, 2, 8, seconds=60, every=0) == ""


def test_waiting_says_who_is_there() -> None:
    steps = answers([node("b", 4), node("a", 4), node("c", 4, alive=False)])
    missing = wait_for_nodes(steps, 3, 12, seconds=0.05, every=0.01)
    assert missing == "2 of 3 nodes and 8 of 12 GPUs are in the Ray cluster (a, b) after 0.05 seconds"


def test_waiting_ends_when_a_process_has_ended() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    missing = wait_for_nodes(answers(ConnectionError()), 1, 0, seconds=600, processes=[os.getpid(), process.pid])
    assert missing.startswith(f"process {process.pid}, which started nodes, has ended; 0 of 1 nodes")


def test_what_is_said_next_can_be_pasted(folder: Path) -> None:
    (folder / "it's $(mine).yaml").write_text(RECIPE)
    said = launch("ray", recipe="it's $(mine).yaml").stdout
    [line] = [line for line in said.splitlines() if line.startswith("next")]
    assert shlex.split(line)[1:] == ["bash", "it's $(mine).ray.sh"]
