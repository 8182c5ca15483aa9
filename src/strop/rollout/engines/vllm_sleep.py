"""How vLLM gives its memory of the GPU back, and takes it again.

vLLM's sleep mode allocates weights and KV cache in a pool of its own, whose pages go back to the driver while the
addresses stay, so that captured CUDA graphs remain right. Level 1 copies the weights to the CPU's memory; level 2
drops them, and whoever wakes vLLM has to bring them. What was read in the sources of 0.24 and 0.32
(`v1/worker/gpu_worker.py`, `device_allocator/cumem.py`):

- Buffers live in the same pool. Before level 2 the worker copies those of `named_buffers()`, persistent or not
  (`_sleep_saved_buffers`), so rotary caches come back, and so do scales of the KV cache. 0.24 copies them back at the
  first waking of any kind, which must therefore be that of the weights; 0.32 waits for the weights.
- Tensors that modules hold as plain attributes are nobody's: after level 2 they have whatever is in the new pages.
  `Loose` keeps them.
- The keys and values are gone in any case; prefix cache and running requests must forget them before.
- The pool of a process serves one instance of vLLM at a time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS, CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
"""vLLM's names of what sleeps."""


class Loose:
    """Copies of the tensors of a model that are neither parameters nor buffers.

    Args:
        inside: whether memory at an address is lost in the sleep.
    """

    def __init__(self, model: nn.Module, inside: Callable[[int], bool]) -> None:
        self._kept = [
            (tensor, tensor.detach().to("cpu", copy=True))
            for tensor in loose_tensors(model)
            if inside(tensor.data_ptr())
        ]

    def __len__(self) -> int:
        return len(self._kept)

    def restore(self) -> None:
        with _writing():
            for tensor, values in self._kept:
                tensor.copy_(values)
        self._kept = []


def loose_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes, in lists, tuples and dicts, or in objects that are no modules
    (attention backends, quantisation methods). Each once, and none that begins where a parameter or buffer does."""
    known = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    seen: set[int] = set()

    def of(value: Any, depth: int) -> Iterator[Tensor]:
        if id(value) in seen or isinstance(value, nn.Module | nn.Parameter | str | int | float | type(None)):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.numel() and value.data_ptr() not in known:
                yield value
        elif isinstance(value, list | tuple):
            for one in value:
                yield from of(one, depth)
        elif isinstance(value, dict):
            for one in value.values():
                yield from of(one, depth)
        elif depth and type(value).__module__.startswith("vllm."):
            yield from of(getattr(value, "__dict__", {}), depth - 1)

    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from of(value, 1)


def spoil(model: nn.Module) -> None:
    """Make NaN of all weights, so that one that nobody brings is seen in the proof, whatever was left in its place."""
    with _writing():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def blank(runner: Any) -> None:
    """Zeros for keys and values, as at the start: the new pages have what others left there, NaN among it, and not all
    kernels promise that what they mask is not multiplied."""

    def of(cache: Any) -> None:
        if isinstance(cache, Tensor):
            cache.zero_()
        elif isinstance(cache, list | tuple):
            for one in cache:
                of(one)

    with _writing():
        of(list(getattr(runner, "kv_caches", [])))


def pool_of_weights() -> Callable[[int], bool]:
    """Whether an address is in the pages of the weights."""
    from vllm.device_allocator.cumem import CuMemAllocator

    pages = [
        (start, start + data.handle[1])
        for start, data in CuMemAllocator.get_instance().pointer_to_data.items()
        if data.tag == WEIGHTS
    ]
    return lambda address: any(start <= address < end for start, end in pages)


def leave_pool() -> None:
    """Let go of a closed vLLM's pool, which its allocator keeps for good, so that another can be started here."""
    with contextlib.suppress(Exception):
        from vllm.device_allocator.cumem import CuMemAllocator

        gc.collect()
        CuMemAllocator.get_instance().allocator_and_pools.clear()
        gc.collect()
        torch.cuda.empty_cache()


def _writing() -> Any:
    """vLLM makes some of its tensors in inference mode, and only there may they be written to."""
    return torch.inference_mode()


def hold(core: Any) -> None:
    """Schedule nothing more. core: vLLM's client of an `EngineCore` in this process."""
    core.engine_core.pause_scheduler("keep", clear_cache=False)


def pending(core: Any) -> bool:
    """Whether steps were begun whose outputs nobody has: with asynchronous scheduling one is on the GPU while the next
    is planned."""
    return bool(getattr(core.engine_core, "batch_queue", None))


def fall_asleep(core: Any, level: int) -> None:
    """Sleep; requests that run keep their tokens and wait. level: 0 only stops and forgets keys and values."""
    if not core.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("the prefix cache could not be reset")
    if level and torch.cuda.is_available():
        # 0.24 unmaps pages without waiting for the kernels that use them.
        torch.cuda.synchronize()
    core.sleep(level, mode="keep")


def wake(core: Any, tags: Sequence[str]) -> None:
    """Take memory again.

    Raises:
        RuntimeError: vLLM says that something of it still sleeps.
    """
    if torch.cuda.is_available():
        # The pages come from the driver, and torch may hold what the trainer has freed.
        torch.cuda.empty_cache()
    core.wake_up(list(tags))
    left = set(getattr(core.engine_core.model_executor, "sleeping_tags", ())) & set(tags)
    if left:
        raise RuntimeError(f"{', '.join(sorted(left))} did not wake")


__all__ = [
    "CACHE",
    "SCHEDULING",
    "WEIGHTS",
    "Loose",
    "blank",
    "fall_asleep",
    "hold",
    "leave_pool",
    "loose_tensors",
    "pending",
    "pool_of_weights",
    "spoil",
    "wake",
]
