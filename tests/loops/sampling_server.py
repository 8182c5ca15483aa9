"""A server that samples with a tiny model, in the forms of SGLang and of vLLM's OpenAI-compatible server.

It is as SGLang 0.5 and vLLM 0.32 answer: paths, bodies, replies. What is wrong with one is chosen by `faults`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from strop.models.forward import score_streams
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.local import LocalEngine


class SamplingServer:
    """faults: of "no ids", "no logprobs", "raw logprobs", "no scores", "fails once", "always fails", "does not load",
    "loads nothing", "no weights", "odd replies". asked: (path, body) of all requests."""

    def __init__(self, model: Any, tokenizer: Any, *, context: int = 64) -> None:
        self.model = copy.deepcopy(model)
        self.engine = LocalEngine(self.model, tokenizer, eos_ids=(), seed=0, context=context)
        self.faults: set[str] = set()
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[Any] = []
        self.slow = 0.0
        self.again = "0"
        self._version = 0
        self._failed = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._look])
        get, post = app.router.add_get, app.router.add_post
        get("/get_model_info", lambda _: self._json({"model_path": "tiny"}))
        post("/generate", self._generate)
        post("/update_weights_from_disk", self._sglang_load)
        for path in ("/pause_generation", "/pause"):
            post(path, self._pause)
        for path in ("/continue_generation", "/resume", "/reset_prefix_cache"):
            post(path, lambda _: self._json({"status": "ok"}))
        get("/v1/models", lambda _: self._json({"data": [{"id": "tiny"}]}))
        post("/v1/completions", self._complete)
        post("/collective_rpc", self._vllm_load)
        return app

    @staticmethod
    async def _json(body: Any, status: int = 200) -> web.Response:
        return web.json_response(body, status=status)

    @web.middleware
    async def _look(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        self.headers.append(request.headers)
        if "always fails" in self.faults or ("fails once" in self.faults and not self._failed):
            self._failed = True
            return web.json_response({"error": "busy"}, status=503, headers={"Retry-After": self.again})
        if "odd replies" in self.faults and request.path in ("/generate", "/v1/completions"):
            odd = {"choices": [{"token_ids": [1], "logprobs": [3]}], "meta_info": {"output_token_logprobs": [7]}}
            return web.json_response(odd)
        if "no weights" in self.faults and request.path in ("/collective_rpc", "/update_weights_from_disk"):
            return web.json_response({"detail": "Not Found"}, status=404)
        return await handler(request)  # type: ignore[no-any-return]

    async def _sampled(self, tokens: list[int], settings: SampleSettings, seed: int, ends: list[int]) -> Any:
        if self.slow:
            await asyncio.sleep(self.slow)
        self.engine._eos = frozenset(ends)
        found = (await self.engine.generate(SampleRequest(tuple(tokens), settings, (seed,)))).plain()
        logprobs: list[Any] = list(found.logprobs)
        if "raw logprobs" in self.faults:
            (scores,) = score_streams(self.model, [[*tokens, *found.tokens]])
            logprobs = scores[len(tokens) :].tolist()
        return found.tokens, logprobs, found.finish

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params, tokens = body["sampling_params"], body["input_ids"]
        about: dict[str, Any] = {}
        if body.get("logprob_start_len") == 0 and "no scores" not in self.faults:
            (scores,) = score_streams(self.model, [tokens])
            about["input_token_logprobs"] = [[None, tokens[0], None]] + [
                [float(score), token, None] for score, token in zip(scores[1:], tokens[1:], strict=True)
            ]
        settings = SampleSettings(params["max_new_tokens"], params["temperature"], tuple(params.get("stop", ())))
        ids, logprobs, finish = await self._sampled(
            tokens, settings, params.get("sampling_seed", 0), params.get("stop_token_ids", [])
        )
        if "no logprobs" not in self.faults:
            about["output_token_logprobs"] = [[one, token, None] for one, token in zip(logprobs, ids, strict=True)]
        about["finish_reason"] = {"type": "abort" if finish == "aborted" else finish}
        return web.json_response({"text": "", "output_ids": ids, "meta_info": about})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = body["prompt"]
        settings = SampleSettings(body["max_tokens"], body["temperature"], tuple(body.get("stop", ())))
        ids, logprobs, finish = await self._sampled(
            tokens, settings, body.get("seed", 0), body.get("stop_token_ids", [])
        )
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "abort" if finish == "aborted" else finish}
        if body.get("return_token_ids") and "no ids" not in self.faults:
            choice["token_ids"] = ids
        if body.get("logprobs") is not None and "no logprobs" not in self.faults:
            choice["logprobs"] = {"token_logprobs": logprobs}
        if body.get("prompt_logprobs") is not None and "no scores" not in self.faults:
            (scores,) = score_streams(self.model, [tokens])
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": float(score), "rank": 1}}
                for score, token in zip(scores[1:], tokens[1:], strict=True)
            ]
        return web.json_response({"choices": [choice]})

    async def _pause(self, _: web.Request) -> web.Response:
        await self.engine.abort()
        return web.json_response({"status": "paused"})

    async def _sglang_load(self, request: web.Request) -> web.Response:
        if "does not load" in self.faults:
            return web.json_response({"success": False, "message": "no space"})
        await self._load((await request.json())["model_path"])
        return web.json_response({"success": True, "message": "ok"})

    async def _vllm_load(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        if "does not load" in self.faults:
            return web.json_response({"error": {"message": "no space"}}, status=400)
        await self._load(body["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    async def _load(self, folder: str) -> None:
        if "loads nothing" in self.faults:
            return
        weights = load_file(Path(folder) / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self._version += 1
        await self.engine.update_weights(WeightUpdate(self._version))


@contextmanager
def serving(server: SamplingServer) -> Iterator[str]:
    """The address of a server, which runs in a thread with an event loop of its own."""
    loop, ready, address = asyncio.new_event_loop(), Event(), []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(server.engine.close())
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = Thread(target=work, daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
