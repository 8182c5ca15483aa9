"""Putting the parts of a run together: model, trainer, engine, collector, publisher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file, save_file

from strop.config import Config
from strop.config.training import OptimizerSettings
from strop.data.curriculum import Curriculum
from strop.data.order import Cursor
from strop.data.prompts import PromptDataset, PromptStream
from strop.data.rollouts import RolloutDataset
from strop.loops.algorithm import demands_of
from strop.loops.engine_choices import check_adapters, check_heads, engine_memory, share_beside_trainer
from strop.loops.prepare import Prepared
from strop.loops.step_batch import has_spread
from strop.models.blocks import check_compiler
from strop.models.consistent_mode import make_consistent
from strop.models.forward import check_forward
from strop.models.load import Loaded, add_lora, load_model
from strop.models.scalar import value_head, with_scalar_head
from strop.planning.flops import ModelWork, work_of
from strop.planning.hardware import Hardware, Sizes, choose_sizes
from strop.publishing.into_vllm import IntoWorkers
from strop.publishing.proof import Probe
from strop.publishing.shared import SharedPublisher
from strop.rollout.admission import Admission
from strop.rollout.collector import Collector
from strop.rollout.engine import Engine, Samples, SampleSettings
from strop.rollout.engines.local import LocalEngine
from strop.rollout.engines.vllm import VllmEngine
from strop.rollout.engines.vllm_core import VllmCore
from strop.rollout.engines.vllm_start import VllmSettings
from strop.rollout.player import Player
from strop.rollout.recorded import GroupLike, RecordedCollector
from strop.rollout.window_order import make_order
from strop.rollout.world import World
from strop.tracking.atomic import replacing
from strop.training.parallel.ranks import Alone
from strop.training.single import SingleDeviceTrainer

# Differences of log-probabilities that rounding alone can make.
PROBE_FLOOR = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass
class Roles:
    """The model in memory and what was chosen for it."""

    loaded: Loaded
    model: Any
    sizes: Sizes

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @property
    def vocabulary(self) -> int:
        """Tokens that the output head knows."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def parameters(self) -> str:
        """How many there are, and how many of them are trained."""
        total = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)

        def short(count: int) -> str:
            return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"

        return f"{short(total)} parameters" + ("" if trained == total else f", {short(trained)} trained")

    @property
    def dtype(self) -> str:
        """The number format that is computed in."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @cached_property
    def work(self) -> ModelWork | None:
        """What training costs; first asked before a trainer divides the weights."""
        return work_of(self.model)

    @property
    def card(self) -> str:
        """The name of the device, as torch gives it."""
        device = next(self.model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Chosen(Protocol):
    """What of a prepared recipe a model and an engine are made from; every process of a run has it."""

    @property
    def config(self) -> Config: ...
    @property
    def hardware(self) -> Hardware: ...
    @property
    def longest(self) -> int: ...


class Trained(Chosen, Protocol):
    """What of it a trainer is made from, beside that."""

    @property
    def needs_reference(self) -> bool: ...


class Sampled(Chosen, Protocol):
    """What of it prompts come from, beside that."""

    @property
    def train(self) -> PromptDataset | RolloutDataset: ...


def load_roles(prepared: Chosen, *, scalar: bool = False) -> Roles:
    """Load or make the model, add its adapters, and show that its packed forward pass is its own.

    Args:
        scalar: give the model a scalar head instead of its output head.
    """
    config, hardware = prepared.config, prepared.hardware
    if config.training.compile is True:
        check_compiler(hardware.device)
    loaded = load_model(config.model, device=hardware.device, dtype=hardware.dtype, seed=config.run.seed)
    check_forward(loaded.model, vocabulary=int(loaded.model.get_output_embeddings().weight.shape[0]))
    if scalar:
        loaded = replace(loaded, model=with_scalar_head(loaded.model, pad_id=loaded.pad_id))
    model: Any = loaded.model
    if config.model.lora is not None:
        model = add_lora(loaded.model, config.model.lora, config.run.seed, updates=config.updates)
    if config.rollout.engine.consistent and not scalar:
        make_consistent(model)
        check_forward(model, vocabulary=int(model.get_output_embeddings().weight.shape[0]))
    sizes = choose_sizes(
        config,
        hardware,
        model,
        min(prepared.longest, loaded.context),
        share=share_beside_trainer(config),
        # Whoever only samples has no trainer.
        reference=getattr(prepared, "needs_reference", False),
    )
    return Roles(loaded, model, sizes)


def make_trainer(
    prepared: Trained,
    roles: Roles,
    optimizer: OptimizerSettings,
    *,
    total_updates: int,
    reinforcement: bool,
    ranks: Alone | None = None,
) -> SingleDeviceTrainer:
    """The trainer of reinforcement learning, or of the supervised warm-up. ranks: that it is one of."""
    config = prepared.config
    shared = reinforcement and config.critic.shared
    return SingleDeviceTrainer(
        roles.model,
        optimizer,
        total_updates=total_updates,
        temperature=config.rollout.temperature if reinforcement else 1.0,
        budget=roles.sizes.tokens_per_micro_batch,
        chunk=roles.sizes.logprob_chunk,
        parts=config.training.mini_batches if reinforcement else 1,
        epochs=config.training.epochs if reinforcement else 1,
        reference=reinforcement and prepared.needs_reference,
        recompute=roles.sizes.recompute,
        compiled=roles.sizes.trainer_compiles and not (ranks is not None and ranks.divides_layers),
        value_head=value_head(roles.model) if shared else None,
        value_rate=config.critic.optimizer.learning_rate if shared else None,
        moving_ranks=reinforcement,
        ranks=ranks,
    )


def make_supervised_trainer(
    prepared: Chosen,
    roles: Roles,
    *,
    scalar: bool,
    reference: bool,
    ranks: Alone | None = None,
) -> SingleDeviceTrainer:
    """The trainer of a supervised run. scalar: of a model with a scalar head. reference: the objective asks for one."""
    config = prepared.config
    assert config.supervised is not None
    return SingleDeviceTrainer(
        roles.model,
        config.training.optimizer,
        total_updates=config.run.steps,
        budget=roles.sizes.tokens_per_micro_batch,
        chunk=roles.sizes.logprob_chunk,
        reference=reference,
        recompute=roles.sizes.recompute,
        compiled=roles.sizes.trainer_compiles and not (ranks is not None and ranks.divides_layers),
        head="score" if scalar else "logprobs",
        neftune_alpha=config.supervised.neftune_alpha or 0.0,
        moving_ranks=True,
        ranks=ranks,
    )


def make_engine(prepared: Chosen, roles: Roles) -> Engine:
    """The engine that samples with this model: with the module itself, or with a copy of its weights."""
    settings = prepared.config.rollout.engine
    if settings.kind == "vllm":
        return _make_vllm(prepared, roles)
    return LocalEngine(
        roles.model,
        roles.tokenizer,
        eos_ids=roles.loaded.eos_ids,
        seed=prepared.config.run.seed,
        context=roles.loaded.context,
        max_sequences=roles.sizes.max_sequences,
        prefill_tokens=roles.sizes.prefill_tokens,
        pack_weights=None if settings.pack_weights == "auto" else settings.pack_weights,
        graphs=settings.eager is not True,
        compiled=roles.sizes.engine_compiles,
        recomputes=settings.after_update == "recompute",
    )


def _make_vllm(prepared: Chosen, roles: Roles) -> VllmEngine:
    settings, hardware, base = prepared.config.rollout.engine, prepared.hardware, roles.loaded.model
    lora = prepared.config.model.lora
    chosen = VllmSettings(
        dtype=hardware.dtype,
        context=roles.loaded.context,
        max_sequences=roles.sizes.max_sequences,
        prefill_tokens=roles.sizes.prefill_tokens,
        memory=engine_memory(prepared.config, sleeps=roles.sizes.engine_sleeps),
        eager=hardware.device.type == "cpu" if settings.eager == "auto" else settings.eager,
        prefix_caching=settings.prefix_caching,
        sleeps=roles.sizes.engine_sleeps,
        keeps=settings.after_update == "keep",
        tensor=settings.tensor,
        adapter_rank=0 if settings.merge_adapters or lora is None else lora.rank,
    )
    check_heads(prepared.config, base.config)
    check_adapters(prepared.config, roles.model)
    workers = IntoWorkers(settings.tensor, device=hardware.device) if settings.tensor > 1 else None
    return VllmEngine(
        roles.model,
        lambda: VllmCore(base.config, type(base).__name__, chosen, workers),
        roles.tokenizer,
        eos_ids=roles.loaded.eos_ids,
        seed=prepared.config.run.seed,
        context=roles.loaded.context,
        # In a run a publication follows each sleep, so nobody needs the weights that vLLM has; with adapters beside
        # them it brings no others.
        sleep_level=2 if settings.merge_adapters else 1,
        merges=settings.merge_adapters,
    )


def make_probe(vocabulary: int, dtype: str) -> Probe:
    """What trainer and engines are compared by."""
    return Probe.make(vocabulary, floor=PROBE_FLOOR[dtype])


def make_publisher(roles: Roles, engine: Engine) -> SharedPublisher:
    return SharedPublisher(engine, make_probe(roles.vocabulary, roles.dtype))


def make_stream(prepared: Sampled) -> PromptStream:
    """Training prompts, or groups of completions, in the order of the run's seed."""
    config, train = prepared.config, cast(Any, prepared.train)
    source = train.groups if isinstance(train, RolloutDataset) else train.source
    cursor = Cursor(source, seed=config.run.seed, shuffle=config.data.shuffle)
    settings, curriculum = config.data.curriculum, None
    if settings is not None:
        size = config.rollout.group_size
        curriculum = Curriculum(settings, len(cursor), seed=config.run.seed, group_size=size)
    return PromptStream(train, cursor, curriculum)


def make_player(world: World | None, roles: Roles, engine: Samples) -> Player:
    """What plays the episodes of training and evaluation."""
    return Player(engine, roles.tokenizer, world)


def make_collector(
    prepared: Prepared, roles: Roles, player: Player, stream: PromptStream, progress: Any
) -> Collector | RecordedCollector:
    """Where the groups of a step come from."""
    rollout, offline = prepared.config.rollout, prepared.config.offline
    demands = demands_of(prepared.algorithm)
    size = rollout.groups_per_step
    admission = Admission(size, rollout.ahead, last=prepared.config.run.steps * size)
    if offline is not None:
        return RecordedCollector(
            lambda count: [cast(GroupLike, stream.next()[0]) for _ in range(count)],
            prepared.scorer if offline.rewards == "verify" else None,
            # A warm-up has changed the weights, so no completion is their own.
            fingerprint=roles.loaded.fingerprint if prepared.config.warmup is None else "none",
            admission=admission,
            worth=has_spread if demands.without_spread == "resample" else None,
            max_refills=demands.max_refills,
            greedy=demands.greedy,
        )
    return Collector(
        player,
        prepared.scorer,
        stream.take,
        settings=SampleSettings(rollout.max_new_tokens, rollout.temperature, tuple(rollout.stop)),
        group_size=rollout.group_size,
        admission=admission,
        progress=progress,
        worth=has_spread if demands.without_spread == "resample" else None,
        max_refills=demands.max_refills,
        order=make_order(rollout.window.order, groups_per_step=size, max_staleness=rollout.max_staleness),
        greedy=demands.greedy,
        tree=rollout.tree,
    )


def save_reference(run: Path, roles: Roles) -> None:
    """Keep the weights that a warm-up made: they are the reference, and no path names them."""
    write_reference(run, dict(roles.model.named_parameters()))


def write_reference(run: Path, parameters: Mapping[str, torch.Tensor]) -> None:
    """Write what `restore_reference` reads."""
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    weights = {name: p.detach().contiguous() for name, p in parameters.items()}
    with replacing(folder / "reference.safetensors") as temporary:
        save_file(weights, temporary)


def restore_reference(run: Path, roles: Roles) -> None:
    """Load what `save_reference` kept, if it did; a trainer made now takes it as its reference."""
    path = run / "checkpoints" / "reference.safetensors"
    if not path.exists():
        return
    weights = load_file(path)
    with torch.no_grad():
        for name, parameter in roles.model.named_parameters():
            parameter.copy_(weights[name])
