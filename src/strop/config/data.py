"""`data:` where prompts come from and how they become tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from strop.config.base import Auto, PositiveInt, StrictModel
from strop.config.curriculum import CurriculumSettings


class Columns(StrictModel):
    """Which columns of the data are what; every other column travels with the row to rewards and environments."""

    prompt: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages `{role, content}`."""
    answer: str = "answer"
    """Column with the reference answer; rows may lack it when no reward needs it."""


class DataSource(StrictModel):
    """One dataset."""

    path: str
    """A `.jsonl` or `.parquet` file, a folder of them or one saved by `datasets`, a name on the Hub,
    `module:function` for a Python function that returns a sequence of rows, `reasoning-gym:TASK` (extra `gym`), with
    several tasks `reasoning-gym:TASK+OTHER`, or `verifiers:TASKSET` (extra `verifiers`)."""
    format: Literal["auto", "jsonl", "parquet", "huggingface", "python", "reasoning_gym", "verifiers"] = "auto"
    """What `path` is; `auto` decides by its form and says what it found."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a Python source, or of a task of Reasoning Gym, `size` and `seed` among them, or the
    configuration of a taskset."""
    columns: Columns = Columns()
    """Which columns hold the prompt and the answer."""
    limit: PositiveInt | None = None
    """Use only the first rows, so many."""


class DataSettings(StrictModel):
    """`data:` where prompts come from and how they become tokens."""

    train: DataSource
    """Prompts to train on."""
    eval: DataSource | None = None
    """Held-out prompts; without them no evaluation is run."""
    shuffle: bool = True
    """Shuffle the training prompts anew in each epoch, by `run.seed`."""
    curriculum: CurriculumSettings | None = None
    """Leave out training prompts that the policy always or never passes; every prompt is tried when not set."""
    render: Literal["auto", "chat", "text"] = "auto"
    """`chat` renders prompts through the tokenizer's chat template (a text becomes one user message), `text` takes
    texts as they are; `auto` is `chat` for rows with messages and `text` for rows with a text."""
    system_prompt: str | None = None
    """A system message before each chat prompt that has none of its own."""
    prompt_template: str | None = None
    """A format string over the columns of a row, such as `"Q: {question}\\nA:"`, that makes the prompt."""
    max_prompt_tokens: PositiveInt | Auto = "auto"
    """Longest prompt in tokens; `auto` is the model's context less `rollout.max_new_tokens`."""
    overlong_prompts: Literal["refuse", "skip"] = "refuse"
    """What to do with a longer prompt: stop and name it, or skip it and count it."""
