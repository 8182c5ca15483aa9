"""The global random generators, which rewards, dropout and new weights use; strop's own draws need no state."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The global generators, for rewards and dropout that use them; strop's own draws need no state."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
    }


def restore_random(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


def settle(prepared: Any) -> None:
    """Threads, determinism and seeds: what has to be the same before the first number is computed."""
    torch.set_num_threads(prepared.hardware.threads)
    asked = prepared.config.hardware.deterministic
    deterministic = prepared.hardware.device.type == "cpu" if asked == "auto" else asked
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # With deterministic algorithms torch also fills each new tensor, to show reads of memory that nobody wrote.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    set_seed(prepared.config.run.seed)
