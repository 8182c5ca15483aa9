"""Recorded completions as a dataset of groups: which rows belong together, and what a group is to the trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strop.config.data import DataSettings
from strop.config.offline import OfflineSettings, RolloutColumns
from strop.data.columns import listed
from strop.data.fingerprints import combined
from strop.data.parquet import ParquetSource
from strop.data.prompts import CHECK_ALL_ROWS, CHECK_FIRST_ROWS, OverlongPrompt, Prompt, PromptDataset
from strop.data.recorded import (
    ENDED,
    RecordedCompletion,
    check_temperature,
    is_greedy,
    judged_of,
    log_probabilities,
    origin_of,
    own_columns,
    reward_of,
    status_of,
    token_ids,
)
from strop.data.rendering import Renderer
from strop.data.rows import row_id
from strop.data.sources import Source, require_column
from strop.errors import DataError

MAKES_GROUPS = ("group", "prompt_id")
"""Columns that make groups where `offline.columns.group` names none; the first that the data has."""


@dataclass(frozen=True)
class RecordedGroup:
    """The completions of one prompt, in the order of their rows. baseline: the most likely one, where there is one."""

    prompt: Prompt
    completions: tuple[RecordedCompletion, ...]
    baseline: RecordedCompletion | None = None


@dataclass(frozen=True)
class CheckedGroups:
    """What `RolloutDataset.check` saw.

    groups: looked at. of: there are. rows: of all groups. overlong: groups to be skipped. longest: tokens of the
    longest prompt. alone: groups with a single completion. greedy: groups with a baseline.
    remade: completions that were tokenised, because the data has no ids. unknown, unknown_at: groups with texts that
    hold characters the tokenizer does not know, and where the first of them is.
    """

    groups: int
    of: int
    rows: int
    overlong: int = 0
    longest: int = 0
    alone: int = 0
    greedy: int = 0
    remade: int = 0
    unknown: int = 0
    unknown_at: str = ""


@dataclass(frozen=True)
class Limits:
    """What the model and the recipe allow. vocabulary: tokens of the model. prompt, completion: longest, in tokens.
    temperature: of `rollout`."""

    vocabulary: int
    prompt: int
    completion: int
    temperature: float


class Groups:
    """The groups of a source as a source of their own, for a cursor: an item is the rows of a group."""

    def __init__(self, source: Source, column: str | None) -> None:
        self._source = source
        self.column = column
        if column is None:
            self._rows = [[row] for row in range(len(source))]
        else:
            members: dict[str, list[int]] = {}
            for row, value in enumerate(_values(source, column)):
                members.setdefault(_key(value, column, source, row), []).append(row)
            self._rows = list(members.values())
        self.columns = source.columns
        self.mapping = source.mapping
        self.fingerprint = combined([source.fingerprint, column or "", str(len(self._rows))])
        self.blocks: np.ndarray | None = None
        if source.blocks is not None:
            # A group is read where its first row is; its others are near it in any file that was written in order.
            self.blocks = np.searchsorted([rows[0] for rows in self._rows], source.blocks)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"rows": self.rows(i)}

    def rows(self, i: int) -> list[int]:
        """Indices of the rows of group i."""
        return self._rows[i]

    def location(self, i: int) -> str:
        return self._source.location(self._rows[i][0])

    def describe(self) -> str:
        return f"{len(self):,} groups of {self._source.describe()}"


class RolloutDataset:
    """The groups of a source of completions.

    Args:
        source: rows; `data.train.columns` and `settings.columns` say which columns are what.
        data: the `data:` section. settings: the `offline:` section.
        tokenizer: a Hugging Face tokenizer. eos_ids: tokens that end a text. limits: what fits.

    Raises:
        DataError: the rows lack a column that the settings need.
    """

    def __init__(
        self,
        source: Source,
        data: DataSettings,
        settings: OfflineSettings,
        tokenizer: Any,
        eos_ids: Sequence[int],
        limits: Limits,
    ) -> None:
        self.source = source
        self.skips_overlong = data.overlong_prompts == "skip"
        self._settings = settings
        self._columns = settings.columns
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._limits = limits
        self._renderer = Renderer(data, tokenizer)
        self._chat = data.render == "chat"
        self._require_columns()
        self._prompts: PromptDataset | None = None
        if data.prompt_template is not None or source.mapping.prompt in source.columns or not self.has_prompt_ids:
            self._prompts = PromptDataset(source, data, tokenizer, limits.prompt)
        self.groups = Groups(source, self._group_column())

    @property
    def has_prompt_ids(self) -> bool:
        """Whether prompts come as token ids."""
        return self._columns.prompt_ids in self.source.columns

    @property
    def has_ids(self) -> bool:
        """Whether completions come as token ids."""
        return self._columns.completion_ids in self.source.columns

    def __len__(self) -> int:
        """Groups, overlong ones included."""
        return len(self.groups)

    def __getitem__(self, i: int) -> RecordedGroup:
        """Group i.

        Raises:
            OverlongPrompt: its prompt has more tokens than fit, whatever `overlong_prompts` says.
            DataError: a row cannot be used; `where` names it.
        """
        rows = self.groups.rows(i)
        values = [self.source[row] for row in rows]
        prompt = self._prompt(rows[0], values[0])
        found = [self._completion(row, given, prompt) for row, given in zip(rows, values, strict=True)]
        greedy = [one for one in found if one.greedy]
        sampled = tuple(one for one in found if not one.greedy)
        if not sampled or len(greedy) > 1:
            raise DataError(
                f"the group has {len(sampled)} completions and {len(greedy)} greedy ones (sample -1)",
                where=self.source.location(rows[0]),
                mend="Give a group one or more completions, and at most one that is greedy.",
            )
        return RecordedGroup(prompt, sampled, greedy[0] if greedy else None)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a row: its ids where the data has them, else rendered and tokenised.

        Raises:
            OverlongPrompt, DataError: as in `PromptDataset.prompt`.
        """
        return self._prompt(row, self.source[row])

    def text(self, row: int) -> str:
        """The prompt of a row as text."""
        return self.prompt(row).text

    def check(self) -> CheckedGroups:
        """Read groups before anything else is done, and raise the first problem.

        All of up to 5,000 rows are read, and of more those of the groups that the first 1,000 rows begin.

        Raises:
            DataError: a row cannot be used, or every group that was looked at is overlong and skipped.
        """
        rows = len(self.source)
        first = len(self)
        if rows > CHECK_ALL_ROWS:
            first = sum(self.groups.rows(i)[0] < CHECK_FIRST_ROWS for i in range(len(self)))
        unknown_token = self._renderer.unknown_token()
        counts = dict.fromkeys(("overlong", "longest", "alone", "greedy", "remade", "unknown"), 0)
        unknown_at = ""
        problem: OverlongPrompt | None = None
        for i in range(first):
            try:
                group = self[i]
            except OverlongPrompt as error:
                if not self.skips_overlong:
                    raise
                counts["overlong"] += 1
                problem = problem or error
                continue
            completions = group.completions
            counts["longest"] = max(counts["longest"], len(group.prompt.tokens))
            counts["alone"] += len(completions) == 1
            counts["greedy"] += group.baseline is not None
            counts["remade"] += 0 if self.has_ids else len(completions)
            texts: list[Sequence[int] | np.ndarray] = [] if self.has_prompt_ids else [group.prompt.tokens]
            texts += [] if self.has_ids else [one.tokens for one in completions]
            if unknown_token is not None and any(unknown_token in tokens for tokens in texts):
                counts["unknown"] += 1
                unknown_at = unknown_at or self.groups.location(i)
        if problem is not None and counts["overlong"] == first:
            raise problem
        return CheckedGroups(groups=first, of=len(self), rows=rows, unknown_at=unknown_at, **counts)

    # What a row is.

    def _prompt(self, row: int, values: dict[str, Any]) -> Prompt:
        where = self.source.location(row)
        if not self.has_prompt_ids:
            assert self._prompts is not None
            found = self._prompts.prompt(row)
            return replace(found, row=own_columns(found.row, self._columns))
        ids = token_ids(values.get(self._columns.prompt_ids), self._columns.prompt_ids, self._limits.vocabulary, where)
        if len(ids) > self._limits.prompt:
            raise OverlongPrompt(
                f"the prompt has {len(ids):,} tokens, and at most {self._limits.prompt:,} fit",
                where=where,
                mend="Raise data.max_prompt_tokens if the model's context allows it, or set "
                "data.overlong_prompts: skip.",
            )
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        given = text if self._prompts is None else self._prompts.given(values, where)
        return Prompt(
            prompt_id=row_id(row),
            row=own_columns(values, self._columns),
            prompt=given,
            answer=values.get(self.source.mapping.answer),
            tokens=ids.tolist(),
            text=text,
            chat=self._chat or not isinstance(given, str),
        )

    def _completion(self, row: int, values: dict[str, Any], prompt: Prompt) -> RecordedCompletion:
        where = self.source.location(row)
        columns, settings = self._columns, self._settings
        self._same_prompt(row, values, prompt, where)
        status = status_of(values, columns, where)
        tokens, text = self._tokens(values, prompt, status, where)
        if len(tokens) > self._limits.completion:
            raise DataError(
                f"the completion has {len(tokens):,} tokens, and rollout.max_new_tokens is {self._limits.completion:,}",
                where=where,
                mend="Raise rollout.max_new_tokens if the model's context allows it, or delete the row.",
            )
        greedy = is_greedy(values)
        logprobs = None
        if settings.logprobs == "recorded" and not greedy:
            logprobs = log_probabilities(values.get(columns.logprobs), columns.logprobs, len(tokens), where)
        if not greedy:
            check_temperature(values, columns, self._limits.temperature, where)
        version, fingerprint = origin_of(values, where)
        reward, judged = float("nan"), judged_of(values)
        if settings.rewards == "recorded":
            reward = reward_of(values, columns, status, where)
        elif status not in ENDED:
            # That verifiers failed then says nothing of how the completion ended.
            status = "stop" if int(tokens[-1]) in self._eos else "length"
        return RecordedCompletion(
            own_columns(values, columns), text, tokens, logprobs, status, reward, *judged, greedy, version, fingerprint
        )

    def _tokens(self, values: dict[str, Any], prompt: Prompt, status: str, where: str) -> tuple[np.ndarray, str]:
        """Token ids and text of a completion."""
        columns = self._columns
        text = values.get(columns.completion)
        if self.has_ids:
            ids = token_ids(values.get(columns.completion_ids), columns.completion_ids, self._limits.vocabulary, where)
            said = text if isinstance(text, str) else str(self._tokenizer.decode(ids, skip_special_tokens=True))
            return ids, said
        if not isinstance(text, str) or not text:
            raise DataError(
                f"the completion in the column {columns.completion!r} is {'empty' if text == '' else repr(text)[:60]}, "
                "so there is nothing to train",
                where=where,
                mend="Delete the row; an empty completion that was sampled has a token that ended it: give its ids in "
                "offline.columns.completion_ids.",
            )
        return np.asarray(self._tokenised(text, prompt, ended=status != "length", where=where), dtype=np.int64), text

    def _tokenised(self, text: str, prompt: Prompt, *, ended: bool, where: str) -> list[int]:
        """A completion's text as tokens, up to and with the one that ends it; a truncated one has no such token."""
        written = text
        if ended and prompt.chat:
            written = self._renderer.answer(prompt.prompt, text, prompt.text, where) or text
        ids = self._renderer.tokens([written], chat=True)[0]
        if not ended:
            return ids
        end = next((at for at, token in enumerate(ids) if token in self._eos), None)
        return [*ids, self._tokenizer.eos_token_id] if end is None else ids[: end + 1]

    def _same_prompt(self, row: int, values: dict[str, Any], prompt: Prompt, where: str) -> None:
        """Raise DataError if a row's prompt is not that of its group."""
        ids = self._columns.prompt_ids
        if prompt.prompt_id == row_id(row):
            return
        if self.has_prompt_ids:
            same = values.get(ids) is not None and list(values[ids]) == prompt.tokens
        else:
            assert self._prompts is not None
            same = self._prompts.given(values, where) == prompt.prompt
        if not same:
            raise DataError(
                f"the row has another prompt than {prompt.prompt_id}, and the same value in {self.groups.column!r}",
                where=where,
                mend="Rows of a group answer one prompt. Files that were joined may both count from 0: give each group "
                "a value of its own, or name another column in offline.columns.group.",
            )

    # What the data must have.

    def _require_columns(self) -> None:
        columns, settings, has = self._columns, self._settings, self.source.columns
        default = RolloutColumns()
        for name in ("prompt_ids", "completion", "completion_ids", "status", "temperature", "group"):
            given = getattr(columns, name)
            if given is not None and given != getattr(default, name):
                require_column(self.source, given, key=f"offline.columns.{name}")
        if not self.has_ids and columns.completion not in has:
            require_column(self.source, columns.completion, key="offline.columns.completion")
        if settings.rewards == "recorded" and columns.reward not in has:
            raise DataError(
                f"there is no column {columns.reward!r} with rewards; the columns are {listed(has)}",
                where=self.source.location(0),
                mend="Set offline.columns.reward to the column that holds them, or offline.rewards: verify, with "
                "`rewards`, to score the completions now.",
            )
        if settings.logprobs == "recorded" and columns.logprobs not in has:
            raise DataError(
                f"there is no column {columns.logprobs!r} with the log-probabilities of the sampled tokens; the "
                f"columns are {listed(has)}",
                where=self.source.location(0),
                mend="Set offline.logprobs: compute, which asks the model that the run starts from, or `none` to go "
                "without; or name the column in offline.columns.logprobs.",
            )

    def _group_column(self) -> str | None:
        if self._columns.group is not None:
            return self._columns.group
        return next((name for name in MAKES_GROUPS if name in self.source.columns), None)


def _values(source: Source, column: str) -> Sequence[Any]:
    """A column of all rows."""
    if isinstance(source, ParquetSource):
        return source.column(column)
    return [source[i].get(column) for i in range(len(source))]


def _key(value: Any, column: str, source: Source, row: int) -> str:
    if value is None or value != value:
        raise DataError(
            f"the row has no value in {column!r}, which makes the groups",
            where=source.location(row),
            mend="Give every row one, or name another column in offline.columns.group.",
        )
    return json.dumps(value, sort_keys=True, default=str)
