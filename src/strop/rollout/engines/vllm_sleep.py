"""How vLLM gives its memory of the GPU back, and takes it again.

vLLM's sleep mode allocates weights and KV cache in a pool of its own, whose pages go back to the driver while the
addresses stay, so that captured CUDA graphs remain right. Level 1 copies the weights to the CPU's memory; level 2
drops them, and whoever wakes vLLM has to bring them. What was read in the sources of 0.24 and 0.32
(`v1/worker/gpu_worker.py`, `device_allocator/cumem.py`):

- Buffers live in the same pool. Before level 2 the worker copies those of `named_buffers()`, persistent or not
  (`_sleep_saved_buffers`), so rotary caches come back, and so do scales of the KV cache. 0.24 copies them back at the
  first waking of any kind, which must therefore be that of the weights; 0.32 waits for the weights.
- Whatever else was allocated while vLLM loaded the model or made its cache is in the pool too, and nobody's: tensors
  that are plain attributes of modules, and with the newer model runner (the usual one of 0.24 for Llama, Qwen3 and
  Mistral) the sampler's state and the block tables. `Kept` keeps every byte of the pool that is neither a weight, at
  level 2, nor a key or value.
- The keys and values are gone in any case; prefix cache and running requests must forget them before.
- The pool of a process serves one instance of vLLM at a time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS, CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
"""vLLM's names of what sleeps."""
_MOST = 1 << 30

Span = tuple[int, int]


class Kept:
    """A copy of parts of memory, in the CPU's.

    Args:
        parts: (address, bytes) of each. copy: of memory, by target, source and bytes.
    """

    def __init__(self, parts: Iterable[Span], copy: Callable[[int, int, int], Any]) -> None:
        self._copy = copy
        self._parts = [(address, torch.empty(size, dtype=torch.uint8)) for address, size in parts]
        for address, held in self._parts:
            copy(held.data_ptr(), address, held.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for _, held in self._parts)

    def restore(self) -> None:
        for address, held in self._parts:
            self._copy(address, held.data_ptr(), held.nbytes)


def gaps(pages: Iterable[Span], held: Iterable[Span]) -> list[Span]:
    """(address, bytes) of what of the pages nothing in `held` lies in."""
    found = []
    spans = sorted(held)
    for start, size in sorted(pages):
        at, end = start, start + size
        for first, length in spans:
            if first + length <= at or first >= end:
                continue
            if first > at:
                found.append((at, first - at))
            at = max(at, first + length)
        if at < end:
            found.append((at, end - at))
    return found


def spans_of(tensors: Iterable[Tensor]) -> list[Span]:
    """(address, bytes) of the whole memory behind each tensor."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def caches(runner: Any) -> list[Tensor]:
    """The tensors of keys and values of vLLM's model runner, as it and its layers name them."""
    found: list[Tensor] = []

    def of(cache: Any) -> None:
        if isinstance(cache, Tensor):
            found.append(cache)
        elif isinstance(cache, list | tuple):
            for one in cache:
                of(one)

    of(list(getattr(runner, "kv_caches", [])))
    for module in runner.get_model().modules():
        of(getattr(module, "kv_cache", None))
    return found


def keep(tag: str, held: Iterable[Tensor]) -> Kept:
    """What is in the pool under a tag, but for some tensors, of which nothing is kept."""
    from vllm.device_allocator.cumem import CuMemAllocator, libcudart

    allocated = CuMemAllocator.get_instance().pointer_to_data.items()
    pages = [(start, int(data.handle[1])) for start, data in allocated if data.tag == tag]
    # What is as large as that can only be keys and values under a name that is not known here.
    parts = [(start, size) for start, size in gaps(pages, spans_of(held)) if size < _MOST]
    return Kept(parts, libcudart.cudaMemcpy)


def spoil(model: nn.Module) -> None:
    """Make NaN of all weights, so that one that nobody brings is seen in the proof, whatever was left in its place."""
    with _writing():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def blank(tensors: Iterable[Tensor]) -> None:
    """Zeros for keys and values, as at the start: the new pages have what others left there, NaN among it, and not all
    kernels promise that what they mask is not multiplied."""
    with _writing():
        for tensor in tensors:
            tensor.zero_()


def leave_pool() -> None:
    """Let go of a closed vLLM's pool, which its allocator keeps for good, so that another can be started here."""
    # A vLLM that keeps its pool otherwise has nothing to let go of here.
    with contextlib.suppress(ImportError, AttributeError):
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
    "Kept",
    "blank",
    "caches",
    "fall_asleep",
    "gaps",
    "hold",
    "keep",
    "leave_pool",
    "pending",
    "spans_of",
    "spoil",
    "wake",
]
