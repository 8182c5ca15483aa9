"""Model folders of a true shape with random weights, with a tokenizer, for machines that can fetch nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

PAD, EOS, UNKNOWN = 0, 1, 2
FIRST = 3
"""The first token that is a word."""

# Of `never_writes`: neurons that mark each place, and how unlikely the token becomes, in nats below the others.
MARKING, BELOW = 64, 60.0


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head: int
    intermediate: int
    vocabulary: int


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936),
    "qwen3-4b": Shape(2560, 36, 32, 8, 128, 9728, 151_936),
    # vLLM needs heads of 32 numbers.
    "tiny": Shape(64, 2, 4, 2, 32, 128, 512),
}


def config(shape: str, context: int) -> Any:
    """Of a model; see `write_model`."""
    from transformers import Qwen3Config

    sizes = SHAPES[shape]
    return Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def write_model(folder: Path, shape: str, *, dtype: str, context: int, seed: int = 0) -> None:
    """A model's folder: weights as transformers draws them, but for `never_writes`; the tokenizer; the settings.

    Args:
        shape: one of SHAPES. dtype: "float32" or "bfloat16". context: longest sequence; no weight depends on it.
    """
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config(shape, context)).eval()
    never_writes(model, EOS)
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    tokenizer(SHAPES[shape].vocabulary, context).save_pretrained(folder)


def write_job(folder: Path, shape: str, *, dtype: str, context: int, lengths: Sequence[int]) -> dict[str, str]:
    """A model and prompts of so many tokens, as the job of a side names them, and where it notes how far it is."""
    write_model(folder / "model", shape, dtype=dtype, context=context)
    vocabulary = words(SHAPES[shape].vocabulary - FIRST)
    rows = [json.dumps({"prompt": text_of(prompt, vocabulary)}) for prompt in prompts(shape, lengths)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    names = {"model": "model", "data": "prompts.jsonl", "progress": "progress.json"}
    return {name: str(folder / file) for name, file in names.items()}


def never_writes(model: Any, token: int) -> None:
    """Make a token of a Llama-shaped model with tied embeddings so unlikely, everywhere, that it is never sampled.

    A few neurons of the last block get one row for both gate and up: what they give, z² sigmoid(z), is never negative.
    They alone write into the last place of the hidden state, which is therefore positive wherever the model is. No
    embedding has a part there but the token's, whose part is negative. All other logits are those of a random model.
    """
    import torch

    place, embeddings = -1, model.get_input_embeddings().weight
    layers = model.model.layers
    with torch.no_grad():
        embeddings[:, place] = 0
        for layer in layers:
            layer.self_attn.o_proj.weight[place] = 0
            layer.mlp.down_proj.weight[place] = 0
        last, hidden = layers[-1].mlp, embeddings.shape[1]
        rows = torch.randn(MARKING, hidden) / hidden**0.5
        last.gate_proj.weight[:MARKING] = last.up_proj.weight[:MARKING] = rows
        last.down_proj.weight[place, :MARKING] = 0.05
        some = torch.randint(FIRST, embeddings.shape[0], (4, min(128, model.config.max_position_embeddings)))
        marks = model.model(input_ids=some, use_cache=False).last_hidden_state[..., place]
        assert marks.min() > 0.05 * marks.mean() > 0, "the mark of a place is not there"
        embeddings[token] = 0
        embeddings[token, place] = -BELOW / marks.min()


def tokenizer(vocabulary: int, context: int) -> Any:
    """Every token from `FIRST` on is a word of small letters with a space before it; a text comes back as it was."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN}
    names |= {word: FIRST + at for at, word in enumerate(words(vocabulary - FIRST))}
    backend = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" [a-z]+"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def words(number: int) -> list[str]:
    """The first so many of " a", " b", … " aa", " ab", …"""
    made = (" " + "".join(letters) for length in count(1) for letters in product(ascii_lowercase, repeat=length))
    return list(islice(made, number))


def prompts(shape: str, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Random words, so many for each prompt, as ids."""
    generator = np.random.default_rng(seed)
    high = SHAPES[shape].vocabulary
    return [generator.integers(FIRST, high, size=length).tolist() for length in lengths]


def text_of(ids: Sequence[int], vocabulary: Sequence[str]) -> str:
    """What the tokenizer reads as these ids. vocabulary: all `words` of the model."""
    return "".join(vocabulary[token - FIRST] for token in ids)
