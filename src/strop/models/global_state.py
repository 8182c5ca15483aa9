"""Settings that torch and transformers keep for the whole process, changed for a moment and put back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
