"""The server that samples is also that of whole runs, in `tests/loops/`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "loops"))
