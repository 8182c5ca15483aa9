"""`judge`: a language model scores completions, asked through any server that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
import sqlite3
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import regex  # type: ignore[import-untyped]

from strop.config.rewards import JudgeVerifier
from strop.errors import UserError
from strop.rewards.calls import call
from strop.rewards.client import Client, Unanswered, server_of
from strop.rewards.failures import shorten
from strop.rewards.judge_cache import ReplyCache, cache_key
from strop.rewards.pattern import compile_pattern
from strop.rewards.protocol import Completed, Verdict

PLACES = ("prompt", "completion", "answer")
_PLACE = re.compile(rf"\{{({'|'.join(PLACES)})\}}")
_BRACED = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"[-+]?\d{1,15}(?:\.\d{1,15})?")


class Judge:
    """Asks a model for a score, some times, and maps it to 0 to 1.

    A reply without a score, or with one outside of the scale, is a failed try like any other. If one of several votes
    cannot be had, the verdict is an error: fewer votes are another measure.

    Args:
        settings: server, rubric, votes, cache. timeout: seconds of one request. where: key path of the settings.

    Raises:
        UserError: the address, the key's variable, the rubric, the pattern or the cache is not usable.
    """

    def __init__(self, settings: JudgeVerifier, *, timeout: float, where: str = "rewards.verifiers") -> None:
        self.name = settings.name or settings.kind
        self.settings = settings
        url = settings.base_url.rstrip("/") + "/chat/completions"
        server = server_of(
            url, settings.api_key_env, timeout=timeout, retries=settings.retries, where=where, key="base_url"
        )
        self._url = url
        self._client = Client(server, concurrency=settings.concurrency)
        check_rubric(settings.rubric, where=f"{where}.rubric")
        self._pattern = None if settings.pattern is None else _score_pattern(settings.pattern, f"{where}.pattern")
        for name in sorted(
            {"messages", "model", "temperature", "max_tokens", "stream", "n"} & settings.arguments.keys()
        ):
            raise UserError(
                f"`arguments` holds {name!r}, which strop fills in",
                where=f"{where}.arguments.{name}",
                mend=f"set `{name}` of the verifier" if name in JudgeVerifier.model_fields else "remove it",
            )
        self._cache = None if settings.cache is None else ReplyCache(settings.cache, where=f"{where}.cache")

    def load(self) -> None:
        """Open the cache."""
        if self._cache is not None:
            self._cache.open()

    async def ask(self, completed: Sequence[Completed]) -> list[Verdict]:
        """One verdict for each completion, in order."""
        self.load()
        return list(await asyncio.gather(*(self._judge(one) for one in completed)))

    async def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()

    async def _judge(self, one: Completed) -> Verdict:
        body = self._body(one)
        votes = await asyncio.gather(
            *(self._vote(body, vote) for vote in range(self.settings.votes)), return_exceptions=True
        )
        scores: list[float] = []
        for vote in votes:
            if isinstance(vote, Unanswered):
                return Verdict(None, "timeout" if vote.timed_out else "verifier_error", str(vote))
            if isinstance(vote, BaseException):
                raise vote
            scores.append(vote)
        low, high = self.settings.scale
        score = (_combined(scores, self.settings.combine) - low) / (high - low)
        return Verdict(
            score, components={} if len(scores) == 1 else {"spread": (max(scores) - min(scores)) / (high - low)}
        )

    def _body(self, one: Completed) -> dict[str, Any]:
        settings = self.settings
        question = fill_rubric(
            settings.rubric,
            {
                "prompt": as_text(one.prompt),
                "completion": one.completion,
                "answer": "(none)" if one.answer is None else str(one.answer),
            },
        )
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        return {
            **settings.arguments,
            "model": settings.model,
            "messages": [*system, {"role": "user", "content": question}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }

    async def _vote(self, body: dict[str, Any], vote: int) -> float:
        """One score on the rubric's scale."""
        if self._cache is None:
            return self._score(await self._client.post(body, self._scored_reply))
        cache, key = self._cache, cache_key(self._url, body, vote)
        try:
            kept = await call(lambda: cache.get(key), name="judge-cache")
            if kept is not None:
                with suppress(Unanswered):  # Replies may have been read in another way when it was kept.
                    return self._score(kept)
            reply = await self._client.post(body, self._scored_reply)
            await call(lambda: cache.put(key, reply), name="judge-cache")
        except sqlite3.Error as error:
            raise Unanswered(f"the cache failed: {error}") from None
        return self._score(reply)

    def _scored_reply(self, answer: Any) -> str:
        """The model's reply, if there is a score in it."""
        reply = reply_text(answer)
        self._score(reply)
        return reply

    def _score(self, reply: str) -> float:
        settings = self.settings
        if settings.read == "json":
            found = last_in_json(reply, settings.score_key)
        elif settings.read == "number":
            numbers = _NUMBER.findall(reply)
            found = float(numbers[-1]) if numbers else None
        else:
            found = self._matched(reply)
        low, high = settings.scale
        if found is None:
            raise Unanswered(f"no score in the reply {shorten(reply, 120)!r}")
        if not low <= found <= high:
            raise Unanswered(f"the score {found:g} is outside of the scale from {low:g} to {high:g}")
        return found

    def _matched(self, reply: str) -> float | None:
        assert self._pattern is not None
        last = None
        try:
            for last in self._pattern.finditer(reply, timeout=1.0):  # noqa: B007
                pass
        except TimeoutError:
            raise Unanswered("`pattern` did not come to an end within 1 s; it backtracks too much") from None
        return None if last is None else as_number(last["score"])


def check_rubric(rubric: str, *, where: str) -> None:
    """Raise UserError unless a rubric shows the completion and has no other places to fill than there are."""
    named = _BRACED.findall(rubric)
    for name in set(named) - set(PLACES):
        # Braces have other uses, in LaTeX for one; a misspelt place is none of them.
        if near := difflib.get_close_matches(name, PLACES, n=1, cutoff=0.75):
            raise UserError(
                f"the rubric has a place {{{name}}}; what is filled in is {', '.join(f'{{{one}}}' for one in PLACES)}",
                where=where,
                mend=f"did you mean {{{near[0]}}}?",
            )
    if "completion" not in named:
        raise UserError(
            "the rubric does not show the completion", where=where, mend="write {completion} where it belongs"
        )


def fill_rubric(rubric: str, values: Mapping[str, str]) -> str:
    """The rubric with its places filled. Other braces stay, also those in what is filled in."""
    return _PLACE.sub(lambda place: values[place[1]], rubric)


def as_text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt as the judge reads it; of messages, each with its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def reply_text(answer: Any) -> str:
    """The text in the answer of a server.

    Raises:
        Unanswered: there is none.
    """
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise Unanswered(f"no text in the answer {shorten(json.dumps(answer), 160)}")
    return text


def last_in_json(text: str, key: str) -> float | None:
    """The number under a key in the last JSON object of a text that has the key; None when there is none."""
    decoder = json.JSONDecoder()
    start = len(text)
    # From the end, so that an object quoted earlier does not count; not far, for each try costs time.
    for _ in range(50):
        start = text.rfind("{", 0, start)
        if start < 0:
            return None
        try:
            value, _end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and key in value:
            return as_number(value[key])
    return None


def as_number(value: Any) -> float | None:
    """A number, or a text that is one; None for anything else, NaN included."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _combined(scores: list[float], how: str) -> float:
    if how == "mean":
        return statistics.fmean(scores)
    if how == "median":
        return float(statistics.median(scores))
    counts = Counter(scores)
    most = max(counts.values())
    return min(score for score, count in counts.items() if count == most)


def _score_pattern(pattern: str, where: str) -> regex.Pattern[str]:
    compiled = compile_pattern(pattern, where=where)
    if "score" not in compiled.groupindex:
        raise UserError(
            "the pattern has no group named `score`",
            where=where,
            mend=r"write it as (?P<score>...), as in Score: (?P<score>\d+)",
        )
    return compiled
