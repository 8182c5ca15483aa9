"""New models: weights from the seed alone, and a tokenizer that gives every text back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.config.model import NewModel
from strop.models.create import create_model, create_tokenizer

TINY = NewModel(hidden_size=16, layers=2, heads=2, context=32)
ODD = NewModel(characters=" \n\t\u00a0aé日́🙂<>|.\\", hidden_size=16, layers=1, heads=1)
TOKENIZER, ODD_TOKENIZER = create_tokenizer(TINY), create_tokenizer(ODD)


@given(st.text(alphabet=TINY.characters))
@settings(max_examples=200)
def test_texts_come_back_exactly(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


@given(st.text(alphabet=ODD.characters))
@settings(max_examples=200)
def test_line_breaks_combining_marks_and_emoji_come_back_exactly(text: str) -> None:
    ids = ODD_TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert ODD_TOKENIZER.decode(ids) == text


def test_special_tokens_are_single_ids_and_never_added() -> None:
    assert TOKENIZER("1<eos>2")["input_ids"] == [4, 1, 5]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id) == (0, 1, 2)
    assert TOKENIZER.decode([4, 1], skip_special_tokens=True) == "1"


def test_a_character_outside_the_alphabet_is_unknown() -> None:
    assert TOKENIZER("1é2")["input_ids"] == [4, 2, 5]


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first, _ = create_model(TINY, seed=5)
    torch.manual_seed(2)
    again, _ = create_model(TINY, seed=5)
    other, _ = create_model(TINY, seed=6)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    create_model(TINY, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_shapes_follow_the_settings() -> None:
    wide = TINY.model_copy(update={"key_value_heads": 1, "intermediate_size": 24})
    model, tokenizer = create_model(wide, seed=0)
    assert model.dtype == torch.float32
    assert not model.training
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.shape == (len(tokenizer), 16)
    assert model.config.num_key_value_heads == 1
    assert model.config.intermediate_size == 24
    assert model.config.max_position_embeddings == 32
    for place in (model.config, model.generation_config):
        assert (place.eos_token_id, place.pad_token_id, place.bos_token_id) == (1, 0, None)


def test_a_default_dtype_of_the_process_does_not_leak_in() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model, _ = create_model(TINY, seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_transformers_own_saving_round_trips(tmp_path: pytest.TempPathFactory) -> None:
    model, tokenizer = create_model(TINY, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, loaded_tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "12 +  3 = ?"
    ids = loaded_tokenizer(text, return_tensors="pt")["input_ids"]
    assert loaded_tokenizer.decode(ids[0]) == text
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
