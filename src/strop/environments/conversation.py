"""The conversation of an episode: messages, and how new ones become tokens behind those that were sampled.

Token in, token out: what was sampled stays as it was sampled. What is rendered and tokenised is only what comes behind
it: the end of the turn as the chat template has it, the new messages, and the beginning of the policy's next turn. Some
templates render earlier turns in another way once others follow (they drop `<think>`, say); then the conversation
forks: what the policy reads next is a branch that begins where the two renderings differ, and the sampled turn stays
in the branch in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from strop.data.rendering import Message, Renderer
from strop.errors import DataError

# A content that no template changes and no text holds.
MARK = "\ue000strop\ue001"


@dataclass
class _Piece:
    """A text that the policy has read or written, and the place in the episode that holds its tokens."""

    text: str
    place: Any
    written: bool
    ends: bool = False


@dataclass(frozen=True)
class Continuation:
    """What to append: `tokens` behind the place `parent`; None begins anew. forked: the template rewrote the past."""

    tokens: list[int]
    parent: Any
    forked: bool


class Conversation:
    """One conversation with the policy.

    Args:
        renderer: makes text of messages and tokens of text.
        messages: what the policy reads first. chat: whether the chat template renders them; without it the contents are
            joined as they are.
        end_ids: tokens that end a turn of the policy.
        keep_history: never fork; the policy goes on reading its turns as it wrote them, whatever the template would do.
        where: names the data row in messages of errors.
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        *,
        chat: bool,
        end_ids: frozenset[int],
        keep_history: bool = False,
        where: str = "",
    ) -> None:
        self._renderer = renderer
        self._chat = chat
        self._messages = renderer.with_system_prompt(list(messages)) if chat else list(messages)
        self._end_ids = end_ids
        self._keep_history = keep_history
        self._where = where
        self._pieces: list[_Piece] = []

    def fork(self) -> Conversation:
        """Another conversation that begins with this one; what is added to one is not in the other."""
        other = copy(self)
        other._messages, other._pieces = list(self._messages), list(self._pieces)
        return other

    @property
    def messages(self) -> list[Message]:
        """All messages so far, the policy's included."""
        return list(self._messages)

    def begin(self) -> list[int]:
        """Token ids of the first prompt.

        Raises:
            DataError: the chat template refuses the messages.
        """
        if self._chat:
            text = self._renderer.chat(self._messages, self._where, generation=True)
        else:
            text = "".join(str(message["content"]) for message in self._messages)
        self._pieces = [_Piece(text, None, written=False)]
        return self._renderer.tokens([text], self._chat)[0]

    def place(self, place: Any) -> None:
        """Say where the tokens of the newest piece went."""
        self._pieces[-1].place = place

    def said(self, text: str, tokens: Sequence[int], place: Any, message: Message | None = None) -> None:
        """Note a turn of the policy.

        Args:
            text: what it wrote, without special tokens. tokens: the ids, as sampled. place: where they went.
            message: how the turn stands among the messages; `{"role": "assistant", "content": text}` if not given.
        """
        ended = bool(tokens) and int(tokens[-1]) in self._end_ids
        self._messages.append(message or {"role": "assistant", "content": text})
        self._pieces.append(_Piece(text, place, written=True, ends=ended))

    def extend(self, messages: Sequence[Message]) -> Continuation:
        """New messages behind the policy's turn, and where they go; tell `place` where they went.

        Raises:
            DataError: the chat template refuses the messages.
        """
        if not self._chat:
            found = self._behind("".join(str(message["content"]) for message in messages))
        else:
            text = self._after(messages)
            rewritten = self._rewritten(messages, text)
            if rewritten is None and text is None:
                raise DataError(
                    "the chat template leaves the policy's turn out once another message follows",
                    where=self._where,
                    mend="set environment.keep_history: false",
                )
            found = rewritten or self._behind(text or "")
        self._messages += messages
        return found

    def _behind(self, text: str) -> Continuation:
        """Append a text to what has been read and written."""
        last = self._pieces[-1]
        self._pieces.append(_Piece(text, None, written=False))
        return Continuation(self._tokens(text, last), last.place, forked=False)

    def _tokens(self, text: str, before: _Piece) -> list[int]:
        """Token ids of what follows a piece; an end-of-turn token that the policy itself wrote is not written again."""
        ids = self._renderer.tokens([text], True)[0]
        if before.written and before.ends and ids and ids[0] in self._end_ids:
            return ids[1:]
        return ids

    def _after(self, messages: Sequence[Message]) -> str | None:
        """What the template puts behind the content of the policy's last turn, up to where its next one begins; None
        where it leaves the content out."""
        past = [*self._messages[:-1], {"role": "assistant", "content": MARK}]
        if "tool_calls" not in self._messages[-1]:
            whole = self._renderer.chat([*past, *messages], self._where, generation=True)
            return whole[whole.rindex(MARK) + len(MARK) :] if MARK in whole else None
        # Templates want calls to stand in a field of their own, and write them in their own way: only what they put
        # behind the turn is taken from there.
        marked = self._renderer.chat(past, self._where)
        if MARK not in marked:
            return None
        ending = marked[marked.rindex(MARK) + len(MARK) :]
        plain = self._renderer.chat(self._messages, self._where)
        whole = self._renderer.chat([*self._messages, *messages], self._where, generation=True)
        return ending + whole[len(plain) :]

    def _rewritten(self, messages: Sequence[Message], after: str | None) -> Continuation | None:
        """The continuation of a history that the template renders in another way now; None where it does not."""
        if self._keep_history or any("tool_calls" in message for message in self._messages):
            return None
        whole = self._renderer.chat([*self._messages, *messages], self._where, generation=True)
        done, same = 0, 0
        new = [] if after is None else [_Piece(after, None, written=False)]
        for piece in [*self._pieces, *new]:
            # White space that a template trims at the edges of a turn is no other history.
            texts = [piece.text, piece.text.strip()] if piece.written else [piece.text]
            fitting = [text for text in texts if whole.startswith(text, done)]
            if not fitting:
                break
            done += len(fitting[0])
            same += 1
        if same > len(self._pieces) and done == len(whole):
            return None
        forked = same < len(self._pieces)
        kept = self._pieces[:same]
        done = 0
        for piece in kept:
            done += len(piece.text if whole.startswith(piece.text, done) else piece.text.strip())
        rest = whole[done:]
        self._pieces = [*kept, _Piece(rest, None, written=False)]
        if not kept:
            return Continuation(self._renderer.tokens([rest], True)[0], None, forked)
        return Continuation(self._tokens(rest, kept[-1]), kept[-1].place, forked)
