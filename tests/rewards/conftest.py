"""The verifier of programs runs them in the sandboxes of `tests/sandbox/sandboxes.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))

from sandboxes import pool

__all__ = ["pool"]
