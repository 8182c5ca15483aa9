"""A GGUF file, the format of llama.cpp, as a Hugging Face folder that can be trained."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from strop.models.global_state import quiet
from strop.models.save import write_folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder in float32: the exact values, which bfloat16 cannot hold."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # Its progress bars are drawn by tqdm itself, which transformers' own switch does not reach.
    with quiet(), redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = model.config
    # The loaded model counts as quantised and would refuse to be saved; its weights are plain float32.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for key in ("_model_name_or_path", "_name_or_path"):
        config.__dict__.pop(key, None)
    # GGUF holds it as float32: 1e-05 became 9.999999747378752e-06.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    write_folder(
        type(model),
        config,
        model.state_dict(),
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ),
        complete_tokenizer(tokenizer, gguf, config.max_position_embeddings),
        folder,
    )


def complete_tokenizer(tokenizer: Any, gguf: Path, context: int) -> Any:
    """The tokenizer of a GGUF file as it was before it became one.

    GGUF only names the rule that cuts a text into words, and transformers puts GPT-2's in its place. For "smollm" the
    rule (llama.cpp: `\\p{N}` first, then GPT-2's) also cuts off each digit, which shows where a digit follows two
    spaces or a line break and a space: without it such texts get tokens that the model never saw.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    if GGUFReader(gguf).fields["tokenizer.ggml.pre"].contents() == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    complete = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    complete.chat_template = tokenizer.chat_template
    return complete
