"""The engine `openai` against vLLM's own server, with a tiny model; skipped where vLLM is not installed."""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sampled import logprobs_of, model_for_vllm, sample, went_on
from test_served_engines import Trainer, here, request

from strop.config.model import NewModel
from strop.models.create import create_tokenizer
from strop.models.save import save_model
from strop.publishing.proof import Probe
from strop.publishing.served import ServedPublisher
from strop.rewards.client import Server
from strop.rollout.engines.dialects import OpenAI
from strop.rollout.engines.served import ServedEngine

pytest.importorskip("vllm")
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CONTEXT = 64
TOKENIZER = create_tokenizer(NewModel(characters="0123456789+*=abcdefghijklmnopqrstuvwxyz", context=CONTEXT))


MODEL = model_for_vllm(len(TOKENIZER), CONTEXT, eos=1)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    save_model(MODEL, TOKENIZER, folder / "model")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["--max-model-len", str(CONTEXT), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
    command = ["vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--logprobs-mode", "processed_logprobs", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    pytest.fail((folder / "log").read_text()[-4000:])
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def engine_of(address: str) -> ServedEngine:
    return ServedEngine(
        Server(address, 60.0, 0),
        OpenAI(),
        TOKENIZER,
        concurrency=16,
        eos_ids=(1,),
        seed=5,
        context=CONTEXT,
        vocabulary=len(TOKENIZER),
    )


def publisher_of(engine: ServedEngine, folder: Path) -> ServedPublisher:
    return ServedPublisher({"one": engine}, Probe.make(len(TOKENIZER), floor=1e-4), lambda: folder, TOKENIZER, here)


async def test_the_server_samples_for_a_run_and_takes_its_weights(address: str, tmp_path: Path) -> None:
    engine = engine_of(address)
    try:
        assert await engine.check() == "OpenAI-compatible, tiny"
        asked = [request(sample=at, new=4 + 3 * at, temperature=0.7 + 0.2 * at) for at in range(5)]
        for one, found in zip(asked, await sample(engine, asked), strict=True):
            assert len(found.tokens) == len(found.logprobs)
            assert found.finish == ("stop" if found.tokens[-1] == 1 else "length")
            assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, one, found)).max() < 1e-4

        (free,) = await sample(engine, [request(new=20)])
        text = TOKENIZER.decode(free.tokens[3:5])
        (stopped,) = await sample(engine, [request(new=20, stop=(text,))])
        assert stopped.finish == "stop"
        assert TOKENIZER.decode(stopped.tokens).endswith(text)

        publisher = ServedPublisher(
            {"one": engine}, Probe.make(len(TOKENIZER), floor=1e-4), lambda: tmp_path, TOKENIZER, here
        )
        for version in (1, 2):
            model = copy.deepcopy(MODEL)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            assert (await publisher.publish(Trainer(model), version=version))["publish/probe_gap"] < 1e-4
            (after,) = await sample(engine, [request()])
            assert set(after.versions) == {version}
            assert np.abs(np.asarray(after.logprobs) - logprobs_of(model, request(), after)).max() < 1e-4
    finally:
        await engine.close()


async def test_what_is_under_way_is_cut_off_and_goes_on(address: str, tmp_path: Path) -> None:
    engine = engine_of(address)
    try:
        publisher = ServedPublisher(
            {"one": engine}, Probe.make(len(TOKENIZER), floor=1e-4), lambda: tmp_path, TOKENIZER, here
        )
        await publisher.publish(Trainer(MODEL), version=0)
        asked = [request(sample=at, new=55) for at in range(8)]
        running = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await asyncio.sleep(0.15)
        new = copy.deepcopy(MODEL)
        with torch.no_grad():
            new.lm_head.weight.mul_(0.7)
        await publisher.publish(Trainer(new), version=1)
        for one, task in zip(asked, running, strict=True):
            went_on(one, (await task).plain(), MODEL, new)
    finally:
        await engine.close()
