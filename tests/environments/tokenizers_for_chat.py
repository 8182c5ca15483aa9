"""Tokenizers for the tests of conversations: a small byte-level BPE with the chat template of a real model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
"""The chat templates of Qwen/Qwen2.5-0.5B-Instruct, Qwen/Qwen3-0.6B, HuggingFaceTB/SmolLM2-135M-Instruct (all
Apache-2.0) and deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B (MIT), as their tokenizers have them."""

SPECIAL = {
    "qwen2_5": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "smollm2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "deepseek_r1_distill": ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
}
"""Special tokens of each; the last one ends a turn."""
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEXT = """
You are a helpful assistant. What is the capital of France? The capital of France is Paris. Let me think about this.
user assistant system tool  {"name": "calculator", "arguments": {"expression": "1 + 2"}} result error 0123456789
"""


@cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer with the template of that name."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([TEXT] * 3, trainer)
    special = SPECIAL[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[-1], bos_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(NOT_SPECIAL))
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer
