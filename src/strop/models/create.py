"""A small Llama-shaped model with random weights and a character tokenizer, made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.model import NewModel
from strop.models.global_state import seeded

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def create_model(settings: NewModel, *, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a model (float32, on the CPU, in eval mode, tied embeddings) and its tokenizer.

    The weights depend on the settings and the seed only, and the global random state is left as it was.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = create_tokenizer(settings)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size or 4 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_value_heads or settings.heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with seeded(seed), torch.device("cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.eval()
    return model, tokenizer


def create_tokenizer(settings: NewModel) -> PreTrainedTokenizerFast:
    """One token for each character: `<pad>` 0, `<eos>` 1, `<unk>` 2, then the characters in the order given.

    Texts over the alphabet come back exactly from `decode(encode(text))`, spaces included; a character outside it
    becomes `<unk>`, and no special token is ever added.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *settings.characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # Not ".", which leaves line breaks out.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=settings.context,
        clean_up_tokenization_spaces=False,
    )
