"""`strop rollout` and `strop replay`: completions in a file, and a step that is trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strop.cli_options import Debug, Overrides, load, run_or_recipe
from strop.errors import UserError


def rollout(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write: a name in .jsonl or .parquet.")],
    overrides: Overrides = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only the first prompts, so many; else all.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions of each prompt; rollout.group_size when not set.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="Of a run: the step whose weights sample; the latest when not set.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    debug: Debug = False,
) -> None:
    """Sample completions of the training prompts, score them, and write them to a file.

    One row for each completion: texts, token ids, log-probabilities, reward, status, the columns of the data. A recipe
    with `offline:` trains on such a file. The same command goes on with a file that was interrupted.

    \b
    Examples:
      strop rollout recipes/quickstart.yaml --out sums.jsonl --prompts 100
      strop rollout runs/quickstart --out sums.parquet --samples 16 rollout.temperature=0.7
      strop rollout runs/quickstart --checkpoint 0 --out before.jsonl
    """
    run, file = run_or_recipe(recipe, "strop rollout RECIPE model.path={}")
    if checkpoint is not None and run is None:
        raise UserError(
            "--checkpoint is a step of a run, and this is a recipe",
            where=f"--checkpoint {checkpoint}",
            mend="name the run's folder, or set model.path",
        )
    settings = load(file, overrides)
    from strop.loops.rollout import rollout as write_rollouts

    found = write_rollouts(settings, out, run=run, checkpoint=checkpoint, prompts=prompts, samples=samples, force=force)
    typer.echo(f"{found.completions:,} completions of {found.prompts:,} prompts written to {found.path}")
    if found.accuracy == found.accuracy:
        typer.echo(f"accuracy           {found.accuracy:.1%}")
    if found.reward == found.reward:
        typer.echo(f"reward             {found.reward:.4f}")
    typer.echo(f"completion length  {found.length:.1f} tokens")
    if found.errors:
        typer.echo(f"not verified       {found.errors} (their reward is null)")


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[int, typer.Option(min=1, help="The step to train again.")],
    debug: Debug = False,
) -> None:
    """Train a step of a run again, without sampling, and compare.

    Takes the checkpoint before the step and the completions that it was trained on, makes the update, and says whether
    metrics and weights are bit-equal to those of the run (exit code 1 if not). The run's folder stays as it is.

    \b
    Example:
      strop replay runs/quickstart --step 40
    """
    from strop.loops.replay import replay as train_again
    from strop.loops.replay import shown

    found = train_again(run, step)
    typer.echo(shown(found))
    if not found.equal:
        raise typer.Exit(1)
