"""Where the engines of a recipe are, and what of `cluster:` would have no effect there."""

from __future__ import annotations

from collections.abc import Iterator

from strop.cluster.placement import Device
from strop.config import Config
from strop.config.cluster import ClusterSettings, EnvironmentPlacement, PublishingSettings
from strop.config.pipeline import PipelineConfig
from strop.errors import ConfigError, UserError


def colocated(config: Config, *, ahead: bool | None = None) -> bool:
    """Whether the engine is in the process of the only trainer rank and samples with its weights. An engine that needs
    several GPUs is not.

    Args:
        ahead: whether sampling goes on while the trainer computes, for which each needs a process of its own; None for
            what the recipe says.

    Raises:
        ConfigError: placement, transport and numbers do not go together.
    """
    settings, ahead = config.cluster, config.rollout.max_staleness > 0 if ahead is None else ahead
    one = settings.trainer.ranks == 1 and settings.engines.count == 1
    several = config.rollout.engine.tensor > 1
    moves = settings.publishing.transport not in ("auto", "shared")
    if settings.engines.placement == "colocated":
        if not one or moves or several:
            what = (
                "several trainer ranks or engines"
                if not one
                else "a transport"
                if moves
                else "an engine of several GPUs"
            )
            raise _refused(
                f"a colocated engine samples with the weights of the only trainer rank, and there is {what}",
                where="cluster.engines.placement",
                mend="set it to separate, or leave it on auto",
            )
        return True
    chosen = settings.engines.placement == "auto" and one and not moves and not ahead and not several
    if settings.publishing.transport == "shared" and not chosen:
        raise _refused(
            "weights cannot be shared between processes",
            where="cluster.publishing.transport",
            mend="leave it on auto, or set engines and ranks to 1 and placement to colocated",
        )
    return chosen


def engines_apart(config: Config) -> int:
    """How many engines have a process of their own. Raises ConfigError as `colocated`."""
    if config.supervised is not None or config.rollout.engine.server is not None or colocated(config):
        return 0
    return config.cluster.engines.count


def check_fits(settings: Config | PipelineConfig, nodes: int, gpus: int) -> int:
    """The GPUs that a recipe takes at once on a cluster; of a pipeline, those of its largest stage.

    Args:
        gpus: GPUs of each node; 0 leaves everything on CPUs, unless the recipe asks for `cuda`.

    Raises:
        UserError: the nodes have fewer. ConfigError: placement, transport and numbers do not go together.
    """
    if isinstance(settings, PipelineConfig):
        return max(check_fits(stage, nodes, gpus) for stage in settings.stages.values())
    device, ranks, tensor = settings.hardware.device, settings.cluster.trainer.ranks, settings.rollout.engine.tensor
    if device in ("cpu", "mps") or (device == "auto" and gpus == 0):
        return 0
    config, _ = settled(settings, "cuda", nodes * gpus)
    engines = engines_apart(config)
    needed = ranks + engines * tensor
    if needed > nodes * gpus:
        parts = [_count(ranks, "trainer rank")]
        if engines:
            parts.append(_count(engines, "engine") + (f" of {tensor} GPUs" if tensor > 1 else ""))
        elif config.supervised is None and config.rollout.engine.server is None:
            parts[0] += ", whose GPU the engine shares"
        raise UserError(
            f"the recipe needs {_count(needed, 'GPU')} ({' + '.join(parts)}), and "
            f"{_count(nodes, 'node')} x {_count(gpus, 'GPU')} make {nodes * gpus}",
            where="cluster.trainer.ranks" + (", cluster.engines.count" if engines else ""),
            mend="give more with --nodes or --gpus-per-node, or ask for fewer in the recipe",
        )
    return needed


def settled(config: Config, device: Device, gpus: int) -> tuple[Config, tuple[str, ...]]:
    """The recipe with the place of its engines settled where it samples ahead, and why it is so.

    Args:
        gpus: of the cluster.
    """
    cluster = config.cluster
    if config.supervised is not None or not config.rollout.max_staleness or cluster.engines.placement != "auto":
        return config, ()
    if config.rollout.engine.server is not None:
        return config, ()
    wanted = cluster.trainer.ranks + cluster.engines.count * config.rollout.engine.tensor
    apart = device == "cpu" or gpus >= wanted or not colocated(config, ahead=False)
    why = (
        "sampling goes on while the trainer computes (rollout.max_staleness), so the engine has a process of its own"
        if apart
        else f"trainer and engine would need {wanted} GPUs, and there is {gpus}: they take turns on it"
    )
    engines = cluster.engines.model_copy(update={"placement": "separate" if apart else "colocated"})
    return config.model_copy(update={"cluster": cluster.model_copy(update={"engines": engines})}), (why,)


def device_of(config: Config, here: str, gpus: int) -> tuple[Device, tuple[str, ...]]:
    """(what the processes compute on, why where that is not what this machine has).

    Args:
        here: the device that this process would take. gpus: of the cluster, whose driver may be on a node without one.
    """
    if here == "cuda":
        return "cuda", ()
    if config.hardware.device == "auto" and gpus:
        return "cuda", (f"the cluster has {gpus} GPUs, and this machine none",)
    return "cpu", ()


def idle_in_cluster(config: Config) -> Iterator[UserError]:
    """Settings of engines where there are none, and of moving weights where they are not moved."""
    settings = config.cluster
    if settings.kind == "local":  # its own validation has looked
        return
    if config.supervised is None and config.environment is None:
        for key, field in EnvironmentPlacement.model_fields.items():
            if getattr(settings.environments, key) != field.default:
                yield _idle(f"cluster.environments.{key}", "without `environment`")
    if config.supervised is not None:
        yield from _idle_sections(
            settings, ("engines", "environments", "publishing"), "with `supervised`: nothing is sampled"
        )
    elif config.rollout.engine.server is not None:
        why = "with servers, which others have started and which load weights themselves"
        yield from _idle_sections(settings, ("engines", "publishing"), why)
    elif settings.publishing.bucket_mb != PublishingSettings().bucket_mb and colocated(config):
        why = "with a colocated engine, to which nothing is moved"
        yield _idle("cluster.publishing.bucket_mb", why, "set cluster.engines.placement to separate")


def _idle_sections(settings: ClusterSettings, names: tuple[str, ...], why: str) -> Iterator[UserError]:
    for name in names:
        given = getattr(settings, name)
        for key, field in type(given).model_fields.items():
            if getattr(given, key) != field.default:
                yield _idle(f"cluster.{name}.{key}", why)


def _idle(key: str, why: str, mend: str = "") -> UserError:
    return UserError(f"`{key}` has no effect {why}", where=key, mend=mend or "remove the line")


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _refused(what: str, *, where: str, mend: str) -> ConfigError:
    return ConfigError([UserError(what, where=where, mend=mend)])


__all__ = ["check_fits", "colocated", "device_of", "engines_apart", "idle_in_cluster", "settled"]
