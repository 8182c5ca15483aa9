"""The engine `vllm` with its layers divided among two processes, on a tiny model; skipped where vLLM is not installed
(`.ci/run` has it)."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgetful_worker import IntoForgetful
from sampled import (
    Scores,
    logprobs_of,
    model_for_vllm,
    sample,
    told_of_a_killed_rank,
    updated_half_way,
    went_on,
)

from strop.config.model import LoraConfig
from strop.errors import RunFailure
from strop.models.forward import score_streams
from strop.models.load import add_lora
from strop.publishing.proof import Probe
from strop.publishing.shared import SharedPublisher
from strop.rollout.engine import SampleRequest, SampleSettings, WeightUpdate
from strop.rollout.engines.vllm import VllmEngine
from strop.rollout.engines.vllm_core import VllmCore
from strop.rollout.engines.vllm_start import VllmSettings

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
in_one_loop = pytest.mark.asyncio(loop_scope="module")

SEED, EOS, CONTEXT = 11, 1, 128
MODEL = model_for_vllm(96, CONTEXT, eos=EOS)


def core_of(**changes: Any) -> VllmCore:
    settings = VllmSettings(
        torch.float32, CONTEXT, 16, 512, memory=0.3, eager=True, prefix_caching=True, tensor=2, **changes
    )
    # Buckets that are smaller than the embeddings.
    return VllmCore(MODEL.config, type(MODEL).__name__, settings, IntoForgetful(2, bucket_bytes=20_000))


@pytest.fixture(scope="module")
def core() -> Iterator[VllmCore]:
    made = core_of()
    yield made
    mine = workers_of(made)
    assert len(alive(mine)) == 2
    made.close()
    assert all_end(mine)


def below(pid: int) -> list[int]:
    """Live processes below one, at any depth."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found += [int(path.name), *below(int(path.name))]
    return found


def alive(pids: Sequence[int]) -> list[int]:
    """Those that are neither gone nor only waited for."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [] if state == "Z" else [pid]
    return found


def all_end(pids: Sequence[int]) -> bool:
    until = time.monotonic() + 30
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not alive(pids)


def workers_of(core: VllmCore) -> list[int]:
    return [worker.proc.pid for worker in core._core.engine_core.model_executor.workers]


async def engine_of(core: VllmCore, model: Any = MODEL) -> VllmEngine:
    engine = VllmEngine(model, lambda: core, None, eos_ids=(EOS,), seed=SEED, context=CONTEXT)
    await engine.update_weights(WeightUpdate(0))
    return engine


def request(stream: int = 0, new: int = 8, **settings: Any) -> SampleRequest:
    prompt = tuple(np.random.default_rng(stream).integers(3, 95, size=6 + stream).tolist())
    return SampleRequest(prompt, SampleSettings(new, **settings), (stream, 0, 0))


@in_one_loop
async def test_it_samples_from_the_model_and_draws_as_one_process_does(core: VllmCore) -> None:
    engine = await engine_of(core)
    asked = [request(number, 12, temperature=0.5 + 0.25 * number) for number in range(6)]
    found = await sample(engine, asked)
    for one, other in zip(asked, found, strict=True):
        assert np.abs(np.asarray(other.logprobs) - logprobs_of(MODEL, one, other)).max() < 1e-4
    assert [one.tokens for one in await sample(engine, asked)] == [one.tokens for one in found]
    (scored,) = await engine.score([asked[0].tokens])
    assert np.abs(scored[1:] - score_streams(MODEL, [asked[0].tokens])[0][1:]).max() < 1e-4


@in_one_loop
async def test_new_weights_reach_every_rank(core: VllmCore) -> None:
    model = copy.deepcopy(MODEL)
    engine = await engine_of(core, model)
    asked = [request(number, 40) for number in range(4)]

    def change() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    for one, other in zip(asked, await updated_half_way(engine, asked, change, after=8), strict=True):
        went_on(one, other, MODEL, model)
    (scored,) = await engine.score([asked[0].tokens])
    assert np.abs(scored[1:] - score_streams(model, [asked[0].tokens])[0][1:]).max() < 1e-4


@in_one_loop
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
async def test_what_a_rank_does_not_keep_is_named(core: VllmCore, rank: int, name: str) -> None:
    model = copy.deepcopy(MODEL)
    engine = await engine_of(core, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    core._call("forget", (rank, name))
    with pytest.raises(RunFailure, match=rf"other values than it was given, in 1 of 21 tensors: {name}"):
        await engine.update_weights(WeightUpdate(1))
    with pytest.raises(RunFailure, match="serves no version"):
        await engine.generate(request())
    # The next publication mends it.
    await engine.update_weights(WeightUpdate(2))
    (found,) = await sample(engine, [request()])
    assert set(found.versions) == {2}
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(model, request(), found)).max() < 1e-4


@in_one_loop
@pytest.mark.parametrize("rank", [0, 1])
async def test_what_a_rank_keeps_in_a_form_of_its_own_is_proved_by_what_is_computed(core: VllmCore, rank: int) -> None:
    """As vLLM keeps most weights on a CPU; on a GPU it compares these too."""
    model = copy.deepcopy(MODEL)
    engine = await engine_of(core, model)
    publisher = SharedPublisher(engine, Probe.make(96, floor=1e-4))
    assert (await publisher.publish(Scores(model), version=1))["publish/probe_gap"] < 1e-4
    core._call("forget", (rank, "model.layers.1.self_attn.q_proj.weight"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(RunFailure, match="log-probabilit"):
        await publisher.publish(Scores(model), version=2)


@in_one_loop
async def test_adapters_reach_every_rank() -> None:
    core = core_of(adapter_rank=4)
    try:
        model = add_lora(copy.deepcopy(MODEL), LoraConfig(rank=4), 0, updates=1)
        engine = VllmEngine(model, lambda: core, None, eos_ids=(EOS,), seed=SEED, context=CONTEXT, merges=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        await engine.update_weights(WeightUpdate(1))
        asked = request(2)
        (found,) = await sample(engine, [asked])
        assert np.abs(np.asarray(found.logprobs) - logprobs_of(model, asked, found)).max() < 1e-4
        assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, asked, found)).max() > 1e-2
    finally:
        core.close()


@in_one_loop
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
async def test_ranks_are_not_stopped_by_what_asks_the_run_to_stop(core: VllmCore, asked: signal.Signals) -> None:
    engine = await engine_of(core)
    for pid in workers_of(core):
        os.kill(pid, asked)
    await asyncio.sleep(0.2)
    (found,) = await sample(engine, [request()])
    assert np.abs(np.asarray(found.logprobs) - logprobs_of(MODEL, request(), found)).max() < 1e-4


@in_one_loop
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_killed_rank_is_told_and_none_is_left(hangs: bool) -> None:
    core = core_of()
    mine = workers_of(core)
    try:
        await told_of_a_killed_rank(await engine_of(core), request(new=100), mine, hangs=hangs)
    finally:
        core.close()
    assert all_end(mine)


def test_no_process_is_left_where_the_one_that_drives_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "drives.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "if __name__ == '__main__':\n"
        "    from test_vllm_over_ranks import core_of, MODEL\n"
        "    core = core_of()\n"
        "    core.push(MODEL.state_dict())\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "ready":
                break
        workers = below(process.pid)
        assert len(workers) >= 2
        process.kill()
    assert all_end(workers)


@in_one_loop
async def test_weights_that_stop_coming_and_weights_that_do_not_fit(core: VllmCore) -> None:
    class Broken(dict[str, torch.Tensor]):
        def items(self) -> Any:
            yield from list(super().items())[:5]
            raise RunFailure("the rest was lost")

    # The last test to use that vLLM: its own loader takes no weights any more after it was stopped half way.
    await engine_of(core)
    started = time.monotonic()
    with pytest.raises(RunFailure, match=r"could not take the weights: RunFailure: the rest was lost"):
        core.push(Broken(MODEL.state_dict()))
    wrong = {name: tensor[..., :7] if "down_proj" in name else tensor for name, tensor in MODEL.state_dict().items()}
    with pytest.raises(RunFailure, match="could not take the weights"):
        core.push(wrong)
    # Nobody waited for what did not come.
    assert time.monotonic() - started < 120
