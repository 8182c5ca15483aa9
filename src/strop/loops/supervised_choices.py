"""Choices of `supervised:` that do not fit together, or would change nothing: refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from strop.config import Config
from strop.config.supervised import SupervisedSettings
from strop.errors import UserError


def unfit_choices(config: Config) -> Iterator[UserError]:
    """Every problem with teachers, targets, the reference and noise; the choices of the objectives are not looked at
    here."""
    settings = config.supervised
    assert settings is not None
    yield from _unfit_teachers(settings)
    yield from _unfit_reference(config, settings)
    if settings.neftune_alpha is not None and settings.method != "sft":
        yield _idle("neftune_alpha", f"with {settings.method}", "it belongs to sft")


def _unfit_teachers(settings: SupervisedSettings) -> Iterator[UserError]:
    if settings.method != "distillation":
        for name in ("teachers", "targets"):
            if getattr(settings, name):
                yield _idle(name, f"with {settings.method}", "it belongs to distillation")
        return
    if not settings.teachers and settings.targets is None:
        yield UserError(
            "distillation learns from teachers, and none is named",
            where="supervised.teachers",
            mend="name one, `teachers: [{path: runs/larger}]`, or the file that `strop teach` wrote (`targets`)",
        )
    if len(settings.teachers) == 1 and settings.teachers[0].weight != 1:
        yield _idle("teachers.0.weight", "with a single teacher", "it belongs to several")
    if settings.jsd_beta is not None and settings.divergence != "jensen_shannon":
        chosen = settings.divergence or "forward_kl"
        yield _idle("jsd_beta", f"with divergence {chosen}", "it belongs to jensen_shannon")
    if settings.cross_entropy_weight == 1:
        yield UserError(
            "with a weight of 1 for the data's own tokens the teachers have no effect",
            where="supervised.cross_entropy_weight",
            mend="set it below 1, or set supervised.method to sft",
        )


def _unfit_reference(config: Config, settings: SupervisedSettings) -> Iterator[UserError]:
    from strop.algorithms.paired import OBJECTIVES

    if settings.reference == "auto":
        return
    if not getattr(OBJECTIVES[settings.method], "needs_reference", False):
        having = [name for name, kind in OBJECTIVES.items() if getattr(kind, "needs_reference", False)]
        yield _idle("reference", f"with {settings.method}, which has none", f"it belongs to {', '.join(having)}")
    elif settings.reference == "adapter_off" and config.model.lora is None:
        yield UserError(
            "all weights are trained, so there is no adapter to switch off",
            where="supervised.reference",
            mend="set it to model or precomputed, or train an adapter (model.lora)",
        )
    elif settings.reference == "model" and config.model.lora is not None:
        yield UserError(
            "with adapters the reference is the model without them; a second copy of it would only cost memory",
            where="supervised.reference",
            mend="set it to adapter_off or precomputed, or leave it out",
        )


def _idle(key: str, why: str, otherwise: str) -> UserError:
    return UserError(
        f"`supervised.{key}` has no effect {why}", where=f"supervised.{key}", mend=f"remove it; {otherwise}"
    )
