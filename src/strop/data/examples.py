"""Examples: rows rendered to tokens that say which of them are trained, for methods that learn from given texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.config.data import DataSettings
from strop.config.supervised import SupervisedSettings
from strop.data.columns import listed, nearest
from strop.data.prompts import OverlongPrompt, Prompt, PromptDataset
from strop.data.rendering import Message, Renderer, clean_messages
from strop.data.rows import row_id
from strop.data.sources import Source
from strop.errors import DataError

TEXT_METHODS = ("sft", "distillation")
"""Methods that learn the tokens of given texts."""
CHECK_FIRST_ROWS = 1000
"""Rows that are rendered before a run begins."""


@dataclass(frozen=True)
class Example:
    """Tokens [L] int64, of which those are trained where `loss_mask` [L] is True. labels: [L] float32, for a process
    reward: what is true of the trained tokens."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    labels: np.ndarray | None = None

    @property
    def logprobs(self) -> np.ndarray:
        """NaN [L]: nobody sampled these tokens."""
        return np.full(len(self.tokens), np.nan, dtype=np.float32)

    @property
    def versions(self) -> np.ndarray:
        """-1 [L]: nobody sampled these tokens."""
        return np.full(len(self.tokens), -1, dtype=np.int32)


@dataclass(frozen=True)
class ExampleRow:
    """What one row of data becomes: one example, a chosen and a rejected one, or a ranking, best first.

    worth: one number for each example, the meaning of which is the method's: see `algorithms/paired.py`. index: of the
    row in its source. where: the same for people.
    """

    row_id: str
    examples: tuple[Example, ...]
    worth: tuple[float, ...]
    index: int = 0
    where: str = ""


@dataclass(frozen=True)
class CheckedRows:
    """What `ExampleDataset.check` saw. rows: looked at. of: there are. overlong: to be skipped. longest: in tokens.
    unknown_at: where the first example is that holds characters the tokenizer does not know; empty if none does."""

    rows: int
    of: int
    overlong: int
    longest: int
    unknown_at: str = ""


class ExampleDataset:
    """The examples of a source, as `supervised.method` wants them.

    Args:
        source: rows. data: the `data:` section. settings: the `supervised:` section.
        tokenizer: a Hugging Face tokenizer. eos_ids: tokens that end a text; the first one of a turn is trained, what a
            template writes after it is not, because no sampler would go on to it.
        longest: tokens of the longest example, prompt included.

    Raises:
        DataError: the rows lack a column that the method needs.
    """

    def __init__(
        self,
        source: Source,
        data: DataSettings,
        settings: SupervisedSettings,
        tokenizer: Any,
        eos_ids: Sequence[int],
        longest: int,
    ) -> None:
        self.source = source
        self.longest = longest
        self.skips_overlong = data.overlong_prompts == "skip"
        self._settings = settings
        self._columns = settings.columns
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._renderer = Renderer(data, tokenizer)
        self._prompts: PromptDataset | None = None
        self._needs(data)
        if data.prompt_template is not None or source.mapping.prompt in source.columns:
            # A prompt may be as long as it likes here: it is the whole example that must fit.
            self._prompts = PromptDataset(source, data, tokenizer, sys.maxsize)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> ExampleRow:
        """The examples of row i.

        Raises:
            OverlongPrompt: one has more than `longest` tokens. DataError: the row cannot be used; `where` names it.
        """
        row, where = self.source[i], self.source.location(i)
        method = self._settings.method
        examples: tuple[Example, ...]
        worth: tuple[float, ...] = (0.0,)
        if method in TEXT_METHODS:
            examples = (self._taught(i, row, where),)
        elif method == "kto":
            examples = (self._answered(i, self._get(row, self._columns.completion, where), where),)
            worth = (_truth(self._get(row, self._columns.label, where), where),)
        elif method == "process_reward":
            examples = (self._stepwise(i, row, where),)
        elif self._columns.ranked is not None:
            examples = self._ranked(i, row, where)
            worth = (0.0,) * len(examples)
        else:
            examples = self._pair(i, row, where)
            worth = (self._margin(row, where), 0.0)
        if method == "reward_model":
            examples = tuple(_scored_at_the_end(example) for example in examples)
        for example in examples:
            if len(example.tokens) > self.longest:
                raise self._too_long(len(example.tokens), where)
        return ExampleRow(row_id(i), examples, worth, i, where)

    def check(self) -> CheckedRows:
        """Render the first rows before anything else is done, and raise the first problem.

        Raises:
            DataError: a row cannot be used, or all rows are too long.
        """
        rows = min(len(self), CHECK_FIRST_ROWS)
        longest = overlong = 0
        unknown, unknown_at = self._renderer.unknown_token(), ""
        problem: OverlongPrompt | None = None
        for i in range(rows):
            try:
                examples = self[i].examples
                longest = max(longest, *(len(example.tokens) for example in examples))
                if not unknown_at and any(unknown in example.tokens for example in examples):
                    unknown_at = self.source.location(i)
            except OverlongPrompt as error:
                if not self.skips_overlong:
                    raise
                overlong, problem = overlong + 1, error
        if problem is not None and overlong == rows:
            raise problem
        return CheckedRows(rows, len(self), overlong, longest, unknown_at)

    # What the methods learn from.

    def _taught(self, i: int, row: dict[str, Any], where: str) -> Example:
        """A conversation, all assistant turns of which are trained, or a prompt and its answer."""
        if self._columns.messages in row and row[self._columns.messages] is not None:
            return self._conversation(clean_messages(row[self._columns.messages], where), where)
        return self._answered(i, self._get(row, self.source.mapping.answer, where), where)

    def _pair(self, i: int, row: dict[str, Any], where: str) -> tuple[Example, Example]:
        chosen = self._get(row, self._columns.chosen, where)
        rejected = self._get(row, self._columns.rejected, where)
        pair = self._answered(i, chosen, where), self._answered(i, rejected, where)
        if np.array_equal(pair[0].tokens, pair[1].tokens):
            raise DataError(
                "the chosen and the rejected completion are the same",
                where=where,
                mend="Delete the row: nothing can be learned from it.",
            )
        return pair

    def _ranked(self, i: int, row: dict[str, Any], where: str) -> tuple[Example, ...]:
        assert self._columns.ranked is not None
        found = self._get(row, self._columns.ranked, where)
        if not isinstance(found, list | tuple) or len(found) < 2:
            raise DataError(
                f"the column {self._columns.ranked!r} must hold a list of two or more completions, best first",
                where=where,
                mend="Give at least two.",
            )
        return tuple(self._answered(i, completion, where) for completion in found)

    def _stepwise(self, i: int, row: dict[str, Any], where: str) -> Example:
        steps = self._get(row, self._columns.steps, where)
        right = self._get(row, self._columns.labels, where)
        if not isinstance(steps, list | tuple) or not isinstance(right, list | tuple) or len(steps) != len(right):
            raise DataError(
                "a solution needs a list of steps and a list of as many labels",
                where=where,
                mend=f"Check the columns {self._columns.steps!r} and {self._columns.labels!r}.",
            )
        tokens = list(self._prompt(i, where).tokens)
        ends = []
        for step in steps:
            tokens += self._plain(f"{step}\n")
            ends.append(len(tokens) - 1)
        mask, labels = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=np.float32)
        mask[ends], labels[ends] = True, [_truth(label, where) for label in right]
        return Example(np.asarray(tokens, dtype=np.int64), mask, labels)

    def _margin(self, row: dict[str, Any], where: str) -> float:
        if self._columns.margin is None:
            return 0.0
        value = self._get(row, self._columns.margin, where)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"the margin is {value!r}, not a number", where=where, mend="Give every row a number there."
            ) from None

    # Rendering.

    def _answered(self, i: int, completion: Any, where: str) -> Example:
        """A prompt and one completion, which is trained up to and with the token that ends it."""
        if isinstance(completion, dict):
            completion = [completion]
        if isinstance(completion, list | tuple):
            messages = clean_messages(completion, where)
            if self._prompts is not None:
                before = self._prompt(i, where).prompt
                start = [{"role": "user", "content": before}] if isinstance(before, str) else before
                messages = [*start, *messages]
            return self._conversation(messages, where, last_only=True)
        prompt = self._prompt(i, where)
        completion = str(completion)
        tail = None
        if prompt.chat:
            tail = self._renderer.answer(prompt.prompt, completion, prompt.text, where)
        answer = self._ended(self._plain(completion if tail is None else tail))
        tokens = np.asarray([*prompt.tokens, *answer], dtype=np.int64)
        mask = np.zeros(len(tokens), dtype=bool)
        mask[len(prompt.tokens) : len(prompt.tokens) + self._until_end(answer)] = True
        return Example(tokens, mask)

    def _conversation(self, messages: list[Message], where: str, *, last_only: bool = False) -> Example:
        pieces = self._renderer.conversation(messages, where)
        turns = [at for at, (_, trained) in enumerate(pieces) if trained]
        if not turns:
            raise DataError(
                "the conversation has no assistant turn, so there is nothing to learn from it",
                where=where,
                mend="Delete the row, or check the roles of its messages.",
            )
        tokens: list[int] = []
        mask: list[bool] = []
        for at, (ids, (_, trained)) in enumerate(zip(self._pieces(pieces), pieces, strict=True)):
            if at == turns[-1]:
                ids = self._ended(ids)
            count = self._until_end(ids) if trained and (at == turns[-1] or not last_only) else 0
            tokens += ids
            mask += [True] * count + [False] * (len(ids) - count)
            if at == turns[-1]:
                break
        # The first token of a text has nothing before it that could predict it.
        mask[0] = False
        return Example(np.asarray(tokens, dtype=np.int64), np.asarray(mask))

    def _pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Token ids of each piece: those of the whole text where its tokens end where pieces do, as it is tokenised
        everywhere else; else of each piece alone, as a sampler sees a prompt that ends there."""
        whole = "".join(text for text, _ in pieces)
        alone = [self._plain(text) for text, _ in pieces]
        together = self._plain(whole)
        if [token for ids in alone for token in ids] == together or not self._tokenizer.is_fast:
            return alone
        offsets = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        edges = np.cumsum([len(text) for text, _ in pieces])
        ends = [stop for _, stop in offsets]
        if any(start < edge < stop for edge in edges[:-1] for start, stop in offsets):
            return alone
        cuts = np.searchsorted(ends, edges, side="right")
        return [together[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._renderer.tokens([text], chat=True)[0]
        return ids

    def _ended(self, ids: list[int]) -> list[int]:
        """With an end-of-text token if there is none that ends it."""
        return ids if any(token in self._eos for token in ids) else [*ids, self._tokenizer.eos_token_id]

    def _until_end(self, ids: list[int]) -> int:
        """Tokens up to and with the first that ends a text."""
        return next((at + 1 for at, token in enumerate(ids) if token in self._eos), len(ids))

    def _prompt(self, i: int, where: str) -> Prompt:
        if self._prompts is None:
            raise DataError(
                f"the row has no column {self.source.mapping.prompt!r}, and its completions are texts, not whole "
                "conversations",
                where=where,
                mend="Give every row a prompt, or lists of messages that begin with it.",
            )
        return self._prompts.prompt(i)

    def _too_long(self, tokens: int, where: str) -> OverlongPrompt:
        return OverlongPrompt(
            f"the example has {tokens:,} tokens, and at most {self.longest:,} fit",
            where=where,
            mend="Shorten it, raise supervised.max_tokens if the model's context allows it, "
            "or set data.overlong_prompts: skip.",
        )

    def _get(self, row: dict[str, Any], name: str, where: str) -> Any:
        value = row.get(name)
        if value is None:
            raise DataError(
                f"the row has no value in the column {name!r}, which the method {self._settings.method} needs; it has "
                f"{listed(row)}",
                where=where,
                mend=nearest(name, row) or "Name the columns in supervised.columns.",
            )
        return value

    def _needs(self, data: DataSettings) -> None:
        """Raise DataError if no row can have what the method needs."""
        names, method, has = self._columns, self._settings.method, self.source.columns
        if method in TEXT_METHODS:
            wanted = [] if names.messages in has else [self.source.mapping.answer]
        elif method == "kto":
            wanted = [names.completion, names.label]
        elif method == "process_reward":
            wanted = [names.steps, names.labels]
        elif names.ranked is not None:
            wanted = [names.ranked]
        else:
            wanted = [names.chosen, names.rejected, *([names.margin] if names.margin is not None else [])]
        for name in wanted:
            if name not in has:
                also = f", or {names.messages!r} with whole conversations" if method in TEXT_METHODS else ""
                raise DataError(
                    f"the data has no column {name!r}{also}, which the method {method} needs; it has {listed(has)}",
                    where=self.source.describe(),
                    mend=nearest(name, has) or "Name the columns in supervised.columns and data.train.columns.",
                )


def _truth(value: Any, where: str) -> float:
    """1 or 0; a text such as "false" would be true, as every text is."""
    if isinstance(value, str) or value not in (0, 1):
        raise DataError(f"a label is {value!r}, neither true nor false", where=where, mend="Write true or false.")
    return float(value)


def _scored_at_the_end(example: Example) -> Example:
    """What a reward model learns from: the tokens up to the last trained one, which alone is scored."""
    length = int(np.flatnonzero(example.loss_mask)[-1]) + 1
    return Example(example.tokens[:length], np.arange(length) == length - 1)
