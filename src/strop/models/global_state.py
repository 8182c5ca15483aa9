"""Settings that torch and transformers keep for the whole process, changed for a moment and put back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SILENT: dict[str, Any] = {"entered": 0}
_LOCK = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws on the CPU inside come from `seed`; the global random state is as before afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reseed every GPU as well and not put them back.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers inside; strop reports in its own words."""
    with silent(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def silent() -> Iterator[None]:
    """No progress bars and no log messages of transformers inside. Several threads may be inside at a time; Python's
    own warnings, whose filters belong to nobody, are left as they are."""
    from transformers.utils import logging

    with _LOCK:
        if not _SILENT["entered"]:
            _SILENT["before"] = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        _SILENT["entered"] += 1
    try:
        yield
    finally:
        with _LOCK:
            _SILENT["entered"] -= 1
            if not _SILENT["entered"]:
                level, bars = _SILENT["before"]
                logging.set_verbosity(level)
                if bars:
                    logging.enable_progress_bar()
