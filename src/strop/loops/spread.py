"""Where the engines of a recipe are, and what of `cluster:` would have no effect there."""

from __future__ import annotations

from collections.abc import Iterator

from strop.cluster.placement import Device
from strop.config import Config
from strop.config.cluster import ClusterSettings, EnvironmentPlacement, PublishingSettings
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
    moves = settings.publishing.transport not in ("auto", "shared")
    if settings.engines.placement == "colocated":
        if not one or moves:
            what = "a transport" if one else "several trainer ranks or engines"
            raise _refused(
                f"a colocated engine samples with the weights of the only trainer rank, and there is {what}",
                where="cluster.engines.placement",
                mend="set it to separate, or leave it on auto",
            )
        return True
    several = config.rollout.engine.tensor > 1
    chosen = settings.engines.placement == "auto" and one and not moves and not ahead and not several
    if settings.publishing.transport == "shared" and not chosen:
        raise _refused(
            "weights cannot be shared between processes",
            where="cluster.publishing.transport",
            mend="leave it on auto, or set engines and ranks to 1 and placement to colocated",
        )
    return chosen


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


def _refused(what: str, *, where: str, mend: str) -> ConfigError:
    return ConfigError([UserError(what, where=where, mend=mend)])


__all__ = ["colocated", "device_of", "idle_in_cluster", "settled"]
