"""How arguments and results travel: arrays and tensors as bytes beside the message, never as Python lists.

Pickle protocol 5 keeps large buffers out of the message; Ray puts them into its object store once, and every process
of a node reads them there without a copy. A tensor travels as the array that shares its memory.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

SMALL = 100 * 1024
"""Bytes below which a message is sent by itself; Ray puts larger ones into the object store anyway."""


@dataclass(frozen=True)
class Packed:
    """A message: `head` is a pickle, `buffers` are the bytes of its arrays and tensors, uint8 [n] each."""

    head: bytes
    buffers: list[np.ndarray]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.head) + sum(buffer.nbytes for buffer in self.buffers)


def pack(value: Any) -> Packed:
    """Make a message of anything that can be pickled: dataclasses, containers, arrays, tensors.

    Tensors may be on any device and of any dtype; they arrive on the CPU, contiguous and without gradients.
    """
    buffers: list[np.ndarray] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

    stream = io.BytesIO()
    _pickler()(stream, protocol=5, buffer_callback=keep).dump(value)
    return Packed(stream.getvalue(), buffers)


def unpack(packed: Packed, *, copy: bool = False) -> Any:
    """What was packed.

    Args:
        copy: give arrays and tensors memory of their own. Otherwise they share that of the buffers, which other
            processes may be reading too: arrays are then read-only, and nobody may write to the tensors.
    """
    # Ray lays large buffers out in lines of 64 bytes; where one is not, tensors could not use it.
    buffers = [buffer.copy() if copy or buffer.ctypes.data % 16 else buffer for buffer in packed.buffers]
    return pickle.loads(packed.head, buffers=buffers)


@cache
def _pickler() -> Any:
    # Ray's own, which knows functions and classes of `__main__`; imported here, for Ray is an extra.
    from ray.cloudpickle import Pickler

    class TensorPickler(Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, _tensor_class()):
                return _tensor, (_array(obj), str(obj.dtype).removeprefix("torch."))
            return super().reducer_override(obj)

    return TensorPickler


def _tensor_class() -> Any:
    """torch.Tensor, or nothing while no torch is loaded: a process that has none need not load it."""
    torch = sys.modules.get("torch")
    return () if torch is None else getattr(torch, "Tensor", ())


def _array(tensor: Any) -> np.ndarray:
    """The memory of a tensor as an array; numpy has no bfloat16 and no float8, so these are seen as integers."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    # A parameter or another subclass arrives as what it holds.
    plain = plain.as_subclass(torch.Tensor)
    try:
        return plain.numpy()
    except TypeError:
        as_integers = {1: torch.uint8, 2: torch.int16}[plain.element_size()]
        return plain.view(as_integers).numpy()


def _tensor(array: np.ndarray, dtype: str) -> Any:
    import torch

    # torch warns of read-only memory and has no read-only tensors, so it is shown the same memory as writable.
    shared = torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    kind = getattr(torch, dtype)
    return shared if shared.dtype == kind else shared.view(kind)


class _Writable:
    """The memory of an array by another interface; numpy keeps this object, and with it the array, alive."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
