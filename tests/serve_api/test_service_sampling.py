"""Sampling from checkpoints: the worker's lines, and the endpoint in OpenAI's form with a model behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import AtHand, put_run
from starlette.testclient import TestClient

from strop.loops.sample_lines import Pieces

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"


def put_model(run: Path, *, step: int, chat: bool = False) -> Path:
    """A tiny model, as a checkpoint of a run has it."""
    from strop.config.model import NewModel
    from strop.models.create import create_model

    model, tokenizer = create_model(
        NewModel(characters=CHARACTERS, hidden_size=32, layers=1, heads=4, context=64), seed=step
    )
    # Larger than a default initialisation, so that context and weights matter to what is drawn.
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"
            "{% if add_generation_prompt %}a {% endif %}"
        )
    folder = run / "checkpoints" / f"step-{step:06d}" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (run / "checkpoints" / "latest").write_text(f"step-{step:06d}\n")
    return folder


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtHand]:
    """A service with a run of two checkpoints, and another whose model has a chat template; one event loop for all."""
    there = AtHand(tmp_path_factory.mktemp("speaking") / "runs", models=3)
    run = put_run(there.root, "plain")
    put_model(run, step=5)
    put_model(run, step=9)
    put_model(put_run(there.root, "chat"), step=3, chat=True)
    broken = put_run(there.root, "broken")
    assert (broken / "checkpoints" / "latest").is_file()
    with TestClient(there.service.app, base_url="http://localhost") as client:
        for caller in (there.viewer, there.operator, there.admin):
            caller.client = client
        yield there
    there.close()


def ask(there: AtHand, path: str, **body: Any) -> Any:
    answer = there.operator("POST", f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: Any) -> list[Any]:
    """The events of a stream, without the last, which says that it was."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
def test_texts_and_conversations_are_gone_on_with(speaking: AtHand) -> None:
    asked = {"model": "plain", "prompt": "1+2=", "max_tokens": 12, "seed": 4}
    whole = ask(speaking, "completions", **asked).json()
    [choice] = whole["choices"]
    assert whole["object"] == "text_completion"
    assert choice["finish_reason"] in ("stop", "length")
    assert whole["usage"]["prompt_tokens"] == 4
    assert 0 < whole["usage"]["completion_tokens"] <= 12
    assert ask(speaking, "completions", **asked).json()["choices"] == whole["choices"], "the same seed, the same text"
    streamed = events(ask(speaking, "completions", **asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == choice["text"]
    assert len(streamed) > 3, "it comes piece by piece"
    assert streamed[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert streamed[-1]["usage"] == whole["usage"]
    # A stop text is not said, and nothing behind it.
    text = choice["text"]
    stopped = ask(speaking, "completions", **asked, stop=[text[3:5]]).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[3:5])], "stop")
    # A model without a template goes on with what is said; another checkpoint is another model.
    said = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 12, "seed": 4}
    first = ask(speaking, "chat/completions", model="plain", **said).json()
    assert first["choices"][0]["message"] == {"role": "assistant", "content": text}
    greedy = {"messages": said["messages"], "max_tokens": 20, "temperature": 0}
    both = [ask(speaking, "chat/completions", model=f"plain@{step}", **greedy).json() for step in (5, 9)]
    assert both[0]["choices"] != both[1]["choices"]


@pytest.mark.slow
def test_a_chat_template_is_used_and_what_does_not_fit_is_refused(speaking: AtHand) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    said.append({"role": "user", "content": "no"})
    asked = {"model": "chat", "messages": said, "max_tokens": 8, "seed": 1}
    whole = ask(speaking, "chat/completions", **asked).json()
    assert whole["usage"]["prompt_tokens"] == len("u hi a yes u no a ")
    same = ask(speaking, "completions", model="chat", prompt="u hi a yes u no a ", max_tokens=8, seed=1).json()
    assert same["choices"][0]["text"] == whole["choices"][0]["message"]["content"]
    streamed = events(ask(speaking, "chat/completions", **asked, stream=True))
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    pieces = [event["choices"][0]["delta"].get("content", "") for event in streamed]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    for path, body, what in [
        ("completions", {"model": "chat", "prompt": "1" * 70}, "do not fit"),
        ("completions", {"model": "chat", "prompt": ""}, "at least one"),
        ("completions", {"model": "chat", "prompt": "1", "max_tokens": 64}, "do not fit"),
        ("completions", {"model": "broken", "prompt": "1"}, "cannot be loaded"),
        ("chat/completions", {"model": "chat", "messages": said[:2]}, "the assistant's"),
        ("chat/completions", {"model": "plain", "messages": said}, "no chat template"),
    ]:
        for stream in (False, True):
            answer = speaking.operator("POST", f"/v1/{path}", json={**body, "stream": stream})
            assert answer.status_code == 422, answer.text
            assert what in answer.json()["what"]
    listed = speaking.viewer("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["broken", "chat", "plain"]
    assert speaking.audit()[-2]["action"] == "sample.chat"


@pytest.mark.slow
def test_a_process_that_ends_is_an_error_and_then_started_again(speaking: AtHand) -> None:
    asked = {"model": "chat", "prompt": "1+2=", "max_tokens": 4, "seed": 4}
    before = ask(speaking, "completions", **asked).json()
    # The one that was asked last.
    *others, speaker = speaking.service.speakers._speakers.values()
    assert speaker._process is not None
    speaker._process.kill()
    while speaker.alive:
        speaking.viewer("GET", "/health")
    assert ask(speaking, "completions", **asked).json()["choices"] == before["choices"]
    assert len(speaking.service.speakers._speakers) == len(others) + 1


@pytest.mark.parametrize(
    "model",
    [
        "nothing",
        "plain@7",
        "plain@",
        "plain@..",
        "plain@latest/..",
        "plain@best",
        "../plain",
        ".service",
        "@",
        "plain@²",
    ],
)
def test_what_is_no_model_is_refused(speaking: AtHand, model: str, tmp_path: Path) -> None:
    answer = speaking.operator("POST", "/v1/completions", json={"model": model, "prompt": "1", "max_tokens": 1})
    assert (answer.status_code, speaking.audit()[-1]["outcome"]) == (404, "refused")


def test_a_model_of_links_is_none(at_hand: Callable[..., AtHand], tmp_path: Path) -> None:
    there = at_hand()
    run = put_run(there.root)
    model = run / "checkpoints" / "step-000003" / "model"
    (model / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert there.operator("POST", "/v1/completions", json={"model": "done", "prompt": "1"}).status_code == 404
    (run / "checkpoints" / "latest").write_text("../../elsewhere")
    assert there.operator("POST", "/v1/completions", json={"model": "done", "prompt": "1"}).status_code == 404
    assert there.viewer("GET", "/v1/models").json()["data"] == []


@pytest.mark.parametrize(
    "setting",
    [
        {"top_p": 0.9},
        {"n": 2},
        {"frequency_penalty": 1},
        {"logprobs": 3},
        {"tools": []},
        {"temperature": -1},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": ["a"] * 9},
        {"seed": 1 << 63},
        {"trust_remote_code": True},
    ],
)
def test_a_setting_without_effect_is_refused(there: AtHand, setting: dict[str, Any]) -> None:
    answer = there.operator("POST", "/v1/completions", json={"model": "plain", "prompt": "1", **setting})
    assert answer.status_code == 422
    assert answer.json()["where"].startswith(f"body.{next(iter(setting))}")


def test_pieces_are_whole_characters_and_hold_back_what_may_be_a_stop_text() -> None:
    text = "aé→b STOP c"
    data = text.encode()

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    for stop in ([], ["STOP"], ["STOP", "b S"], ["c"], ["nothing"]):
        pieces = Pieces(decode, stop)
        found = [pieces.add(byte) for byte in data] + [pieces.rest()]
        assert not any("\ufffd" in piece for piece in found)
        assert "".join(found) == text[: min([text.index(s) for s in stop if s in text], default=len(text))]
    pieces = Pieces(decode, ["STOP"])
    assert [pieces.add(byte) for byte in b"xSTx"] == ["x", "", "", "STx"]
    # A character that never becomes whole is said in the end, as the tokenizer shows it.
    broken = Pieces(decode, [])
    assert [broken.add(0xC3), broken.rest()] == ["", "\ufffd"]
