"""`cluster:` where the parts of a run are: in one process, or in many."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from strop.config.base import Auto, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


class TrainerPlacement(StrictModel):
    """`cluster.trainer:` the processes that train together, and how they divide the work."""

    ranks: PositiveInt = 1
    """Processes that train together, one for each GPU. What `tensor` and `context` leave of them divides the streams of
    a step, and with `fsdp` the weights."""
    backend: Literal["auto", "ddp", "fsdp"] = "auto"
    """`ddp`: every rank holds all weights. `fsdp`: each holds a share of weights, gradients and optimizer state, and
    gathers a block while it computes it (FSDP2, arXiv 2304.11277). `auto` takes `ddp` while weights, gradients and
    optimizer state fit a third of the memory of one device."""
    tensor: PositiveInt = 1
    """Ranks that share each layer: heads, intermediate features, vocabulary and experts are divided among them (tensor
    parallelism, arXiv 1909.08053)."""
    sequence: bool = False
    """With `tensor`: also divide what lies between the layers, along the stream (sequence parallelism,
    arXiv 2205.05198). Less memory for activations."""
    context: PositiveInt = 1
    """Ranks that share each packed stream, for streams that are too long for one device; attention exchanges heads for
    positions (Ulysses, arXiv 2309.14509)."""
    replicas: PositiveInt = 1
    """With `fsdp`: copies of the divided model. Weights are divided within a copy, gradients are added up over all."""
    offload: bool = False
    """With `fsdp`: keep the shares of weights, gradients and optimizer state in the CPU's memory."""
    gradient_sync: Literal["auto", "every_pass", "last_pass"] = "auto"
    """With `fsdp`: how often gradients are summed over the ranks. `last_pass`: once an update; until then each rank
    keeps the whole gradient in float32, 4 bytes a trained weight. `every_pass`: after each micro-batch, of which a rank
    keeps its share. `auto` takes `last_pass` while a whole gradient beside the rank's share of weights, gradients and
    optimizer state fits a third of the memory of one device. With `ddp` it is always once an update."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        product = self.tensor * self.context * self.replicas
        if self.ranks % product:
            raise ValueError(
                f"ranks ({self.ranks}) cannot be divided by tensor x context x replicas "
                f"({self.tensor} x {self.context} x {self.replicas})"
            )
        if self.ranks == 1 and (self.backend != "auto" or self.offload):
            raise ValueError("backend and offload have no effect while ranks is 1")
        if self.gradient_sync != "auto" and (self.ranks == 1 or self.backend != "fsdp"):
            raise ValueError("gradient_sync is of several ranks with backend: fsdp; set both, or leave it at auto")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence has no effect while tensor is 1")
        if self.backend == "ddp" and (self.replicas > 1 or self.offload):
            raise ValueError("replicas and offload are of the backend fsdp; with ddp every rank is a replica")
        return self


class EnginePlacement(StrictModel):
    """`cluster.engines:` the processes that sample."""

    count: PositiveInt = 1
    """Sampler engines, among which prompts are divided. Draws are keyed by the sample: results do not depend on it."""
    placement: Literal["auto", "colocated", "separate"] = "auto"
    """`colocated`: the engine samples with the first trainer rank's own module, so nothing has to be moved (one engine,
    one trainer rank). `separate`: in processes of their own. `auto` is `colocated` where that can be."""


class EnvironmentPlacement(StrictModel):
    """`cluster.environments:` the processes that environments live in."""

    workers: NonNegativeInt | Auto = "auto"
    """Processes of one CPU each that play the environments' part of episodes, many at once; 0 keeps environments in
    the driver. `auto` takes up to 4 for Python classes and Gymnasium (`environment.kind`: `python`, `self_play`,
    `gymnasium`), whose code computes where it lives, if the cluster has CPUs to spare; others stay in the driver.
    Results do not depend on it."""


class PublishingSettings(StrictModel):
    """`cluster.publishing:` how new weights get from the trainer to the engines."""

    transport: Literal["auto", "shared", "ipc", "broadcast", "disk", "delta"] = "auto"
    """`shared`: trainer and engine have one module. `ipc`: memory that two processes of one machine, or one GPU, share.
    `broadcast`: through NCCL or gloo, in buckets. `disk`: safetensors in a folder that all can read. `delta`: only
    values that changed, compressed. `auto` takes the first of `shared`, `ipc` and `broadcast` that can be. With
    adapters all of them move the adapters alone."""
    bucket_mb: PositiveInt = 128
    """Megabytes (2^20 bytes) that are moved at a time."""
    folder: str | None = None
    """Folder for `disk`; below the run's own when not set. All nodes must see it."""

    @model_validator(mode="after")
    def _of_the_transport(self) -> Self:
        if self.folder is not None and self.transport != "disk":
            raise ValueError(f"folder has no effect with transport {self.transport}; it is of disk")
        unused = self.transport in ("shared", "disk", "delta")
        if unused and self.bucket_mb != type(self).model_fields["bucket_mb"].default:
            raise ValueError(f"bucket_mb has no effect with transport {self.transport}; it is of ipc and broadcast")
        return self


class SupervisionSettings(StrictModel):
    """`cluster.supervision:` when a process counts as lost, and what then happens."""

    heartbeat: PositiveFloat = 2.0
    """Seconds between two signs of life that are asked of each process."""
    timeout: PositiveFloat = 8.0
    """Seconds without one after which a process counts as lost; more than `heartbeat`."""
    wait: PositiveFloat = 1800.0
    """Most seconds that anything may take that is asked of a process; the error names who is missing."""
    restarts: NonNegativeInt = 3
    """How often lost processes are started again in one run. Engines get the weights anew and are proved; after the
    loss of a trainer rank the run goes on from its last checkpoint. The loss of an environment worker is not counted
    when it was an episode's environment that ended it: that episode gets the status `environment_error`."""

    @model_validator(mode="after")
    def _asked_in_time(self) -> Self:
        if self.timeout <= self.heartbeat:
            raise ValueError(
                f"timeout ({self.timeout:g}) must be more than heartbeat ({self.heartbeat:g}): no process gives a sign "
                "of life before it is asked for one"
            )
        return self


class ClusterSettings(StrictModel):
    """`cluster:` one process, or Ray with any number of nodes. Nothing else in a recipe changes with it."""

    kind: Literal["local", "ray"] = "local"
    """`local`: everything in one process, where a debugger works. `ray`: trainer ranks, engines and
    workers of environments are Ray actors."""
    address: str | None = None
    """With `ray`: the cluster to attach to, such as `auto` or `ray://head:10001`; one is started on this machine when
    not set."""
    trainer: TrainerPlacement = TrainerPlacement()
    """The processes that train."""
    engines: EnginePlacement = EnginePlacement()
    """The processes that sample."""
    environments: EnvironmentPlacement = EnvironmentPlacement()
    """The processes that environments live in."""
    publishing: PublishingSettings = PublishingSettings()
    """How weights get from one to the other."""
    supervision: SupervisionSettings = SupervisionSettings()
    """What happens when a process is lost."""

    @model_validator(mode="after")
    def _local_is_one_process(self) -> Self:
        if self.kind == "ray":
            return self
        if self.trainer.ranks > 1 or self.engines.count > 1 or self.engines.placement == "separate":
            raise ValueError("several processes need cluster.kind: ray")
        if self.publishing.transport not in ("auto", "shared"):
            raise ValueError(
                f"transport {self.publishing.transport} has no effect in one process, where trainer and engine share "
                "the weights: use cluster.kind: ray"
            )
        for name in ("address", "trainer", "environments", "publishing", "supervision"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with kind: local")
        return self
