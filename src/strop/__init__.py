"""strop: post-training for language models.

    import strop
    config = strop.load_config("recipes/quickstart.yaml", ["run.steps=20"])
    summary = strop.train(config)

`strop.load_pipeline` reads a file that chains several recipes; `strop.train` takes either.

Attributes are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.config import Config
    from strop.config.loading import load_config
    from strop.config.pipeline import PipelineConfig
    from strop.config.pipeline_loading import load_pipeline
    from strop.loops.online import open_run
    from strop.loops.train import train

__version__ = "0.1.0"

_HOMES = {
    "Config": "strop.config",
    "PipelineConfig": "strop.config.pipeline",
    "load_config": "strop.config.loading",
    "load_pipeline": "strop.config.pipeline_loading",
    "open_run": "strop.loops.online",
    "train": "strop.loops.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = ["Config", "PipelineConfig", "__version__", "load_config", "load_pipeline", "open_run", "train"]
