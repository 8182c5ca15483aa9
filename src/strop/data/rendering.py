"""Rendering: from a row to the text that the model reads, and from that text to token ids, once."""

from __future__ import annotations

import copy
import string
from collections.abc import Mapping, Sequence
from typing import Any

from strop.config.data import DataSettings
from strop.data.columns import listed, nearest
from strop.errors import DataError, ModelError

Message = dict[str, Any]


class Renderer:
    """Turns what a row holds into text and tokens, as `data.render`, `data.system_prompt` and the tokenizer say.

    Args:
        settings: the `data:` section.
        tokenizer: a Hugging Face tokenizer.
        tools: JSON schemas of functions, for the chat template to tell the model of.
        instructions: more words for the system message of a chat.

    Raises:
        DataError: `system_prompt` is set with `render: text`, which has no place for it.
        ModelError: `render: chat` and the tokenizer has no chat template.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        instructions: str = "",
    ) -> None:
        self._render = settings.render
        self._system_prompt = settings.system_prompt
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] if tools else None
        self._instructions = instructions
        self._prefix: list[int] | None = None
        if settings.render == "text" and settings.system_prompt is not None:
            raise _no_place_for_system_prompt("data.render is `text`", "data.system_prompt")
        if settings.render == "chat":
            self._need_template()

    def text(self, prompt: str | list[Message], where: str) -> tuple[str, bool]:
        """The text the model reads, and whether it came from the chat template.

        Raises:
            DataError: messages that are malformed, that the template refuses, or with `render: text`.
            ModelError: messages, and a tokenizer without a chat template.
        """
        if isinstance(prompt, str):
            if self._render != "chat":
                if self._system_prompt is not None:
                    raise _no_place_for_system_prompt("the prompt is a text and data.render is `auto`", where)
                return prompt, False
            messages: list[Message] = [{"role": "user", "content": prompt}]
        elif self._render == "text":
            raise DataError(
                "the prompt is a list of messages, and data.render is `text`",
                where=where,
                mend="Set data.render to `chat` or `auto`, or make a text with data.prompt_template.",
            )
        else:
            messages = prompt
        return self.chat(self.with_system_prompt(messages), where, generation=True), True

    def telling(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """The same renderer, whose chat template tells of other tools."""
        other = copy.copy(self)
        other._tools = [dict(tool) for tool in tools] if tools else None
        return other

    def renders_chat(self, prompt: str | Sequence[Message]) -> bool:
        """Whether the chat template renders such a prompt."""
        return self._render == "chat" if isinstance(prompt, str) else self._render != "text"

    def conversation(self, messages: list[Message], where: str) -> list[tuple[str, bool]]:
        """A whole conversation as pieces of text, and whether each is an assistant's turn. Joined they are the text.

        A turn begins where the model would begin to write (`add_generation_prompt`) and ends where the next one begins.
        That is seen by rendering the conversation up to each turn: what comes out must be the beginning of the whole.

        Raises:
            DataError: messages that the template refuses, or a template that renders a turn in another way once others
                follow it, so that no one can say which of the text the assistant wrote.
            ModelError: a tokenizer without a chat template.
        """
        messages = self.with_system_prompt(messages)
        whole = self.chat(messages, where)
        pieces: list[tuple[str, bool]] = []
        done = 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.chat(messages[:at], where, generation=True) if at else ""
            after = self.chat(messages[: at + 1], where)
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
                raise DataError(
                    f"the chat template does not mark the assistant's turns: message {at} reads otherwise in the whole "
                    "conversation than when it was written",
                    where=where,
                    mend="Give each assistant turn a row of its own (`prompt` with the messages before it, `answer`), "
                    "or use a template that leaves earlier turns as they are.",
                )
            pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        return [piece for piece in [*pieces, (whole[done:], False)] if piece[0]]

    def answer(self, prompt: str | list[Message], completion: str, text: str, where: str) -> str | None:
        """What the chat template makes of an answer to a prompt that it rendered as `text`; None where it renders the
        prompt otherwise once there is an answer, so that the answer has to be taken as it is."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = self.with_system_prompt([*messages, {"role": "assistant", "content": completion}])
        whole = self.chat(messages, where)
        return whole[len(text) :] if whole.startswith(text) else None

    def with_system_prompt(self, messages: list[Message]) -> list[Message]:
        """The messages, behind `data.system_prompt` unless they begin with one of their own."""
        if self._system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        if not self._instructions:
            return messages
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self._instructions}, *messages]
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{self._instructions}"}
        return [first, *messages[1:]]

    def chat(self, messages: list[Message], where: str, *, generation: bool = False) -> str:
        """What the chat template makes of messages; with `generation`, up to where the assistant begins to write.

        Raises:
            DataError: the template refuses the messages. ModelError: there is no template.
        """
        self._need_template()
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=self._tools, add_generation_prompt=generation, tokenize=False
                )
            )
        except Exception as error:  # templates raise what they like: jinja errors, TypeErrors of their filters
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template refuses the messages (roles: {roles}): {error}",
                where=where,
                mend="Give messages in the order that this model's template wants"
                + (", or remove data.system_prompt." if self._system_prompt is not None else "."),
            ) from error

    def tokens(self, texts: Sequence[str], chat: bool) -> list[list[int]]:
        """Token ids of each text: with the tokenizer's own first token (BOS) once, and never an end-of-text token
        that the text does not hold. A chat template writes its own first token, so none is added to `chat` texts."""
        if not texts:
            return []
        # Masks and types are not needed, and leaving them out halves the time of a batch.
        # What is too long is found and told by whoever asked, not by the tokenizer in the middle of the display.
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        plain: list[list[int]] = encoded["input_ids"]
        if chat:
            return plain
        if self._prefix is None:
            self._prefix = leading_tokens(self._tokenizer)
        prefix = self._prefix
        return [ids if prefix and ids[: len(prefix)] == prefix else prefix + ids for ids in plain]

    def unknown_token(self) -> int | None:
        """The id that stands for characters the tokenizer does not know; None where it has no id of its own for it."""
        tokenizer = self._tokenizer
        unknown: int | None = tokenizer.unk_token_id
        shared = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        return None if unknown in shared else unknown

    def _need_template(self) -> None:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelError(
                "chat messages need a chat template, and the tokenizer has none",
                where=getattr(self._tokenizer, "name_or_path", "") or "tokenizer",
                mend="Use an instruction-tuned model, or texts instead of messages with data.render: text.",
            )


def leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text: usually nothing or its BOS token. What it puts after is left out:
    a prompt that ends with an end-of-text token asks the model to begin something new."""
    probe = "1"
    plain = tokenizer(probe, add_special_tokens=False)["input_ids"]
    full = tokenizer(probe, add_special_tokens=True)["input_ids"]
    for at in range(len(full) - len(plain) + 1):
        if plain and full[at : at + len(plain)] == plain:
            return list(full[:at])
    # The tokenizer does not know the probe; all that is left are its special tokens.
    return [token for token in full[:1] if token == tokenizer.bos_token_id]


def check_messages(messages: Any, where: str) -> list[Message]:
    """Messages without their empty fields, after checking that a model can be asked to go on from them.

    Raises:
        DataError: no messages, a message without role or content, or a last message that is the assistant's.
    """
    cleaned = clean_messages(messages, where)
    if cleaned[-1]["role"] == "assistant":
        raise DataError(
            "the last message is the assistant's, so there is nothing to answer",
            where=where,
            mend="Leave it out of the prompt; put a reference answer into a column of its own.",
        )
    return cleaned


def clean_messages(messages: Any, where: str) -> list[Message]:
    """Messages without their empty fields; DataError if there are none, or one has no role or content."""
    if not messages:
        raise DataError("the prompt is an empty list of messages", where=where, mend="Give at least one message.")
    cleaned = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f"message {number} is not an object but {type(message).__name__}", where=where, mend=_MESSAGE_MEND
            )
        # Parquet and datasets give every message the fields of all messages, with None where there was none.
        kept = {name: value for name, value in message.items() if value is not None}
        if not isinstance(kept.get("role"), str):
            keys = listed(message)
            mend = "Rename `from` to `role` and `value` to `content`." if "from" in message else _MESSAGE_MEND
            raise DataError(f"message {number} has no `role`; its keys are {keys}", where=where, mend=mend)
        content = kept.get("content")
        if content is None and not kept.get("tool_calls"):
            raise DataError(
                f"message {number} (role {kept['role']}) has no `content`; its keys are {listed(kept)}",
                where=where,
                mend=_MESSAGE_MEND,
            )
        if content is not None and not isinstance(content, str | list):
            raise DataError(
                f"the content of message {number} is not a text but {type(content).__name__}",
                where=where,
                mend=_MESSAGE_MEND,
            )
        cleaned.append(kept)
    return cleaned


def template_columns(template: str, columns: Sequence[str]) -> list[str]:
    """The columns that a `prompt_template` uses.

    Raises:
        DataError: the template is malformed or uses a column that there is not.
    """
    key = "data.prompt_template"
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise DataError(f"the template is malformed: {error}", where=key, mend=_BRACES) from error
    names = []
    for field in fields:
        name = field.split(".")[0].split("[")[0]
        if not name or name.isdigit():
            raise DataError(f"the template has a field without a name, {{{field}}}", where=key, mend=_BRACES)
        if name not in columns:
            hint = nearest(name, columns)
            raise DataError(
                f"the template uses a column {name!r}; the columns are {listed(columns)}",
                where=key,
                mend=f"{hint} {_BRACES}".strip(),
            )
        names.append(name)
    if not names:
        raise DataError("the template uses no column, so every prompt would be the same", where=key, mend=_BRACES)
    return names


def fill_template(template: str, row: Mapping[str, Any], where: str) -> str:
    """The prompt that a template makes of a row; DataError names the column that the row lacks."""
    try:
        return template.format(**row)
    except KeyError as error:
        name = str(error.args[0])
        raise DataError(
            f"the row has no column {name!r}, which data.prompt_template uses; it has {listed(row)}",
            where=where,
            mend=nearest(name, row) or "Give every row that column.",
        ) from error
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise DataError(
            f"data.prompt_template cannot be filled: {error}", where=where, mend="Check the formats in its braces."
        ) from error


def _no_place_for_system_prompt(why: str, where: str) -> DataError:
    return DataError(
        f"data.system_prompt is set, but {why}, so it would be ignored",
        where=where,
        mend="Set data.render: chat, or put the words into data.prompt_template.",
    )


_MESSAGE_MEND = 'Each message must be like {"role": "user", "content": "..."}.'
_BRACES = "Write column names in braces, such as {question}; double braces that are text: {{ }}."
