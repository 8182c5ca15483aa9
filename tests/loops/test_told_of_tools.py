"""Warnings before a run whose policy cannot know of its tools, or cannot write their calls."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import put, recipe

from strop.config.loading import load_config
from strop.loops.prepare import prepare


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "12+1=", "answer": "13"}) + "\n")


def warned(**changes: Any) -> list[str]:
    data = recipe(
        **{
            "model.create.characters": "0123456789+=<>/[]calutor",
            "data": {"train": {"path": "rows.jsonl"}},
            "environment": {"kind": "tools", "tools": [{"kind": "calculator"}], "style": "tag"},
        }
    )
    for key, value in changes.items():
        put(data, key, value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        prepare(load_config(None, data=data)).close()
    return [str(one.message) for one in found if "tool" in str(one.message)]


def test_texts_without_a_template_tell_nothing() -> None:
    (said,) = warned()
    assert "the policy is not told of its tools" in said
    assert "data.prompt_template" in said
    assert "<calculator>...</calculator>" in said


def test_prompts_may_tell_of_the_tools_themselves(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "calculator+12=", "answer": "13"}) + "\n")
    assert warned() == []


def test_a_warm_up_shows_how_calls_are_written() -> None:
    assert warned(warmup={"steps": 1}) == []


def test_an_alphabet_without_the_characters_of_a_call_is_told() -> None:
    said = warned(**{"model.create.characters": "0123456789+=", "warmup": {"steps": 1}})
    assert len(said) == 1
    assert "can never call the tool calculator" in said[0]
    assert "lacks '<calutor>/'" in said[0]
    brackets = {"environment.opening": "[", "environment.closing": "]", "warmup": {"steps": 1}}
    assert warned(**{"model.create.characters": "0123456789+=[]", **brackets}) == []


@pytest.mark.parametrize("render", ["auto", "chat"])
def test_a_chat_template_tells_where_it_is_used(render: str, tmp_path: Path) -> None:
    from strop.models.create import create_model
    from strop.models.save import save_model

    settings = load_config(None, data=recipe(**{"model.create.characters": "0123456789+=<>/calutor{}_"})).model.create
    assert settings is not None
    model, tokenizer = create_model(settings, seed=0)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content[-6:] }}{% endfor %}"
    save_model(model, tokenizer, tmp_path / "chat")
    said = warned(model={"path": str(tmp_path / "chat")}, **{"data.render": render})
    if render == "chat":
        assert said == []
    else:
        assert "set data.render=chat" in said[0]
