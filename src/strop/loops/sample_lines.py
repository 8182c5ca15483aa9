"""A model that answers over lines of JSON: `python -m strop.loops.sample_lines MODEL`.

The service starts this beside itself, so that it need not know of models. Lines that it reads, and its answers:

    {"id": "1", "messages": [...] or "prompt": "...", "max_tokens": 64, "temperature": 0.7, "stop": [], "seed": 5}
    {"cancel": "1"}

    {"ready": {"name": "...", "context": 2048, "chat": true}}
    {"id": "1", "text": "a piece"}
    {"id": "1", "done": {"finish": "stop", "prompt_tokens": 5, "completion_tokens": 9}}
    {"id": "1", "refused": "why"}

Many may be under way at once; their sequences are decoded together. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from strop.config.data import DataSettings, DataSource
from strop.config.model import ModelSettings
from strop.data.rendering import Renderer, check_messages
from strop.errors import StropError, UserError
from strop.models.load import Loaded, load_model
from strop.rollout.engine import SampleRequest, SampleSettings
from strop.rollout.engines.local import LocalEngine

ROWS = 16
"""Sequences that are decoded together."""
LONGEST = 1024
"""New tokens of an answer whose request names no limit."""


class Pieces:
    """Tokens to pieces of text that can be sent: whole characters, nothing of a stop text, and nothing behind one."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._sent = 0

    def add(self, token: int) -> str:
        """The text that can be sent now."""
        self._tokens.append(token)
        text = self._text()
        # A character of several bytes may be in several tokens, and a stop text too.
        held = max((_overlap(text, one) for one in self._stop), default=0)
        end = len(text) - max(held, len(text) - len(text.rstrip("\ufffd")))
        return self._take(text, end)

    def rest(self) -> str:
        """What is left when the last token has come."""
        text = self._text()
        return self._take(text, len(text))

    def _text(self) -> str:
        text = self._decode(self._tokens)
        ends = [at for one in self._stop if (at := text.find(one)) >= 0]
        return text[: min(ends)] if ends else text

    def _take(self, text: str, end: int) -> str:
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece


class Speaker:
    """A model, and the requests that are under way."""

    def __init__(self, loaded: Loaded, write: Callable[[dict[str, Any]], None]) -> None:
        self._loaded, self._write = loaded, write
        tokenizer: Any = loaded.tokenizer
        self._renderer = Renderer(DataSettings(train=DataSource(path="requests")), tokenizer)
        self.chats = bool(tokenizer.chat_template)
        self._engine = LocalEngine(
            loaded.model,
            tokenizer,
            eos_ids=loaded.eos_ids,
            seed=0,
            context=loaded.context,
            max_sequences=ROWS,
        )
        self._asked: dict[str, asyncio.Task[None]] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Begin what a line asks for."""
        if "cancel" in line:
            if task := self._asked.get(str(line["cancel"])):
                task.cancel()
            return
        name = str(line["id"])
        self._asked[name] = task = asyncio.create_task(self._answer(name, line))
        task.add_done_callback(lambda _: self._asked.pop(name, None))

    async def close(self) -> None:
        """End everything."""
        for task in list(self._asked.values()):
            task.cancel()
        await self._engine.close()

    async def _answer(self, name: str, line: Mapping[str, Any]) -> None:
        try:
            prompt = self._prompt(line)
            request = self._request(prompt, line)
            decode: Any = self._loaded.tokenizer.decode
            pieces = Pieces(lambda tokens: str(decode(tokens, skip_special_tokens=True)), request.settings.stop)

            def told(token: int) -> None:
                if text := pieces.add(token):
                    self._write({"id": name, "text": text})

            found = await self._engine.generate(request, told=told)
        except (UserError, ValueError) as error:
            self._write({"id": name, "refused": error.what if isinstance(error, UserError) else str(error)})
            return
        except StropError as error:
            self._write({"id": name, "failed": error.what})
            return
        if text := pieces.rest():
            self._write({"id": name, "text": text})
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(found.tokens)}
        self._write({"id": name, "done": {"finish": found.finish, **counts}})

    def _prompt(self, line: Mapping[str, Any]) -> list[int]:
        if "prompt" in line:
            return self._renderer.tokens([str(line["prompt"])], False)[0]
        messages = check_messages(line["messages"], "messages")
        if self.chats:
            return self._renderer.tokens([self._renderer.chat(messages, "messages", generation=True)], True)[0]
        if len(messages) == 1 and messages[0]["role"] == "user":
            # As `strop sample` does: a model without a chat template goes on with what is said.
            return self._renderer.tokens([str(messages[0]["content"])], False)[0]
        raise UserError("this model has no chat template: send one message of the user, or use /v1/completions")

    def _request(self, prompt: list[int], line: Mapping[str, Any]) -> SampleRequest:
        room = self._loaded.context - len(prompt)
        wanted = line.get("max_tokens") or min(LONGEST, room)
        if not prompt or wanted > room or room < 1:
            raise UserError(
                f"{len(prompt)} prompt tokens and {max(wanted, 1)} new ones do not fit: a prompt has at least one, and "
                f"the context is {self._loaded.context}"
            )
        seed = line.get("seed")
        settings = SampleSettings(int(wanted), float(line.get("temperature", 1.0)), tuple(line.get("stop") or ()))
        return SampleRequest(tuple(prompt), settings, (secrets.randbits(62) if seed is None else int(seed),))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop text begins with."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


async def speak(model: str, lines: TextIO, out: TextIO) -> None:
    """Answer lines until they end."""
    import torch

    def write(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load_model(ModelSettings(path=model), device=device, seed=0)
    except StropError as error:
        write({"refused": error.what})
        return
    speaker = Speaker(loaded, write)
    write({"ready": {"name": loaded.name, "context": loaded.context, "chat": speaker.chats}})
    while line := await asyncio.to_thread(lines.readline):
        speaker.take(json.loads(line))
    await speaker.close()


if __name__ == "__main__":
    # Whatever libraries print goes to standard error: standard output is for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asyncio.run(speak(sys.argv[1], sys.stdin, answers))
