"""`strop launch …`: the job that runs a recipe on a cluster."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli_options import Debug, Overrides
from strop.errors import UserError
from strop.paths import user_path

if TYPE_CHECKING:
    from strop.cluster.launch.job import Job
    from strop.config import Config
    from strop.config.pipeline import PipelineConfig

launch = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a recipe on the nodes of a cluster.")

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes, with the one on which `strop train` is.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of each node; 0 for CPUs only.")]
Cpus = Annotated[
    int | None, typer.Option("--cpus-per-node", min=1, help="CPUs of each node; 8 for each GPU when not set.")
]
Memory = Annotated[int | None, typer.Option("--memory-per-node", min=1, help="Memory of each node in GiB.")]
Time = Annotated[str | None, typer.Option(metavar="H:M:S", help="Longest time of the job, as Slurm writes it.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write it; beside the recipe if not set.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]


@launch.command("ray")
def launch_ray(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes, with this machine; one more than --hosts when not set.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="The other nodes: a list with commas, or a file of lines.")
    ] = None,
    gpus: Gpus = 8,
    cpus: Annotated[
        int | None, typer.Option("--cpus-per-node", min=1, help="CPUs of each node; Ray counts them when not set.")
    ] = None,
    output: Output = None,
    force: Force = False,
    submit: Annotated[bool, typer.Option("--submit", help="Run the script.")] = False,
    debug: Debug = False,
) -> None:
    """A script that starts Ray here and on machines that ssh reaches, trains, and stops Ray.

    \b
    Examples:
      strop launch ray mine.yaml --nodes 1 --gpus-per-node 4 --submit
      strop launch ray mine.yaml --hosts gpu2,gpu3 run.steps=500
    """
    from strop.cluster.launch import file
    from strop.cluster.launch.job import hosts_of
    from strop.cluster.launch.ray_script import ray_script

    others = hosts_of(hosts) if hosts is not None else []
    count = len(others) + 1 if nodes is None else nodes
    if count != len(others) + 1:
        raise UserError(
            f"--nodes {count} with this machine is {count - 1} more, and --hosts names {len(others)}",
            where="--nodes, --hosts",
            mend="name the other machines with --hosts, and leave --nodes away",
        )
    job, _, needed = _prepared(recipe, overrides, nodes=count, gpus=gpus, cpus=cpus)
    path = _path(recipe, output, ".ray.sh")
    file.check_writable(path, recipe, force=force)
    programs = [file.program(name) for name in ("bash", "ray", *(["ssh"] if others else []))] if submit else []
    file.write(path, ray_script(job, others), executable=True, force=force)
    _say(path, job, needed, ["bash", path], submit)
    if submit:
        # The script takes this process's place: signals reach it, and its exit code is the command's.
        sys.stdout.flush()
        os.execv(programs[0], ["bash", str(path.absolute())])


@launch.command("slurm")
def launch_slurm(
    recipe: Recipe,
    nodes: Nodes,
    overrides: Overrides = None,
    gpus: Gpus = 8,
    cpus: Cpus = None,
    memory: Memory = None,
    time: Time = None,
    partition: Annotated[str | None, typer.Option(help="The partition, as sinfo shows it.")] = None,
    account: Annotated[str | None, typer.Option(help="The account that is charged.")] = None,
    output: Output = None,
    force: Force = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it in with sbatch.")] = False,
    debug: Debug = False,
) -> None:
    """A batch script for Slurm, which saves before its time is over and goes on in the next job.

    \b
    Examples:
      strop launch slurm mine.yaml --nodes 4 --time 24:00:00 --partition gpu
      strop launch slurm mine.yaml --nodes 2 --gpus-per-node 4 --submit run.steps=500
    """
    from strop.cluster.launch import file
    from strop.cluster.launch.job import seconds_of
    from strop.cluster.launch.slurm_script import slurm_script

    seconds = None if time is None else seconds_of(time)
    cpus = cpus or 8 * max(1, gpus)
    job, _, needed = _prepared(recipe, overrides, nodes=nodes, gpus=gpus, cpus=cpus, memory=memory, seconds=seconds)
    text = slurm_script(job, recipe.stem, partition=partition, account=account, time=time)
    path = _path(recipe, output, ".slurm.sh")
    file.check_writable(path, recipe, force=force)
    sbatch = file.program("sbatch") if submit else ""
    file.write(path, text, executable=True, force=force)
    _say(path, job, needed, ["sbatch", path], submit)
    if submit:
        file.submit([sbatch, str(path.absolute())], job.folder)


@launch.command("kubernetes")
def launch_kubernetes(
    recipe: Recipe,
    nodes: Nodes,
    image: Annotated[str, typer.Option(help="A container image with strop and Ray.")],
    overrides: Overrides = None,
    gpus: Gpus = 8,
    cpus: Cpus = None,
    memory: Memory = None,
    time: Time = None,
    claim: Annotated[
        str, typer.Option(help="The volume claim for runs and data; every node mounts it at /strop.")
    ] = "strop",
    output: Output = None,
    force: Force = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it in with kubectl apply.")] = False,
    debug: Debug = False,
) -> None:
    """A RayJob for Kubernetes with the KubeRay operator.

    \b
    Examples:
      strop launch kubernetes mine.yaml --nodes 2 --image registry.example/strop:0.1.0
      strop launch kubernetes mine.yaml --nodes 2 --image strop:0.1.0 --claim shared --submit
    """
    from strop.cluster.launch import file
    from strop.cluster.launch.job import seconds_of
    from strop.cluster.launch.kubernetes import SHARED, manifest

    seconds = None if time is None else seconds_of(time)
    cpus = cpus or 8 * max(1, gpus)
    job, settings, needed = _prepared(
        recipe, overrides, nodes=nodes, gpus=gpus, cpus=cpus, memory=memory, seconds=seconds
    )
    text = manifest(job, recipe.stem, _whole(settings, recipe.stem), image=image, claim=claim)
    path = _path(recipe, output, ".kubernetes.yaml")
    file.check_writable(path, recipe, force=force)
    kubectl = file.program("kubectl") if submit else ""
    file.write(path, text, executable=False, force=force)
    _say(path, job, needed, ["kubectl", "apply", "-f", path], submit, runs_in=f"{SHARED}, the volume claim {claim}")
    if submit:
        file.submit([kubectl, "apply", "-f", str(path.absolute())], job.folder)


def _prepared(
    recipe: Path,
    overrides: list[str] | None,
    *,
    nodes: int,
    gpus: int,
    cpus: int | None,
    memory: int | None = None,
    seconds: int | None = None,
) -> tuple[Job, Config | PipelineConfig, int]:
    """The job, the recipe that it runs, and the GPUs that the recipe needs."""
    from strop.cluster.launch.job import Job, attaching
    from strop.config.pipeline_loading import load_recipe
    from strop.loops.spread import check_fits

    given = list(overrides or [])
    given += attaching(recipe, given)
    settings = load_recipe(recipe, given)
    needed = check_fits(settings, nodes, gpus)
    file = Path(os.path.abspath(user_path(recipe)))
    job = Job(file, tuple(given), Path.cwd(), nodes, gpus=gpus, cpus=cpus, memory=memory, seconds=seconds)
    return job, settings, needed


def _whole(settings: Config | PipelineConfig, stem: str) -> str:
    """The recipe in one file, under the name that its own file gives it."""
    from strop.config import Config
    from strop.config.loading import resolved_yaml
    from strop.config.pipeline_loading import resolved_pipeline

    if not isinstance(settings, Config):
        return resolved_pipeline(settings.model_copy(update={"name": settings.name or stem}))
    run = settings.run.model_copy(update={"name": settings.run.name or stem})
    return resolved_yaml(settings.model_copy(update={"run": run}))


def _path(recipe: Path, output: Path | None, suffix: str) -> Path:
    return user_path(output) if output is not None else user_path(recipe).with_suffix(suffix)


def _say(path: Path, job: Job, needed: int, command: list[str | Path], submitted: bool, *, runs_in: str = "") -> None:
    typer.echo(str(path))
    gpus = f" x {job.gpus} GPUs, of which the recipe needs {needed}" if job.gpus else ", no GPUs"
    typer.echo(f"nodes    {job.nodes}{gpus}")
    typer.echo(f"runs in  {runs_in or job.folder} (relative paths in the recipe begin there)")
    if not submitted:
        typer.echo(f"next     {shlex.join(map(str, command))}")
