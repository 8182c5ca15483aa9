"""A character tokenizer with a chat template, made on the spot, and files to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(*, chat_template: str | None = CHATML, bos: bool = True, eos: bool = False) -> Any:
    """Characters are tokens; `bos` and `eos` say which of them the tokenizer itself puts around a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate(special + characters)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if bos or eos:
        single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_with() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (or raw text) to a `.jsonl` file."""

    def write(rows: list[dict[str, Any]] | str | bytes, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(rows, list):
            rows = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
        return path

    return write
