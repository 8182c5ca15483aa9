"""The tests of promises train the tiny runs of `tests/loops/tiny_runs.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "loops"))
