"""How much faster two GPUs train than one, and whether they compute the same.

The trainer's own update (forward, backward, optimizer) on packed streams of equal length, of a new model with the
shape of Qwen3-0.6B in bfloat16: on one card, and divided in each way among several. The step is the same for all, so
the ratios are of strong scaling. Gradients are compared with those of one card in float32, of the same weights: what
bfloat16 alone makes of them is what one card in bfloat16 shows. How fast the ranks are linked is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import measure
import random_models
from random_batches import batch


@dataclass(frozen=True)
class Way:
    """How the trainer is divided. tokens: of a pass. exact: in float32. every_pass: see `Ranks`."""

    shards: int = 1
    tensor: int = 1
    context: int = 1
    fsdp: bool = False
    sequence: bool = False
    tokens: int = 16384
    exact: bool = False
    every_pass: bool = False

    @property
    def ranks(self) -> int:
        return self.shards * self.tensor * self.context


def ways(ranks: int, tokens: int) -> dict[str, Way]:
    """All ways for so many ranks, and one card in two number formats."""
    one = Way(tokens=tokens)
    found = {"one, float32": replace(one, exact=True), "one": one}
    for count in sorted({n for n in (2, 4) if n <= ranks}):
        found[f"ddp {count}"] = replace(one, shards=count)
        found[f"fsdp {count}"] = replace(one, shards=count, fsdp=True)
        found[f"fsdp {count}, every pass"] = replace(one, shards=count, fsdp=True, every_pass=True)
        found[f"tensor {count}"] = replace(one, tensor=count)
        found[f"tensor {count}, sequence"] = replace(one, tensor=count, sequence=True)
        found[f"context {count}"] = replace(one, context=count, fsdp=True)
    if ranks >= 4:
        found["fsdp 2 x tensor 2"] = replace(one, shards=2, tensor=2, fsdp=True)
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; returns the numbers that were written."""
    parser = measure.arguments(__doc__, repeats=5)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, each with a GPU where there are GPUs")
    parser.add_argument("--streams", type=int, default=64, help="streams of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a pass")
    parser.add_argument("--only", nargs="*", default=[], help="ways beside those of one card")
    options = parser.parse_args(argv)
    if options.smoke:
        options.repeats, options.streams, options.length, options.tokens = 1, 4, 32, 64
    import torch
    import torch.multiprocessing as mp

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        chosen = ways(options.ranks, options.tokens)
        if options.only:
            chosen = {label: way for label, way in chosen.items() if way.ranks == 1 or label in options.only}
        for label, way in chosen.items():
            folder = Path(name) / label.replace(" ", "-")
            folder.mkdir()
            context = mp.get_context("spawn")
            port = _free_port()
            processes = [context.Process(target=rank, args=(at, way, options, port, folder)) for at in range(way.ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(240)
                if process.is_alive():
                    process.kill()
            path = folder / "found.json"
            if not path.exists():
                found[label] = {"failed": True}
                print(f"{label}: failed", flush=True)
                continue
            found[label] = json.loads(path.read_text()) | {"way": asdict(way)}
            gradients = torch.load(folder / "gradients.pt")
            if way.exact:
                reference = gradients
            found[label]["gradient_difference"] = {
                key: float((value - reference[key]).norm() / reference[key].norm()) for key, value in gradients.items()
            }
            found[label]["speed_up"] = found.get("one", found[label])["seconds"] / found[label]["seconds"]
            shown = {key: found[label][key] for key in ("seconds", "speed_up", "tokens_per_second", "peak_gib", "loss")}
            print(label, shown, max(found[label]["gradient_difference"].values()), flush=True)
    numbers = {
        "devices": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
        "streams": options.streams,
        "length": options.length,
        "ways": found,
    }
    measure.write("ranks", numbers, options)
    return numbers


def rank(at: int, way: Way, options: argparse.Namespace, port: int, folder: Path) -> None:
    """One rank: an update for each repeat, after one whose gradients are kept."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from strop.algorithms.named import build_algorithm
    from strop.config.training import OptimizerSettings
    from strop.training.parallel.mesh import Dimensions, Mesh
    from strop.training.parallel.ranks import Alone, Ranks
    from strop.training.single import SingleDeviceTrainer

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", at) if cuda else torch.device("cpu")
    torch.set_num_threads(options.threads)
    if cuda:
        torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(at), "WORLD_SIZE": str(way.ranks)}
    where = Alone()
    dtype = torch.bfloat16 if cuda and not way.exact else torch.float32
    if way.ranks > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        mesh = Mesh(Dimensions(1, way.shards, way.context, way.tensor), device.type)
        where = Ranks(mesh, fsdp=way.fsdp, dtype=dtype, sequence=way.sequence, every_pass=way.every_pass)
    config = random_models.config("tiny" if options.smoke else "qwen3-0.6b", context=32768)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32).to(dtype)
    trainer = SingleDeviceTrainer(
        model, OptimizerSettings(learning_rate=1e-6), total_updates=100, budget=way.tokens, ranks=where
    )
    objective = build_algorithm("grpo", group_size=4, max_new_tokens=options.length)
    kept: dict[str, Any] = {}
    step = trainer.optimizer.step

    def seen() -> Any:
        own = trainer.optimizer._gradients
        own.reduce(trainer.optimizer.masters)
        for name in looked_at(config.num_hidden_layers):
            kept[name] = where.whole(name, trainer.optimizer.masters[name].grad).float().cpu().clone()
        own.reduce = lambda masters: None  # type: ignore[method-assign]
        try:
            return step()
        finally:
            del own.reduce

    trainer.optimizer.step = seen  # type: ignore[method-assign, assignment]
    stats = trainer.update(
        batch(options.streams, options.length, config.vocab_size, prompt=options.length // 2), objective
    )
    del trainer.optimizer.step
    seconds: list[float] = []
    for _ in range(1 if way.exact else options.repeats):
        one = batch(options.streams, options.length, config.vocab_size, prompt=options.length // 2)
        if cuda:
            torch.cuda.synchronize()
        if way.ranks > 1:
            dist.barrier()
        started = time.perf_counter()
        trainer.update(one, objective)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    link = linked(device, options.smoke) if way.ranks > 1 else 0.0
    if at == 0:
        torch.save(kept, folder / "gradients.pt")
        found = {
            "seconds": measure.median(seconds),
            "of_each": seconds,
            "tokens_per_second": options.streams * options.length / measure.median(seconds),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
            "loss": stats["loss"],
            "grad_norm": stats["grad_norm"],
            "all_reduce_gb_per_second": link,
        }
        (folder / "found.json").write_text(json.dumps(found))
    if way.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def linked(device: Any, smoke: bool) -> float:
    """GB/s at which all ranks sum a tensor: its bytes over the time, whatever the algorithm moves."""
    import torch
    import torch.distributed as dist

    numbers = torch.ones((1 if smoke else 256) << 18, device=device)
    for repeat in range(4):
        if repeat == 1:
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
        dist.all_reduce(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 3 * numbers.nbytes / (time.perf_counter() - started) / 1e9


def looked_at(layers: int) -> list[str]:
    """Weights of every kind, from the first and the last layer."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in (0, layers - 1):
        at = f"model.layers.{layer}"
        names += [f"{at}.self_attn.{part}.weight" for part in ("q_proj", "q_norm", "k_norm", "o_proj")]
        names += [f"{at}.mlp.gate_proj.weight", f"{at}.mlp.down_proj.weight", f"{at}.input_layernorm.weight"]
    return names


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
