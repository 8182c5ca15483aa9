"""What of a trainer is written down: its model, and the state that it resumes from exactly; at once, or from copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.models.save import hold_model, merged_weights, save_model
from strop.training.optimizer import MASTER, MasterOptimizer
from strop.training.parallel.export import export_ranks, hold_ranks, skeleton
from strop.training.parallel.ranks import Alone, Ranks
from strop.training.parallel.state import FOLDER, divided, hold_sharded, load_sharded, save_sharded
from strop.training.snapshot import Copies, Held, copied_bytes, free_memory

WEIGHT = "weight"
"""What the keys of weights begin with in a sharded checkpoint, beside those of the optimizer's state."""
VALUE_HEAD = "value_head"
"""What the names of a value head's weights begin with, beside those of the model."""


class Store:
    """Writes and reads what a trainer works on.

    Make it before the model is divided among ranks, and give it the `optimizer` when there is one.

    Args:
        model: the trainer's, adapters included. ranks: that it is one of. moving: AdaLoRA's ranks.
    """

    optimizer: MasterOptimizer

    def __init__(self, model: Any, ranks: Alone, *, moving: Any) -> None:
        self.model = model
        self._ranks = ranks
        self._moving = moving
        self._adapters = hasattr(model, "disable_adapter")
        self._formats = {name: p.dtype for name, p in model.named_parameters()}
        self._skeleton = skeleton(model) if ranks.world > 1 else None

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole weights, adapters merged. All ranks have to go through all of it.

        Raises:
            ValueError: adapters of a divided model, which are published as they are (`trained_weights`).
        """
        if self._skeleton is None:
            yield from merged_weights(self.model).items()
        elif self._adapters:
            raise ValueError("the adapters of a divided model are not merged")
        else:
            yield from self._everything()

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, by its name in the model, whole and in the number format that is computed in; adapters alone
        where there are adapters. All ranks have to go through all of it."""
        for name, parameter in self.optimizer.parameters.items():
            if not name.startswith(f"{VALUE_HEAD}."):
                yield name, self._ranks.whole(name, parameter.detach()).to(self._formats[name])

    def export(self, tokenizer: Any, folder: Path) -> None:
        """Write the model as a Hugging Face folder (`models/save.py`). All ranks have to ask; the first one writes, and
        never has more of a divided model in memory than one of its tensors."""
        if self._skeleton is None:
            save_model(self.model, tokenizer, folder)
        else:
            export_ranks(self._everything(), self._skeleton, tokenizer, folder, writes=self._ranks.rank == 0)

    def _everything(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._whole_weight(name, p)) for name, p in self.model.named_parameters())

    def _whole_weight(self, name: str, parameter: Tensor) -> Tensor:
        return self._ranks.whole(name, parameter).to(self._formats[name])

    def save(self, directory: Path) -> dict[str, Any]:
        """Write `optimizer.safetensors` and `trainable.safetensors`, or of many ranks `sharded/`; together with nothing
        else they resume exactly, on any number of ranks."""
        if isinstance(self._ranks, Ranks):
            save_sharded(self._ranks, self._sharded(), directory)
            return {"updates": self.optimizer.updates}
        return self._state_files(lambda tensor: tensor.detach().contiguous())(directory)

    def hold(self, tokenizer: Any) -> Held:
        """What `export` and `save` would write now, in the CPU's memory: the trainer may go on while another thread
        writes it. All ranks have to ask; each then writes what it holds, and none needs another for it."""
        if self._skeleton is not None:
            first = self._ranks.rank == 0
            export = hold_ranks(self._everything(), self._skeleton, tokenizer, writes=first)
            return Held(export, self.hold_state())
        copies = Copies(self.model)
        return Held(hold_model(self.model, tokenizer, copies), self._state_files(copies))

    def hold_state(self) -> Callable[[Path], dict[str, Any]]:
        """What `save` would write now, likewise."""
        if not isinstance(self._ranks, Ranks):
            return self._state_files(Copies(self.model))
        write, updates = hold_sharded(self._ranks, self._sharded()), self.optimizer.updates

        def save(directory: Path) -> dict[str, Any]:
            write(directory)
            return {"updates": updates}

        return save

    def held_bytes(self) -> tuple[int, int]:
        """(bytes that `hold` copies, bytes of memory that are free where it does), of ranks those of the host with the
        least room. All ranks have to ask."""
        tensors = [p.detach() for p in self.optimizer.parameters.values()] + list(self.optimizer.state().values())
        needed = copied_bytes([t.to_local() if hasattr(t, "to_local") else t for t in tensors])
        if self._skeleton is not None and self._ranks.rank == 0:
            needed += sum(p.numel() * p.element_size() for p in self._skeleton.parameters())
        elif self._skeleton is None and self._adapters:
            # Weights that adapters are merged into.
            needed += sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.requires_grad)
        return self._ranks.least_room(needed, free_memory())

    def _sharded(self) -> dict[str, Tensor]:
        weights = {f"{WEIGHT}/{name}": p.detach() for name, p in self.optimizer.parameters.items()}
        return weights | self.optimizer.state()

    def _state_files(self, copied: Callable[[Tensor], Tensor]) -> Callable[[Path], dict[str, Any]]:
        """Writes what one process resumes from. copied: gives what is written of a tensor, contiguous."""
        files = {
            "optimizer": {key: copied(value) for key, value in self.optimizer.state().items()},
            "trainable": {name: copied(parameter) for name, parameter in self.optimizer.parameters.items()},
        }
        state: dict[str, Any] = {"updates": self.optimizer.updates}
        if self._moving is not None:
            moments, ranks = self._moving.state()
            state["ranks"] = copy.deepcopy(ranks)
            files["ranks"] = {name: copied(moment) for name, moment in moments.items()}

        def write(directory: Path) -> dict[str, Any]:
            for name, tensors in files.items():
                save_file(tensors, directory / f"{name}.safetensors")
            return state

        return write

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """Take back what `save` wrote, here or on another number of ranks."""
        parameters = self.optimizer.parameters
        if (directory / FOLDER).exists():
            found = load_sharded(self._ranks, parameters, directory)
        else:
            weights = load_file(directory / "trainable.safetensors")
            whole = {f"{WEIGHT}/{name}": weights[name] for name in parameters}
            whole |= load_file(directory / "optimizer.safetensors")
            found = divided(self._ranks, whole, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                weight = found.pop(f"{WEIGHT}/{name}")
                # Whoever wrote it may have trained float32 weights themselves where there are masters here, or the
                # other way round.
                exact = found.pop(f"{MASTER}/{name}", weight)
                if self.optimizer.masters[name] is parameter:
                    weight = exact
                else:
                    found[f"{MASTER}/{name}"] = exact
                parameter.copy_(weight)
        self.optimizer.load(found, int(state["updates"]))
        if self._moving is not None:
            self._moving.load(load_file(directory / "ranks.safetensors"), state["ranks"])
