"""Prompts: rows rendered to token ids, checked before a run begins and handed out in the cursor's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strop.config.data import DataSettings
from strop.data.curriculum import Curriculum
from strop.data.order import Cursor
from strop.data.rendering import Message, Renderer, check_messages, fill_template, template_columns
from strop.data.rows import row_id, row_number
from strop.data.sources import Source, require_column
from strop.errors import DataError, UserError

CHECK_ALL_ROWS = 5000
"""A source of up to so many rows is checked whole; of a longer one, the first `CHECK_FIRST_ROWS`."""
CHECK_FIRST_ROWS = 1000
_BATCH = 512


class OverlongPrompt(DataError):
    """A prompt with more tokens than `data.max_prompt_tokens`."""


@dataclass(frozen=True)
class Prompt:
    """One row, ready to be sampled from.

    prompt_id: stable name of the row, `row-000017` for index 17. row: every column. prompt: the text or messages as the
    row has them, or what `prompt_template` made of the row. answer: the answer column, None where there is none.
    tokens: what the model reads. text: the same as text, special tokens of a chat template included. chat: whether a
    chat template made it.
    """

    prompt_id: str
    row: dict[str, Any]
    prompt: str | list[Message]
    answer: Any
    tokens: list[int]
    text: str
    chat: bool = False


@dataclass(frozen=True)
class Checked:
    """What `PromptDataset.check` saw.

    rows: rows looked at. of: rows there are. overlong: prompts that will be skipped. longest, mean_length: in tokens.
    unknown: prompts with characters that the tokenizer does not know and the model will not see. unknown_at: where the
    first of them is.
    """

    rows: int
    of: int
    overlong: int
    longest: int
    mean_length: float
    unknown: int = 0
    unknown_at: str = ""


class PromptDataset:
    """The prompts of a source.

    Args:
        source: rows; its `mapping` says which columns are prompt and answer.
        settings: the `data:` section (`render`, `system_prompt`, `prompt_template`, `overlong_prompts`).
        tokenizer: a Hugging Face tokenizer.
        max_prompt_tokens: longest prompt that is not overlong.
        renderer: one that knows more than the settings say (tools); made of settings and tokenizer if not given.

    Raises:
        DataError: the prompt column is missing, or the template is malformed or names a missing column.
        ModelError: `render: chat` and the tokenizer has no chat template.
    """

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        tokenizer: Any,
        max_prompt_tokens: int,
        *,
        renderer: Renderer | None = None,
    ) -> None:
        self.source = source
        self.max_prompt_tokens = max_prompt_tokens
        self.skips_overlong = settings.overlong_prompts == "skip"
        self._template = settings.prompt_template
        self._renderer = renderer or Renderer(settings, tokenizer)
        if self._template is not None:
            template_columns(self._template, source.columns)
        else:
            require_column(source, source.mapping.prompt, key="columns.prompt")

    def __len__(self) -> int:
        """Rows, overlong ones included."""
        return len(self.source)

    def __iter__(self) -> Iterator[Prompt]:
        """All prompts in file order, without those that are skipped."""
        for i in range(len(self)):
            try:
                yield self.prompt(i)
            except OverlongPrompt:
                if not self.skips_overlong:
                    raise

    def __getitem__(self, i: int) -> Prompt:
        return self.prompt(i)

    def prompt(self, i: int) -> Prompt:
        """The prompt of row i.

        Raises:
            OverlongPrompt: it has more than `max_prompt_tokens` tokens, whatever `overlong_prompts` says.
            DataError: the row cannot be read or rendered; `where` names it.
        """
        [found] = self.prompts([i])
        if isinstance(found, OverlongPrompt):
            raise found
        return found

    def prompts(self, rows: Sequence[int]) -> list[Prompt | OverlongPrompt]:
        """The prompts of some rows, tokenised together, or where one is overlong and skipped, what would be raised.

        Raises:
            OverlongPrompt, DataError: as `prompt`, for the first row with which something is wrong.
        """
        read: list[tuple[int, dict[str, Any], str | list[Message], str, bool]] = []
        problem: UserError | None = None
        for i in rows:
            try:
                row = self.source[i]
                read.append((i, row, *self._rendered(i, row)))
            except UserError as error:
                # A row before it may be overlong, or empty.
                problem = error
                break
        tokens = self._tokenised([one[3:] for one in read])
        found = [self._prompt(*one, ids) for one, ids in zip(read, tokens, strict=True)]
        if problem is not None:
            raise problem
        return found

    def _prompt(
        self, i: int, row: dict[str, Any], prompt: str | list[Message], text: str, chat: bool, tokens: list[int]
    ) -> Prompt | OverlongPrompt:
        try:
            self._check_length(i, tokens)
        except OverlongPrompt as error:
            if not self.skips_overlong:
                raise
            return error
        answer = row.get(self.source.mapping.answer)
        return Prompt(row_id(i), row, prompt, answer, tokens, text, chat)

    def text(self, i: int) -> str:
        """The rendered prompt of row i."""
        return self._rendered(i, self.source[i])[1]

    def given(self, row: dict[str, Any], where: str) -> str | list[Message]:
        """The prompt of a row as text or messages, as the row has it or as `prompt_template` makes it.

        Raises:
            DataError: the row has none, or one that cannot be used.
        """
        if self._template is not None:
            return fill_template(self._template, row, where)
        name = self.source.mapping.prompt
        if name not in row:
            raise DataError(
                f"the row has no column {name!r}; it has {', '.join(row) or 'none'}",
                where=where,
                mend="Give every row a prompt.",
            )
        value = row[name]
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple):
            return check_messages(value, where)
        raise DataError(
            f"the column {name!r} holds {type(value).__name__}, neither a text nor a list of messages",
            where=where,
            mend="Give a text or messages there, or set data.prompt_template to make a text of other columns.",
        )

    def check(self, first: int | None = None) -> Checked:
        """Render and tokenise rows before anything else is done, and raise the first problem.

        Args:
            first: how many rows; None takes all of up to 5,000 and the first 1,000 of more.

        Raises:
            DataError: a row cannot be used, or every row that was looked at is overlong and skipped.
        """
        rows = len(self)
        if first is None:
            first = rows if rows <= CHECK_ALL_ROWS else CHECK_FIRST_ROWS
        first = min(first, rows)
        lengths: list[int] = []
        unknown_token = self._renderer.unknown_token()
        unknown: list[int] = []
        overlong = 0
        problem: OverlongPrompt | None = None
        for begin in range(0, first, _BATCH):
            for i, tokens in enumerate(self._tokens_of(begin, min(begin + _BATCH, first)), start=begin):
                lengths.append(len(tokens))
                if unknown_token is not None and unknown_token in tokens:
                    unknown.append(i)
                try:
                    self._check_length(i, tokens)
                except OverlongPrompt as error:
                    if not self.skips_overlong:
                        raise
                    overlong, problem = overlong + 1, problem or error
        if problem is not None and overlong == first:
            raise _all_overlong(f"all of the first {first:,} prompts are", problem)
        return Checked(
            rows=first,
            of=rows,
            overlong=overlong,
            longest=max(lengths, default=0),
            mean_length=sum(lengths) / max(len(lengths), 1),
            unknown=len(unknown),
            unknown_at=self.source.location(unknown[0]) if unknown else "",
        )

    def _tokens_of(self, begin: int, end: int) -> list[list[int]]:
        """Token ids of a range of rows, tokenised together."""
        rendered = []
        for i in range(begin, end):
            try:
                rendered.append(self._rendered(i, self.source[i])[1:])
            except DataError:
                # An earlier row may be overlong, and it is the first problem that is reported.
                if begin < i:
                    self._refuse_overlong(begin, [*rendered])
                raise
        return self._tokenised(rendered)

    def _refuse_overlong(self, begin: int, rendered: list[tuple[str, bool]]) -> None:
        for i, tokens in enumerate(self._tokenised(rendered), start=begin):
            if not self.skips_overlong:
                self._check_length(i, tokens)

    def _tokenised(self, rendered: Sequence[tuple[str, bool]]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in rendered]
        for chat in (False, True):
            chosen = [n for n, (_, from_chat) in enumerate(rendered) if from_chat == chat]
            for n, ids in zip(chosen, self._renderer.tokens([rendered[n][0] for n in chosen], chat), strict=True):
                tokens[n] = ids
        return tokens

    def _rendered(self, i: int, row: dict[str, Any]) -> tuple[str | list[Message], str, bool]:
        """The prompt as given, the text of it, and whether that came from the chat template."""
        where = self.source.location(i)
        prompt = self.given(row, where)
        text, chat = self._renderer.text(prompt, where)
        return prompt, text, chat

    def _check_length(self, i: int, tokens: list[int]) -> None:
        if not tokens:
            raise DataError(
                "the prompt is empty: it has no tokens for the model to go on from",
                where=self.source.location(i),
                mend="Delete the row or give it a prompt.",
            )
        if len(tokens) > self.max_prompt_tokens:
            raise OverlongPrompt(
                f"the prompt has {len(tokens):,} tokens, and at most {self.max_prompt_tokens:,} fit",
                where=self.source.location(i),
                mend="Shorten it, raise data.max_prompt_tokens if the model's context allows it, "
                "or set data.overlong_prompts: skip.",
            )


class PromptStream:
    """Prompts in the cursor's order, for ever; overlong ones are skipped and counted where the settings say so.

    Which rows are skipped for their length depends on the rows alone, and which the curriculum passes by on what it has
    recorded, so a stream that resumes with the same curriculum gives the prompts that would have come.
    """

    def __init__(self, dataset: PromptDataset, cursor: Cursor, curriculum: Curriculum | None = None) -> None:
        self._dataset = dataset
        self._cursor = cursor
        self.curriculum = curriculum
        self.skipped = 0

    def next(self) -> tuple[Prompt, int]:
        """The next prompt and its epoch, from 0.

        Raises:
            DataError: a row cannot be used, or every prompt is overlong.
        """
        overlong = waited = 0
        while True:
            epoch, index = self._cursor.next()
            if self.curriculum is not None and self.curriculum.skips(epoch, index, waited=waited):
                # It was tried once, so not every prompt is overlong.
                overlong, waited = 0, waited + 1
                continue
            try:
                return self._dataset[index], epoch
            except OverlongPrompt as error:
                if not self._dataset.skips_overlong:
                    raise
                self.skipped += 1
                overlong, waited = overlong + 1, waited + 1
                self._refuse_nothing_but(overlong, error)

    def take(self, count: int) -> list[Prompt]:
        """So many prompts, which are those that `next` would give one by one; raises what it would."""
        if self.curriculum is not None:
            # Whether it passes by a row may depend on whether the one before was overlong.
            return [self.next()[0] for _ in range(count)]
        found: list[Prompt] = []
        overlong = 0
        while len(found) < count:
            rows = [self._cursor.next()[1] for _ in range(count - len(found))]
            for one in self._dataset.prompts(rows):
                if not isinstance(one, OverlongPrompt):
                    found.append(one)
                    overlong = 0
                    continue
                self.skipped, overlong = self.skipped + 1, overlong + 1
                self._refuse_nothing_but(overlong, one)
        return found

    def prompt(self, prompt_id: str) -> Prompt:
        """A prompt that came before."""
        return self._dataset[row_number(prompt_id)]

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the last prompt was of."""
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        """What `load` needs, as JSON-ready values."""
        return {"cursor": self._cursor.state(), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; DataError if the data is not the same."""
        self._cursor.load(state["cursor"])
        self.skipped = state["skipped"]

    def _refuse_nothing_but(self, overlong: int, last: OverlongPrompt) -> None:
        """Raise DataError where so many overlong prompts have come one after the other that there is no other."""
        # Two usable prompts may lie almost two epochs apart: first in one order, last in the next.
        if overlong >= 2 * len(self._cursor):
            raise _all_overlong("every prompt is", last) from last


def _all_overlong(which: str, example: OverlongPrompt) -> DataError:
    return DataError(
        f"{which} overlong and would be skipped; for one of them, {example.what}",
        where=example.where,
        mend="Raise data.max_prompt_tokens or shorten the prompts.",
    )
