"""An endpoint as OpenAI's: chat and plain completions, whole or streamed, from the checkpoints of runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from strop.serve.api.access import Role
from strop.serve.api.confined import NotServed, folder_below, open_below, parts_of
from strop.serve.api.gate import Refusal
from strop.serve.api.readings import Runs
from strop.serve.api.shapes import Strict
from strop.serve.api.speakers import Piece, Speakers
from strop.serve.api.ways import Router, note

Text = Annotated[str, Field(max_length=200_000)]
Neutral = Annotated[float, Field(ge=0, le=0)]
"""A penalty that is none: sampling here knows a temperature only."""
_ANSWER: dict[int | str, Any] = {
    200: {
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
        "description": "The answer, or with `stream` its pieces.",
    },
    503: {"description": "The model's process has ended, or could not be started."},
}


class StreamOptions(Strict):
    """What a stream has beside its pieces."""

    include_usage: bool = False


class Part(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=100)]
    name: str | None = None


class Sampling(Strict):
    """What both kinds of request have. A setting that would have no effect here is refused, unless it is neutral."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    """`RUN`, or `RUN@WHICH` for a checkpoint: `latest`, `best`, or the number of a step."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=200)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=8)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=200)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    top_p: Annotated[float, Field(ge=1, le=1)] | None = None
    presence_penalty: Neutral | None = None
    frequency_penalty: Neutral | None = None

    def settings(self) -> dict[str, Any]:
        """What the model's process is sent."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        temperature = 1.0 if self.temperature is None else self.temperature
        return {"max_tokens": self.max_tokens, "temperature": temperature, "stop": stop, "seed": self.seed}


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None

    def settings(self) -> dict[str, Any]:
        """What the model's process is sent."""
        found = super().settings()
        found["max_tokens"] = self.max_completion_tokens or self.max_tokens
        return {**found, "messages": [{"role": m.role, "content": _plain(m.content)} for m in self.messages]}


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Text

    def settings(self) -> dict[str, Any]:
        """What the model's process is sent."""
        return {**super().settings(), "prompt": self.prompt}


def sampling_router(runs: Runs, speakers: Speakers) -> Router:
    """Routes below `/v1`."""
    router = Router(prefix="/v1", tags=["sampling"])

    @router.way("GET", "/models", Role.viewer)
    def models() -> dict[str, Any]:
        """The runs that have a checkpoint."""
        found = []
        for name in runs.names():
            with contextlib.suppress(NotServed):
                model_folder(runs, name)
                found.append({"id": name, "object": "model", "created": 0, "owned_by": "strop"})
        return {"object": "list", "data": found}

    @router.way("POST", "/chat/completions", Role.operator, responses=_ANSWER, response_class=Response)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        note(request, "sample.chat", asked.model)
        return await _answered(asked, Shape("chat.completion", asked.model), runs, speakers)

    @router.way("POST", "/completions", Role.operator, responses=_ANSWER, response_class=Response)
    async def completion(asked: CompletionRequest, request: Request) -> Response:
        """Go on with a text."""
        note(request, "sample.text", asked.model)
        return await _answered(asked, Shape("text_completion", asked.model), runs, speakers)

    return router


def model_folder(runs: Runs, name: str) -> Path:
    """The model's folder that a name means.

    Raises:
        NotServed: there is no such run, or it has no such checkpoint.
    """
    run, at, which = name.partition("@")
    parts = [*runs.parts(run), "checkpoints"]
    which = which if at else "latest"
    if which.isascii() and which.isdigit() and len(which) < 12:
        step = f"step-{int(which):06d}"
    elif which in ("latest", "best"):
        handle = open_below(runs.root, [*parts, which])
        try:
            step = os.pread(handle, 256, 0).decode("utf-8", "replace").strip()
        finally:
            os.close(handle)
    else:
        raise NotServed(name)
    found = [*parts, *parts_of(step), "model"]
    with folder_below(runs.root, found) as handle:
        if any(entry.is_symlink() for entry in os.scandir(handle)):
            raise NotServed(name)
    return runs.root.joinpath(*found)


class Shape:
    """Answers in OpenAI's form."""

    def __init__(self, kind: Literal["chat.completion", "text_completion"], model: str) -> None:
        self._chat = kind == "chat.completion"
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._kind = kind

    def whole(self, text: str, last: Piece) -> dict[str, Any]:
        """An answer that is complete."""
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": last.finish}
        return {**self._head, "object": self._kind, "choices": [choice], "usage": _usage(last)}

    def piece(self, text: str, finish: str | None = None, *, first: bool = False) -> dict[str, Any]:
        """A piece of an answer."""
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"delta": {**({"role": "assistant"} if first else {}), **({"content": text} if text else {})}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind, "choices": [choice]}

    def usage(self, last: Piece) -> dict[str, Any]:
        """The piece behind the last, with the counts."""
        return {**self.piece(""), "choices": [], "usage": _usage(last)}


async def _answered(asked: Sampling, shape: Shape, runs: Runs, speakers: Speakers) -> Response:
    pieces = speakers.ask(model_folder(runs, asked.model), asked.settings())
    # What is refused is refused before an answer begins.
    first = await anext(pieces)
    if asked.stream:
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(_streamed(shape, first, pieces, usage=usage), media_type="text/event-stream")
    text, last = first.text, first
    async for piece in pieces:
        text, last = text + piece.text, piece
    return JSONResponse(shape.whole(text, last))


async def _streamed(shape: Shape, first: Piece, pieces: Any, *, usage: bool) -> AsyncIterator[str]:
    async with contextlib.aclosing(pieces):
        last = first
        yield _event(shape.piece(first.text, first.finish, first=True))
        try:
            async for last in pieces:
                yield _event(shape.piece(last.text, last.finish))
        except Refusal as refusal:
            yield _event({"error": {"message": refusal.what, "type": "server_error"}})
            return
        if usage:
            yield _event(shape.usage(last))
        yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _usage(last: Piece) -> dict[str, int]:
    total = last.prompt_tokens + last.completion_tokens
    return {"prompt_tokens": last.prompt_tokens, "completion_tokens": last.completion_tokens, "total_tokens": total}


def _plain(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
