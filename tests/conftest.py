"""Tiny models with random weights, shared by the tests of sampling and training."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CHARACTERS = "0123456789+-*/=() ?abcdefghijklmnopqrstuvwxyz"


@cache
def _tokenizer() -> Any:
    from strop.config.model import NewModel
    from strop.models.create import create_tokenizer

    return create_tokenizer(NewModel(characters=CHARACTERS, context=512))


@cache
def _model(family: str) -> Any:
    import torch
    import transformers

    shape: dict[str, Any] = {**SHAPE, "vocab_size": len(_tokenizer())}
    capped = {"sliding_window": 5, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
    torch.manual_seed(0)
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=8)),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**shape, head_dim=8, **capped)),
    }
    model = make[family]().eval()
    # Larger than a default initialisation, so that context and temperature matter to what is drawn.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model("llama" | "qwen3" | "gemma2")`: a model of one's own, 2 blocks of width 32, in eval mode."""
    return lambda family="llama": copy.deepcopy(_model(family))


@pytest.fixture(scope="session")
def character_tokenizer() -> Any:
    """The tokenizer that goes with `tiny_model`: one token a character; `<pad>` 0, `<eos>` 1, `<unk>` 2."""
    return _tokenizer()


@pytest.fixture(autouse=True, scope="session")
def _runs_leave_the_garbage_collector_alone() -> Iterator[None]:
    """A run looks through all of memory when it opens, a good deal of the time of the tiny ones here, of which there
    are more than a thousand in one process."""
    from strop.loops import base_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_run, "look_rarely", lambda: lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _clusters_start_no_worker_before_it_is_asked_for() -> None:
    """Workers have an environment of their own here, so those that Ray starts with itself, one for each processor,
    would be imported and never used."""
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


LONG = (
    "test_benchmarks.py",
    "training/test_blocks.py",
    "training/test_ranks.py",
    "training/test_sharded_checkpoint.py",
)
"""Files that take minutes and would be the last ones, when another worker has nothing left to do."""
NEXT = "publishing"
"""The folder before which they are run: from it on there are files enough for all workers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[bool, bool]:
        name = os.path.relpath(item.path, Path(__file__).parent)
        return name >= NEXT and name not in LONG, name in LONG

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported until now stays: the garbage collector is not to look through it again and again."""
    gc.collect()
    gc.freeze()
