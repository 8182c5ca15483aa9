"""The policy as an OpenAI-compatible server answers, `/v1/chat/completions`: messages in, one message out.

Token in, token out all the same: where a request goes on behind the messages of an earlier one, its tokens are those
that were read and sampled, and only what is new is rendered and tokenised (`environments/conversation.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.data.rendering import Renderer
from strop.environments.call_styles import Call, CallStyle
from strop.environments.conversation import Conversation
from strop.environments.driven import Path, Policy, refuse_other_sampling
from strop.environments.protocol import Message

INVALID = "invalid"
"""Name of the tool in a call that could not be understood; its argument `problem` says why."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "n": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "stream": (False, None),
}


@dataclass(frozen=True)
class _Place:
    """Where a conversation stands: all tokens of its path, and which of them were sampled."""

    tokens: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    prompt: int = 0


@dataclass
class _Talk:
    """One conversation: the messages as they were posted and answered, the same as tokens, and the calls that wait for
    their results."""

    posted: list[Message]
    conversation: Conversation
    place: _Place
    calls: list[Call]


class ChatPolicy:
    """Answers the requests of one agent in one episode.

    Args:
        style: how calls of tools are written. keep_history: see `AnyEnvironment`.
    """

    def __init__(self, policy: Policy, style: CallStyle, *, keep_history: bool = False) -> None:
        self._policy = policy
        self._style = style
        self._keep_history = keep_history
        self._talks: list[_Talk] = []
        self._leaves: list[_Place] = []
        self._requests = 0

    def paths(self, *, trained: bool = True, reward: float | None = None) -> list[Path]:
        """What was read and sampled, a path for each leaf. reward: of the last one."""
        leaves = [
            one
            for at, one in enumerate(self._leaves)
            if not any(
                other.tokens[: len(one.tokens)] == one.tokens and (len(other.tokens) > len(one.tokens) or later > at)
                for later, other in enumerate(self._leaves)
                if later != at
            )
        ]
        return [
            Path(
                one.tokens,
                one.prompt,
                [mark and trained for mark in one.sampled[one.prompt :]],
                reward if one is leaves[-1] else None,
            )
            for one in leaves
        ]

    def messages(self) -> list[Message]:
        """The conversation that was carried on last."""
        return [] if not self._talks else self._talks[-1].conversation.messages

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One request, `{messages, tools, max_tokens, stop}`, and its chat completion.

        Raises:
            ValueError: it asks for what is not sampled here.
        """
        self._check(body)
        messages = [_plain(message) for message in body["messages"]]
        tools = list(body.get("tools") or [])
        talk = self._going_on(messages) or self._begun(messages, self._policy.renderer.telling(tools))
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        stop = body.get("stop") or []
        found = await self._policy.sample(
            talk.place.tokens, max_new_tokens=limit, stop=[stop] if isinstance(stop, str) else stop
        )
        calls = self._style.calls(found.text) if tools else []
        self._requests += 1
        talk.place = _Place(
            (*talk.place.tokens, *found.tokens),
            (*talk.place.sampled, *[True] * len(found.tokens)),
            talk.place.prompt,
        )
        if found.tokens:
            self._leaves.append(talk.place)
        talk.conversation.said(found.text, found.tokens, talk.place, self._style.message(found.text, calls))
        talk.calls = calls
        answer = self._message(found.text, calls)
        talk.posted = [*messages, answer]
        self._talks = [*(one for one in self._talks if one is not talk), talk]
        finish = "length" if found.finish != "stop" else "tool_calls" if calls else "stop"
        return {
            "id": f"strop-{self._policy.group}-{self._policy.sample_index}-{self._requests}",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model", "policy"),
            "choices": [{"index": 0, "message": answer, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": len(talk.place.tokens) - len(found.tokens),
                "completion_tokens": len(found.tokens),
                "total_tokens": len(talk.place.tokens),
            },
        }

    def _check(self, body: Mapping[str, Any]) -> None:
        refuse_other_sampling(self._policy, body, _NEUTRAL)
        if not body.get("messages"):
            raise ValueError("there are no messages")

    def _going_on(self, messages: list[Message]) -> _Talk | None:
        """The conversation whose next messages these are."""
        for talk in reversed(self._talks):
            done = len(talk.posted)
            new = messages[done:]
            if new and [_key(one) for one in messages[:done]] == [_key(one) for one in talk.posted]:
                if any(message["role"] == "assistant" for message in new):
                    continue
                found = talk.conversation.extend(self._told(talk, new))
                before = found.parent if found.parent is not None else _Place(prompt=len(found.tokens))
                tokens = (*before.tokens, *found.tokens)
                talk.place = _Place(tokens, (*before.sampled, *[False] * len(found.tokens)), before.prompt)
                talk.conversation.place(talk.place)
                return talk
        return None

    def _begun(self, messages: list[Message], renderer: Renderer) -> _Talk:
        known = [_in_template(message) for message in messages]
        conversation = Conversation(
            renderer,
            known,
            chat=renderer.renders_chat(known),
            end_ids=self._policy.end_ids,
            keep_history=self._keep_history,
        )
        tokens = conversation.begin()
        place = _Place(tuple(tokens), (False,) * len(tokens), len(tokens))
        conversation.place(place)
        talk = _Talk(messages, conversation, place, [])
        self._talks.append(talk)
        return talk

    def _told(self, talk: _Talk, new: list[Message]) -> list[Message]:
        """New messages as the chat template reads them: results of calls in the way of the style."""
        results = [str(message["content"]) for message in new if message["role"] == "tool"]
        others = [{"role": m["role"], "content": m["content"]} for m in new if m["role"] != "tool"]
        if len(results) != len(talk.calls):
            raise ValueError(f"{len(results)} results for {len(talk.calls)} calls of tools")
        return [*(self._style.results(talk.calls, results) if results else []), *others]

    def _message(self, text: str, calls: Sequence[Call]) -> Message:
        """The policy's turn as it is answered; `content` holds all of it, calls too."""
        if not calls:
            return {"role": "assistant", "content": text}
        called = []
        for number, call in enumerate(calls):
            arguments = call.arguments if call.problem is None else {"problem": call.problem}
            name = call.name if call.problem is None else INVALID
            as_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            called.append(
                {
                    "id": f"call_{self._requests}_{number}",
                    "type": "function",
                    "function": {"name": name, "arguments": as_text},
                }
            )
        return {"role": "assistant", "content": text, "tool_calls": called}


def _plain(message: Mapping[str, Any]) -> Message:
    """A message whose content is a text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(parts) < len(content):
            raise ValueError("messages may hold texts only")
        content = "\n".join(parts)
    return {**message, "content": content or ""}


def _key(message: Message) -> Any:
    """What makes two messages the same."""
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or []]
    return message["role"], str(message["content"]).strip(), calls


def _in_template(message: Message) -> Message:
    """A message of a history that was not sampled here, as chat templates want it."""
    found = {
        name: message[name] for name in ("role", "content", "name", "tool_call_id") if message.get(name) is not None
    }
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**one, "function": {**one["function"], "arguments": _arguments(one["function"]["arguments"])}}
            for one in message["tool_calls"]
        ]
    return found


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text
