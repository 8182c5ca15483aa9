"""What the workers of these tests host."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from strop.errors import MissingExtra, UserError


@dataclass
class Flat:
    """A stand-in for a batch: tensors, a dict of tensors, nothing, a number."""

    ids: Any
    extra: dict[str, Any] = field(default_factory=dict)
    missing: Any = None
    count: int = 0


class Toy:
    """Answers, waits, fails and dies as asked."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.rank = int(os.environ["RANK"])
        self.calls: list[str] = []
        self.inner = Inner()

    def add(self, number: int) -> tuple[int, int, int]:
        return self.rank, int(os.environ["WORLD_SIZE"]), self.base + number

    def note(self, name: str) -> None:
        self.calls.append(name)

    def noted(self) -> list[str]:
        return self.calls

    def surroundings(self) -> dict[str, str]:
        return dict(os.environ)

    def thread(self) -> str:
        import threading

        return threading.current_thread().name

    async def thread_of_coroutines(self) -> str:
        return self.thread()

    async def sleep_beside(self, seconds: float) -> str:
        import asyncio

        await asyncio.sleep(seconds)
        return "slept beside"

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    async def nap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "napped"

    def speak(self) -> None:
        print("plain words")
        print("words of an error", file=sys.stderr)
        os.system("echo words of a child")
        logging.getLogger("toy").warning("a logged warning")
        warnings.warn("a warned warning", stacklevel=1)

    def fail(self, kind: str, rank: int = 0, *, others_sleep: float = 0.0) -> None:
        if self.rank != rank:
            time.sleep(others_sleep)
            return
        if kind == "user":
            raise UserError("a bad key", where="toy.key", mend="mend it")
        if kind == "extra":
            raise MissingExtra("toypackage", extra="toy", needed_for="this test")
        if kind == "exit":
            sys.exit(3)
        raise ValueError("odd value")

    def hang_or_die(self, rank: int, how: str) -> None:
        """One rank dies by a signal, the others wait for it as in a collective."""
        if self.rank == rank:
            print("last words", flush=True)
            time.sleep(0.2)
            os.kill(os.getpid(), getattr(signal, how))
        time.sleep(600)

    def die_and_break_peers(self, rank: int) -> None:
        """One rank is killed, and the others' collective fails at once, as with gloo."""
        if self.rank == rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.25)
        raise ConnectionError("Connection closed by peer")

    def look_at(self, array: Any, flat: Flat) -> dict[str, Any]:
        """Where the memory of what was sent is."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            total = float(flat.ids.sum()) + float(flat.extra["half"].float().sum())
        return {
            "writeable": array.flags.writeable,
            "array": mapping_of(array.ctypes.data),
            "tensor": mapping_of(flat.ids.data_ptr()),
            "kinds": [str(flat.ids.dtype), str(flat.extra["half"].dtype), type(flat.ids) is torch.Tensor],
            "sum": total,
            "rest": (flat.missing, flat.count),
        }

    def tensor(self, size: int) -> Any:
        import torch

        return {"made": torch.arange(size), "half": torch.ones(3, dtype=torch.bfloat16)}


class Inner:
    def name(self) -> str:
        return "inner"


def mapping_of(address: int) -> str:
    """The line of the memory map that an address is in."""
    with open("/proc/self/maps") as file:
        for line in file:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                return line.strip()
    return ""


def make_toy(base: int = 0) -> Toy:
    return Toy(base)


async def make_toy_later(base: int = 0) -> Toy:
    await asyncio.sleep(0)
    return Toy(base)


def tiny_engine(seed: int, version: int = 0) -> Any:
    """A LocalEngine on a tiny random model, the same in every process."""
    import torch
    import transformers

    from strop.rollout.engines.local import LocalEngine

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, vocab_size=48, intermediate_size=64, max_position_embeddings=512)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return LocalEngine(model, None, eos_ids=(1,), seed=11, context=512)


class HangingProbe:
    """As where a driver of cards does not answer."""

    def take(self, processes: list[int]) -> dict[str, float]:
        time.sleep(600)
        return {}


class FailingProbe:
    def take(self, processes: list[int]) -> dict[str, float]:
        raise OSError("no card")
