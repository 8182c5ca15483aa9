"""The warm-up: supervised steps before reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from strop.algorithms.batch import TokenBatch
from strop.algorithms.supervised import CrossEntropy
from strop.config.training import WarmupSettings
from strop.data.examples import Example
from strop.data.order import Cursor
from strop.data.prompts import Prompt, PromptDataset, PromptStream
from strop.errors import DataError
from strop.training.batching import token_batch
from strop.training.protocol import Trainer


def example(prompt: Prompt, tokenizer: Any) -> Example:
    """The tokens of a prompt, its answer and the end-of-text token; the answer and the end are trained."""
    if prompt.answer is None:
        raise DataError(
            "the warm-up needs an answer in each row, and this one has none",
            where=prompt.prompt_id,
            mend="set data.train.columns.answer, or leave out `warmup`",
        )
    answer = tokenizer(str(prompt.answer), add_special_tokens=False)["input_ids"]
    tokens = np.asarray([*prompt.tokens, *answer, tokenizer.eos_token_id], dtype=np.int64)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt.tokens))


def check_answers(dataset: PromptDataset, tokenizer: Any) -> None:
    """Raise DataError if the first rows cannot be made into examples."""
    for index in range(min(len(dataset), 20)):
        example(dataset.prompt(index), tokenizer)


def supervised_batch(examples: list[Example]) -> TokenBatch:
    """A flat batch in which each example is a group of its own."""
    count = len(examples)
    return token_batch(examples, rewards=[0.0] * count, group_ids=range(count), truncated=[False] * count)


def warmup_steps(
    trainer: Trainer, dataset: PromptDataset, tokenizer: Any, settings: WarmupSettings, *, seed: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train on prompts and answers; yields (step, metrics) after each update, from step 1."""
    stream = PromptStream(dataset, Cursor(dataset.source, seed=seed, shuffle=True))
    draw: Callable[[], Example] = lambda: example(stream.next()[0], tokenizer)  # noqa: E731
    for step in range(1, settings.steps + 1):
        batch = supervised_batch([draw() for _ in range(settings.batch_size)])
        yield step, trainer.update(batch, CrossEntropy())
