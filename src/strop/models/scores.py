"""What a layer asks of its attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What a layer asks of its attention scores beyond scaling. consistent: see `consistent_mode.py`."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    consistent: bool = False

    @property
    def plain(self) -> bool:
        """Whether kernels that know nothing but scaling and windows compute it."""
        return self.softcap is None and self.sinks is None and not self.consistent
