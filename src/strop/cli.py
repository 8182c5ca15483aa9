"""The command line: parses, calls, prints. Everything heavy is imported inside the commands."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from strop import __version__
from strop.cli_algorithms import algorithms
from strop.cli_cluster import cluster
from strop.cli_launch import launch
from strop.cli_options import (
    DEBUG,
    Checkpoint,
    Debug,
    MaybeWithStep,
    Overrides,
    Profile,
    load,
    run_or_recipe,
    step_asked,
)
from strop.cli_registry import registry, seal
from strop.cli_rollouts import replay, rollout
from strop.cli_serve import report, serve
from strop.cli_view import view
from strop.errors import StropError, UserError

if TYPE_CHECKING:
    from strop.config import Config


class _Commands(TyperGroup):
    """The one place where errors become text and exit codes: 2 for the user's to mend, 1 for failures."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (StropError, KeyboardInterrupt) as error:
            _traceback(ctx)
            _say(error.block() if isinstance(error, StropError) else _stopped(ctx))
            raise typer.Exit(error.exit_code if isinstance(error, StropError) else 130) from None
        except Exception as error:
            # typer's own: usage errors, exits, and a reader of our output that went away.
            if isinstance(error, (_UsageError, typer.Exit, typer.Abort, BrokenPipeError)):
                raise
            _traceback(ctx)
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            hint = "" if ctx.meta.get(DEBUG) else "\n  mend:  run the same command with --debug for the traceback"
            _say(f"strop failed: {what}{hint}")
            raise typer.Exit(1) from None


_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _traceback(ctx: typer.Context) -> None:
    if ctx.meta.get(DEBUG):
        import traceback

        traceback.print_exc()


def _stopped(ctx: typer.Context) -> str:
    if ctx.invoked_subcommand == "train":
        return "stopped; the same command goes on from the last checkpoint"
    if ctx.invoked_subcommand == "rollout":
        return "stopped; the same command goes on behind the last prompts"
    return "stopped"


def _say(text: str) -> None:
    """An error on standard error, in red on a terminal."""
    typer.secho(text, fg="red" if sys.stderr.isatty() else None, err=True)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"strop {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="A recipe is a YAML file; `strop config explain` lists what can be in it.",
)
models = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Models that can be fetched by a short name.")
runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What ran, and how it went.")
config = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Recipes and what can be in them.")
app.add_typer(models, name="models")
app.add_typer(runs, name="runs")
app.add_typer(config, name="config")
app.add_typer(algorithms, name="algorithms")
app.add_typer(launch, name="launch")
app.add_typer(cluster, name="cluster")
app.add_typer(serve, name="serve")
app.add_typer(registry, name="registry")
app.add_typer(seal, name="seal")


@app.callback()
def _strop(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    """strop sharpens a language model after pre-training.

    \b
    Begin:
      strop train recipes/quickstart.yaml              train; the same command again goes on where it stopped
      strop train recipes/quickstart.yaml run.steps=20 run.seed=1
      strop runs list                                  what ran
      strop view                                       the same in a browser, live
      strop sample runs/quickstart                     talk to what came out
      strop export runs/quickstart --out FOLDER        take the model out of the run
      strop rollout runs/quickstart --out FILE.jsonl   completions in a file, to read or to train on
      strop launch slurm RECIPE --nodes 4              the job that trains on a cluster; also ray, kubernetes
      strop serve                                      submit and follow runs over HTTP
      strop teach recipes/distill-tiny.yaml --out FILE keep what teachers say of a recipe's data
    Find out:
      strop config explain rollout                     what the keys of a section do
      strop config show recipes/quickstart.yaml        a recipe with every default written out
      strop algorithms show dapo                       what an algorithm is, and every choice it makes
    """


@app.command(cls=MaybeWithStep)
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run instead of going on with the last.")] = False,
    retrain: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE", help="Train this stage of a pipeline, and those that use it, anew."),
    ] = None,
    profile: Profile = None,
    debug: Debug = False,
) -> None:
    """Train, or go on with a stopped run or pipeline.

    \b
    Examples:
      strop train recipes/quickstart.yaml
      strop train recipes/quickstart.yaml run.steps=300 training.optimizer.learning_rate=1e-4
      strop train recipes/quickstart.yaml rewards.verifiers.0.weight=2 'rollout.stop=["\\n"]'
      strop train recipes/quickstart.yaml --fresh
      strop train recipes/pipeline-tiny.yaml stages.ppo.run.steps=20
      strop train recipes/pipeline-tiny.yaml --retrain ppo
      strop train recipes/quickstart.yaml --fresh --profile 5
    """
    from strop.config.pipeline_loading import load_recipe

    step = step_asked(profile)
    settings = load_recipe(recipe, overrides or [])
    from strop.loops.train import train as train_recipe

    train_recipe(settings, fresh=fresh, recipe=str(recipe), retrain=retrain or [], profile=step)


@app.command()
def teach(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of `supervised.method: distillation`.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it; `supervised.targets` when not given.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Ask a recipe's teachers about its data once, and keep what they say in a file.

    Training from that file (`supervised.targets`) needs no teacher.

    \b
    Examples:
      strop serve                                      submit and follow runs over HTTP
      strop teach recipes/distill-tiny.yaml --out targets.parquet
      strop train recipes/distill-tiny.yaml supervised.targets=targets.parquet
    """
    settings = load(recipe, overrides)
    from strop.loops.teach import now_and_then
    from strop.loops.teach import teach as ask_teachers

    found = ask_teachers(settings, out=out, progress=now_and_then(lambda line: typer.echo(line, err=True)))
    typer.echo(str(found.path))
    each = found.size / max(1, found.tokens)
    typer.echo(f"{found.examples:,} examples, {found.tokens:,} trained tokens, the {found.k} likeliest told for each")
    typer.echo(f"{found.size / 2**20:.1f} MiB, {each:.0f} bytes a trained token; {found.seconds:.0f} s")
    if found.skipped:
        typer.echo(f"{found.skipped:,} rows were too long and left out")


@app.command("eval")
def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model folder, a run or a fetched model to score instead of the recipe's model."),
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Score only the first prompts, so many.")] = None,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Score a model on held-out prompts (`data.eval`).

    \b
    Examples:
      strop eval recipes/quickstart.yaml --model runs/quickstart
      strop eval runs/quickstart                       a run, by its own recipe
      strop eval runs/quickstart --checkpoint 20       the run after 20 steps
      strop eval recipes/smollm2-cpu.yaml --prompts 50 evaluation.samples=4 evaluation.temperature=1
    """
    run, file = run_or_recipe(recipe, "strop eval RECIPE --model {}")
    if run is not None:
        model = model or str(run)
    settings = load(file, overrides)
    if checkpoint is not None and model is None:
        what, mend = "--checkpoint chooses among those of a run, and none is named", "add --model RUN"
        raise UserError(what, where=f"--checkpoint {checkpoint}", mend=mend)
    model = None if model is None else _checkpoint_of(model, checkpoint)
    from strop.loops.evaluate import evaluate_model

    scores = evaluate_model(settings, model=model, prompts=prompts)
    typer.echo(f"accuracy           {scores.accuracy:.1%}")
    typer.echo(f"reward             {scores.reward:.4f}")
    for name, score in getattr(scores, "components", {}).items():
        typer.echo(f"  {name:<16} {score:.4f}")
    typer.echo(f"completion length  {scores.length:.1f} tokens")
    typer.echo(f"completions        {scores.episodes}")
    if errors := getattr(scores, "errors", 0):
        typer.echo(f"not verified       {errors} (left out of the means)")


@app.command()
def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder, or a fetched model's name.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and end.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Talk to a model: one prompt, or line by line.

    \b
    Examples:
      strop sample runs/quickstart --prompt "12+34="
      strop sample smollm2-135m
      echo "Why is the sky blue?" | strop sample smollm2-135m --temperature 0
    """
    model = _checkpoint_of(model, checkpoint)
    from strop.loops.sample import chat

    chat(model, prompt=prompt, temperature=temperature, max_new_tokens=max_new_tokens, system=system)


app.command()(rollout)
app.command()(replay)
app.command()(view)
app.command()(report)


class _Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a checkpoint, or a model folder.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it; must not exist, or be empty.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapter, in peft's format.")] = False,
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Number format of the weights; as they are when not set.")
    ] = None,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Write a model as a folder of its own, and print the folder.

    A Hugging Face folder, adapters merged, with tokenizer and chat template; `from_pretrained` and servers load it.

    \b
    Examples:
      strop export runs/quickstart --out quickstart-model
      strop export runs/quickstart --checkpoint 40 --out step-40 --dtype bfloat16
      strop export runs/mine --out mine-adapter --adapter
    """
    model = _checkpoint_of(model, checkpoint)
    from strop.models.export import export_model

    typer.echo(str(export_model(model, out, adapter=adapter, dtype=None if dtype is None else dtype.value)))


@models.command("fetch")
def models_fetch(
    name: Annotated[str, typer.Argument(help="A name that `strop models list` shows.")], debug: Debug = False
) -> None:
    """Download a model and print its folder.

    A second call is instant. Example: strop models fetch smollm2-135m
    """
    from strop.models.fetch import fetch

    typer.echo(str(fetch(name)))


@models.command("list")
def models_list(debug: Debug = False) -> None:
    """Models with a short name; which are here."""
    from strop.models.fetch import available

    for entry in available():
        typer.echo(f"{entry.name}\n  {entry.description}\n  {entry.size}")
        typer.echo(f"  {entry.path}" if entry.path else f"  not here; get it with `strop models fetch {entry.name}`")


@runs.command("list")
def runs_list(
    folder: Annotated[Path, typer.Argument(help="Where the runs are kept (`run.folder`).")] = Path("runs"),
    debug: Debug = False,
) -> None:
    """All runs, newest first."""
    from strop.tracking.runs import list_runs, print_runs

    print_runs(list_runs(folder))


@runs.command("show")
def runs_show(
    run: Annotated[Path, typer.Argument(help="The folder of a run or pipeline, or its name in `runs/`.")],
    debug: Debug = False,
) -> None:
    """Everything worth knowing of one run or pipeline.

    Example: strop runs show quickstart
    """
    from strop.tracking.runs import show_run

    in_runs = Path("runs") / run
    inside = len(run.parts) == 1 or in_runs.exists()
    typer.echo(show_run(in_runs if not run.exists() and inside else run))


@config.command("show")
def config_show(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Check a recipe and print it in full.

    Every default is written out, and the output is itself a recipe.

    \b
    Example:
      strop config show recipes/quickstart.yaml algorithm.name=rloo
    """
    from strop.config import Config
    from strop.config.loading import resolved_yaml
    from strop.config.pipeline_loading import load_recipe, resolved_pipeline

    settings = load_recipe(recipe, overrides or [])
    if isinstance(settings, Config):
        text, results = resolved_yaml(settings), [f"# {_result(settings)}"]
    else:
        text = resolved_pipeline(settings)
        results = [f"# stage {name}: {_result(stage)}" for name, stage in settings.stages.items()]
    typer.echo(text, nl=False)
    typer.echo("\n".join(results))


@config.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(help="A key such as training.optimizer; the whole recipe without one.")] = "",
    debug: Debug = False,
) -> None:
    """What a key or a section does.

    Prints its type, default and meaning; for a section, its keys.

    \b
    Examples:
      strop config explain
      strop config explain training.optimizer
      strop config explain rewards.verifiers
    """
    from strop.config.explain import explain

    typer.echo(explain(key))


@config.command("schema")
def config_schema(debug: Debug = False) -> None:
    """The JSON schema of recipes, for editors.

    Example: strop config schema > recipe.schema.json
    """
    import json

    from strop.config.schema import schema

    typer.echo(json.dumps(schema(), indent=2, ensure_ascii=False))


def _result(settings: Config) -> str:
    """What the choices of a recipe come to."""
    if settings.supervised is not None:
        from strop.loops.prepare_examples import listed_objective

        return f"the objective that results: {listed_objective(settings.supervised)}"
    from strop.cli_algorithms import listed
    from strop.loops.algorithm import make_algorithm

    return f"the algorithm that results: {listed(make_algorithm(settings))}"


def _checkpoint_of(model: str, checkpoint: str | None) -> str:
    if checkpoint is None:
        return model
    from strop.models.find import checkpoint_of

    return checkpoint_of(model, checkpoint)


def main() -> None:
    """The `strop` command."""
    app(prog_name="strop")
