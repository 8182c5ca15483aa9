"""What ranks compute in tests: run in processes of their own by `run_ranks`, or in one process by `alone`."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from forked_processes import forked
from strop.algorithms.batch import TokenBatch
from strop.algorithms.named import build_algorithm
from strop.config.model import LoraConfig, NewModel
from strop.config.training import OptimizerSettings
from strop.models.create import create_model
from strop.models.load import add_lora
from strop.training.parallel.mesh import Dimensions, Mesh
from strop.training.parallel.ranks import Alone, Ranks
from strop.training.single import SingleDeviceTrainer

VOCABULARY = 37
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON},
    "qwen2": {"model_type": "qwen2", **COMMON},
    "mistral": {"model_type": "mistral", "sliding_window": 8, **COMMON},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **COMMON, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        **COMMON,
    },
}


LATE = ("every_pass", "offload", "compiled")


@dataclass(frozen=True)
class Case:
    """One model on one mesh.

    streams: sequences in the batch; 1 leaves data ranks without any. budget: packed tokens of a pass. every_pass: see
        `Ranks`.
    """

    shape: str = "llama"
    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    fsdp: bool = False
    sequence: bool = False
    lora: bool = False
    streams: int = 9
    budget: int = 64
    recompute: bool = False
    value_head: bool = False
    bfloat16: bool = False
    algorithm: str = "grpo"
    every_pass: bool = False
    offload: bool = False
    compiled: bool = False

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * self.context * self.tensor

    @property
    def name(self) -> str:
        dims = [f"{n}{getattr(self, n)}" for n in ("replicas", "shards", "context", "tensor") if getattr(self, n) > 1]
        flags = [n for n in ("sequence", "lora", "recompute", "value_head", "bfloat16", *LATE) if getattr(self, n)]
        extra = [f"{self.streams}streams"] if self.streams != 9 else []
        extra += [f"{self.budget}tokens"] if self.budget != 64 else []
        extra += [self.algorithm] if self.algorithm != "grpo" else []
        return "-".join([self.shape, "fsdp" if self.fsdp else "ddp", *dims, *flags, *extra])


def tiny_model(shape: str, *, seed: int = 0) -> Any:
    """A new model of a shape, with weights large enough that a wrong gradient shows."""
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape)
                weight.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


def ragged_batch(sequences: int, *, seed: int = 1) -> TokenBatch:
    """Streams of 5 to 30 tokens in groups of three, with prompts in common and holes in the mask."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: tuple[int, ...] = ()) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    ids, masks, lengths = [], [], []
    for at in range(sequences):
        if at % 3 == 0:
            prompt = draw(1, VOCABULARY, (int(draw(3, 8)),))
        answer = draw(1, VOCABULARY, (int(draw(2, 22)),))
        mask = torch.rand(len(answer), generator=random) > 0.2
        mask[0] = True
        ids.append(torch.cat([prompt, answer]))
        masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask]))
        lengths.append(len(ids[-1]))
    mask = torch.cat(masks)
    tokens = int(mask.numel())
    nan = torch.full((tokens,), torch.nan)
    sampler = torch.where(mask, -1 - torch.rand(tokens, generator=random), nan)
    return TokenBatch(
        input_ids=torch.cat(ids),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        seq_ids=torch.repeat_interleave(torch.arange(sequences), torch.tensor(lengths)),
        loss_mask=mask,
        sampler_logprobs=sampler,
        versions=torch.where(mask, 0, -1).int(),
        rewards=torch.rand(sequences, generator=random),
        group_ids=torch.arange(sequences) // 3,
        truncated=torch.zeros(sequences, dtype=torch.bool),
        advantages=torch.randn(tokens, generator=random),
        old_logprobs=torch.where(mask, sampler + 0.1, 0.0),
        returns=torch.randn(tokens, generator=random),
        values=torch.zeros(tokens),
    )


def make_trainer(case: Case, ranks: Alone | None, **options: Any) -> SingleDeviceTrainer:
    model = tiny_model(case.shape).to(torch.bfloat16 if case.bfloat16 else torch.float32)
    head = None
    if case.lora:
        model = add_lora(model, LoraConfig(rank=4), 3)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.copy_(0.1 * torch.sin(torch.arange(weight.numel()).float()).view_as(weight))
    if case.value_head:
        head = torch.nn.Linear(32, 1, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    return SingleDeviceTrainer(
        model,
        OptimizerSettings(learning_rate=1e-2, max_grad_norm=1.0),
        total_updates=10,
        budget=case.budget,
        recompute=case.recompute,
        compiled=case.compiled,
        value_head=head,
        ranks=ranks,
        **options,
    )


def objective_of(case: Case) -> Any:
    name = "ppo" if case.value_head else case.algorithm
    algorithm = build_algorithm(name, group_size=3, max_new_tokens=32)
    if not case.value_head:
        return algorithm
    from strop.algorithms.supervised import WithValues

    return WithValues(algorithm, 0.5, head_alone=False)


def rank_mesh(case: Case) -> Ranks:
    dimensions = Dimensions(case.replicas, case.shards, case.context, case.tensor)
    return Ranks(
        Mesh(dimensions, "cpu"),
        fsdp=case.fsdp,
        dtype=torch.bfloat16 if case.bfloat16 else torch.float32,
        sequence=case.sequence,
        offload=case.offload,
        every_pass=case.every_pass,
    )


def gradients(case: Case, ranks: Alone | None = None) -> dict[str, Any]:
    """Gradients by name, metrics, log-probabilities, a score of the probe, and the weights after one update."""
    where = Alone() if ranks is None else ranks
    trainer = make_trainer(case, ranks)
    batch, objective = ragged_batch(case.streams), objective_of(case)
    before = trainer.logprobs(batch)
    found: dict[str, torch.Tensor] = {}
    optimizer = trainer.optimizer
    step = optimizer.step

    def seen() -> dict[str, Any]:
        own = optimizer._gradients
        own.reduce(optimizer.masters)
        for name, master in optimizer.masters.items():
            grad = torch.zeros_like(master) if master.grad is None else master.grad
            found[name] = where.whole(name, grad).detach().clone()
        reduce, own.reduce = own.reduce, lambda masters: None
        try:
            return step()
        finally:
            own.reduce = reduce

    optimizer.step = seen
    stats = trainer.update(batch, objective)
    weights = {name: where.whole(name, p).detach().clone() for name, p in optimizer.parameters.items()}
    return {
        "gradients": found,
        "stats": stats,
        "logprobs": before,
        "seen": batch.extra["logprobs"],
        "weights": weights,
        "score": torch.from_numpy(trainer.score([[1, 2, 3, 4, 5, 6, 7]])[0]),
        "rounding": torch.from_numpy(trainer.rounding([[1, 2, 3, 4, 5, 6, 7]])[0]),
    }


def run_ranks(world: int, work: Callable[..., Any], arguments: Sequence[Any], folder: Path) -> list[Any]:
    """What `work(argument)` returns on rank 0 of `world` gloo processes, for each argument; all run in the same ones.

    A result is an Exception where the work raised one on any rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = forked()
    processes = [context.Process(target=_rank, args=(r, world, work, list(arguments), folder)) for r in range(world)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.05)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    said = "".join(path.read_text() for path in sorted(folder.glob("error-*")))
    assert all(process.exitcode == 0 for process in processes), said
    return [
        torch.load(io.BytesIO((folder / f"{at}.pt").read_bytes()), weights_only=False) for at in range(len(arguments))
    ]


def _rank(rank: int, world: int, work: Callable[..., Any], arguments: list[Any], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        for at, argument in enumerate(arguments):
            found = work(argument)
            if rank == 0:
                torch.save(found, folder / f"{at}.pt")
            dist.barrier()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}, {arguments[at]}:\n{traceback.format_exc()}")
        raise
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called while it is entered, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_rank(case: Case) -> dict[str, Any]:
    """Passes of an update, modules whose weights are divided together, and collectives of the update by name."""
    trainer = make_trainer(case, rank_mesh(case))
    batch, objective = ragged_batch(case.streams), objective_of(case)
    trainer.update(ragged_batch(case.streams, seed=2), objective)
    passes = len(trainer._cut(batch, objective))
    with Collectives() as seen:
        trainer.update(batch, objective)
    groups = sum(isinstance(module, FSDPModule) for module in trainer._whole.modules())
    return {"passes": passes, "groups": groups, "collectives": dict(seen.counts)}


def parked_of_rank(case: Case) -> dict[str, Any]:
    """Weights after three updates, with the state here all the time and away between updates and while it is saved."""
    found: dict[str, Any] = {}
    for name in ("plain", "parked"):
        ranks = rank_mesh(case)
        trainer = make_trainer(case, ranks)
        for seed in (3, 4, 5):
            trainer.update(ragged_batch(9, seed=seed), objective_of(case))
            if name == "parked":
                found["moved"] = trainer.offload()
                trainer.logprobs(ragged_batch(9, seed=6))
                trainer.hold_state()
        weights = trainer.optimizer.parameters.items()
        found[name] = {key: ranks.whole(key, p).detach().clone() for key, p in weights}
        trainer.close()
    return found


def gradients_of_rank(case: Case) -> dict[str, Any]:
    return gradients(case, rank_mesh(case))


@dataclass(frozen=True)
class Moved:
    """Save after two updates on some ranks, or go on from there with one more."""

    case: Case
    folder: Path
    load: bool


def moved(work: Moved, ranks: Alone | None = None) -> dict[str, Any]:
    """The metrics of the update after loading, and the weights then."""
    where = Alone() if ranks is None else ranks
    trainer = make_trainer(work.case, ranks)
    batch = ragged_batch(9, seed=5)
    if not work.load:
        for seed in (3, 4):
            trainer.update(ragged_batch(9, seed=seed), objective_of(work.case))
        if where.rank == 0:
            work.folder.mkdir(parents=True)
        if where.world > 1:
            dist.barrier()
        state = trainer.save(work.folder)
    else:
        state = {"updates": 2}
        trainer.load(work.folder, state)
    masters = {name: where.whole(name, p).float().clone() for name, p in trainer.optimizer.masters.items()}
    tokenizer = create_model(NewModel(characters="01", hidden_size=32, layers=1, heads=2), seed=0)[1]
    exported = work.folder.with_name(f"{work.folder.name}-model-{where.world}-{work.case.name}-{work.load}")
    trainer.export(tokenizer, exported)
    loss = trainer.evaluate(batch, objective_of(work.case))["loss"]
    stats = trainer.update(batch, objective_of(work.case))
    weights = {name: where.whole(name, p).clone() for name, p in trainer.optimizer.parameters.items()}
    found = {"state": state, "loss": loss, "stats": stats, "weights": weights, "masters": masters}
    return found | {"model": load_file(exported / "model.safetensors") if where.rank == 0 else {}}


@dataclass(frozen=True)
class Later:
    """Save at once and, what was held at the same time, after another update."""

    case: Case
    folder: Path


def held_of_rank(work: Later) -> dict[str, Any]:
    """Bytes of memory that were asked for; the files are in `at-once` and `later`."""
    ranks = rank_mesh(work.case)
    trainer = make_trainer(work.case, ranks)
    tokenizer = create_model(NewModel(characters="01", hidden_size=32, layers=1, heads=2), seed=0)[1]
    objective = objective_of(work.case)
    trainer.update(ragged_batch(9, seed=3), objective)
    at_once, later = work.folder / "at-once", work.folder / "later"
    if ranks.rank == 0:
        at_once.mkdir(parents=True)
        later.mkdir()
    dist.barrier()
    states = [trainer.save(at_once)]
    trainer.export(tokenizer, at_once / "model")
    room = trainer.held_bytes()
    held = trainer.hold(tokenizer)
    trainer.update(ragged_batch(9, seed=4), objective)

    def write() -> None:
        held.export(later / "model")
        states.append(held.save(later))

    # In a thread beside further updates, whose collectives nothing of it may disturb.
    writer = threading.Thread(target=write)
    writer.start()
    trainer.update(ragged_batch(9, seed=5), objective)
    writer.join()
    dist.barrier()
    return {"states": states, "room": room, "updates": trainer.optimizer.updates}


def moved_of_rank(work: Moved) -> dict[str, Any]:
    return moved(work, rank_mesh(work.case))
