"""How servers of SGLang, and OpenAI-compatible ones such as vLLM's, are asked for tokens and told of new weights.

Every dialect is the same few questions; what differs is paths and the forms of bodies and replies. Sampling is
described in full in each request, because servers have defaults of their own, taken from a model's files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from strop.rewards.client import Unanswered
from strop.rollout.engine import SampleSettings
from strop.rollout.engines.connection import Connection

_SEEDS = 1 << 31
LOADING = 1800.0
"""Seconds that a server may take to load weights."""


class Unfit(Exception):
    """A server that cannot do what is needed; says what that is, and how it could be mended."""

    def __init__(self, what: str, mend: str = "") -> None:
        super().__init__(what)
        self.mend = mend


@dataclass(frozen=True)
class Said:
    """What a server sampled: ids, their log-probabilities at the sampling temperature, and whether it was cut off."""

    tokens: list[int]
    logprobs: list[float]
    aborted: bool


class Dialect(Protocol):
    """One kind of server. model: the name that it knows its model by; empty where it has one only."""

    model: str

    async def look(self, server: Connection) -> str:
        """What it says of itself, in words. Raises Unfit or Unanswered."""
        ...

    async def sample(
        self, server: Connection, tokens: Sequence[int], settings: SampleSettings, *, seed: int, ends: Collection[int]
    ) -> Said:
        """One completion, asked for once."""
        ...

    async def score(self, server: Connection, tokens: Sequence[int]) -> np.ndarray:
        """float32 [L - 1]: at temperature 1, of all tokens but the first."""
        ...

    async def cut(self, server: Connection) -> None:
        """End all requests with what they have."""
        ...

    async def load(self, server: Connection, folder: Path) -> None:
        """Take the weights of a folder in place of those before, and forget what was computed with them."""
        ...


class Sglang:
    """SGLang's own paths (`/generate` and its like)."""

    def __init__(self, model: str = "") -> None:
        self.model = model

    async def look(self, server: Connection) -> str:
        try:
            found = await server.get("/get_model_info")
        except Unanswered as error:
            raise Unfit(f"it does not answer as SGLang does: {error}") from None
        return f"SGLang, {_named(found, 'model_path')}"

    async def sample(
        self, server: Connection, tokens: Sequence[int], settings: SampleSettings, *, seed: int, ends: Collection[int]
    ) -> Said:
        reply = await server.post(
            "/generate",
            {
                "input_ids": list(tokens),
                "sampling_params": {
                    "max_new_tokens": settings.max_new_tokens,
                    "temperature": settings.temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.0,
                    "frequency_penalty": 0.0,
                    "presence_penalty": 0.0,
                    "repetition_penalty": 1.0,
                    "stop_token_ids": sorted(ends),
                    "ignore_eos": True,
                    "stop": list(settings.stop),
                    "no_stop_trim": True,
                    "skip_special_tokens": False,
                    "sampling_seed": seed % _SEEDS,
                },
                "return_logprob": True,
            },
            once=True,
        )
        with _reading():
            about = _part(reply, "meta_info")
            pairs = _part(about, "output_token_logprobs")
            reason = about.get("finish_reason") or {}
            kind = reason.get("type") if isinstance(reason, dict) else reason
            return _said([pair[1] for pair in pairs], [pair[0] for pair in pairs], aborted=kind == "abort")

    async def score(self, server: Connection, tokens: Sequence[int]) -> np.ndarray:
        reply = await server.post(
            "/generate",
            {
                "input_ids": list(tokens),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
        with _reading():
            pairs = _part(_part(reply, "meta_info"), "input_token_logprobs")
            return _scores([pair[0] for pair in pairs][-(len(tokens) - 1) :], tokens)

    async def cut(self, server: Connection) -> None:
        await server.post("/pause_generation", {"mode": "abort"})
        await server.post("/continue_generation", {})

    async def load(self, server: Connection, folder: Path) -> None:
        body = {"model_path": str(folder), "flush_cache": True}
        reply = await server.post("/update_weights_from_disk", body, timeout=LOADING)
        if isinstance(reply, dict) and reply.get("success") is False:
            raise Unfit(f"it did not take the weights: {reply.get('message')}")


class OpenAI:
    """`/v1/completions` with token ids, as vLLM's server gives them, and its paths for those who train."""

    def __init__(self, model: str = "") -> None:
        self.model = model

    async def look(self, server: Connection) -> str:
        try:
            found = await server.get("/v1/models")
        except Unanswered as error:
            raise Unfit(f"it does not answer as an OpenAI-compatible server does: {error}") from None
        with _reading():
            names = [str(one["id"]) for one in _part(found, "data")]
        if self.model and self.model not in names:
            raise Unfit(f"it has no model {self.model!r}; it has {', '.join(names)}", "set rollout.engine.server.model")
        if not self.model:
            if len(names) != 1:
                raise Unfit(
                    f"it has {len(names)} models: {', '.join(names)}", "name one in rollout.engine.server.model"
                )
            self.model = names[0]
        return f"OpenAI-compatible, {self.model}"

    async def sample(
        self, server: Connection, tokens: Sequence[int], settings: SampleSettings, *, seed: int, ends: Collection[int]
    ) -> Said:
        reply = await server.post(
            "/v1/completions",
            {
                **await self._asked(server, tokens),
                "max_tokens": settings.max_new_tokens,
                "temperature": settings.temperature,
                "seed": seed % _SEEDS,
                "logprobs": 0,
                "return_token_ids": True,
                "stop_token_ids": sorted(ends),
                "ignore_eos": True,
                "stop": list(settings.stop),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
            },
            once=True,
        )
        with _reading():
            choice = _first(reply)
            if choice.get("token_ids") is None:
                what = "it does not return the ids of what it sampled"
                raise Unfit(what, "use a server with `return_token_ids`, such as vLLM's")
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
            if logprobs is None:
                raise Unfit("it does not return log-probabilities", "allow them where the server is started")
            return _said(choice["token_ids"], logprobs, aborted=choice.get("finish_reason") == "abort")

    async def score(self, server: Connection, tokens: Sequence[int]) -> np.ndarray:
        body = {**await self._asked(server, tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        found = _first(await server.post("/v1/completions", body)).get("prompt_logprobs")
        if not found:
            raise Unfit("it does not score prompts (`prompt_logprobs`), so weights could not be proved to have arrived")
        with _reading():
            rows = zip(tokens[1:], found[1:], strict=True)
            return _scores([row[str(token)]["logprob"] for token, row in rows], tokens)

    async def cut(self, server: Connection) -> None:
        await self._for_training(server, "/pause?mode=abort")
        await self._for_training(server, "/resume")

    async def load(self, server: Connection, folder: Path) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._for_training(server, "/collective_rpc", call)
        await self._for_training(server, "/reset_prefix_cache?reset_running_requests=true")

    async def _asked(self, server: Connection, tokens: Sequence[int]) -> dict[str, Any]:
        if not self.model:
            await self.look(server)
        usual = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        plain = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "add_special_tokens": False}
        return {"model": self.model, "prompt": list(tokens), **usual, **plain}

    async def _for_training(self, server: Connection, path: str, body: Any = None) -> None:
        try:
            await server.post(path, body, timeout=LOADING)
        except Unanswered as error:
            if "HTTP 404" not in str(error):
                raise
            raise Unfit(
                f"it takes no new weights: it does not know {path.partition('?')[0]}",
                "start vLLM's server with VLLM_SERVER_DEV_MODE=1",
            ) from None


@contextmanager
def _reading() -> Iterator[None]:
    """What goes wrong with a reply of another form than it should have is the server's fault."""
    try:
        yield
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        raise Unanswered(f"its reply has another form: {type(error).__name__}: {error}", again=False) from None


def _first(reply: Any) -> dict[str, Any]:
    choices = _part(reply, "choices")
    if not choices or not isinstance(choices[0], dict):
        raise Unanswered("its reply has no choices", again=False)
    return choices[0]


def _part(reply: Any, name: str) -> Any:
    if not isinstance(reply, dict) or reply.get(name) is None:
        raise Unanswered(f"its reply has no {name}", again=False)
    return reply[name]


def _named(reply: Any, name: str) -> str:
    return str(reply.get(name, "a model")) if isinstance(reply, dict) else "a model"


def _said(tokens: Sequence[Any], logprobs: Sequence[Any], *, aborted: bool) -> Said:
    if len(tokens) != len(logprobs) or any(one is None for one in logprobs):
        raise Unanswered(f"it gave {len(logprobs)} log-probabilities for {len(tokens)} tokens", again=False)
    return Said([int(token) for token in tokens], [float(one) for one in logprobs], aborted)


def _scores(found: Sequence[Any], tokens: Sequence[int]) -> np.ndarray:
    if len(found) != len(tokens) - 1 or any(one is None for one in found):
        raise Unanswered(f"it scored {len(found)} of {len(tokens) - 1} tokens", again=False)
    return np.asarray(found, np.float32)
