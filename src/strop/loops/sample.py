"""Talking to a model: one prompt, or line by line."""

from __future__ import annotations

import sys
import time
from typing import Any

from strop.config.model import ModelSettings
from strop.errors import UserError
from strop.loops.event_loop import run_to_end
from strop.models.load import load_model
from strop.rollout.engine import SampleRequest, SampleSettings
from strop.rollout.engines.local import LocalEngine


def chat(
    model: str,
    *,
    prompt: str | None = None,
    temperature: float = 0.7,
    max_new_tokens: int = 256,
    system: str | None = None,
) -> None:
    """Print the model's answer to a prompt, or hold a conversation over the terminal's lines.

    A tokenizer with a chat template is spoken to in messages, and remembers the conversation; one without continues
    each line as plain text.

    Args:
        model: a run, a checkpoint, a model folder or a name. prompt: answer this and end; None reads lines.
        temperature: 0 takes the most likely token. system: a system message before the conversation.

    Raises:
        UserError: the model cannot be loaded, or a system message is given to a model without a chat template.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(ModelSettings(path=model), device=device, seed=0)
    tokenizer: Any = loaded.tokenizer
    if system is not None and tokenizer.chat_template is None:
        raise UserError("this model has no chat template, so a system message has no place", where="--system")
    engine = LocalEngine(
        loaded.model,
        tokenizer,
        eos_ids=loaded.eos_ids,
        seed=time.time_ns(),
        context=loaded.context,
        max_sequences=1,
    )
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    turn = 0

    def answer(text: str) -> str:
        nonlocal turn
        messages.append({"role": "user", "content": text})
        if tokenizer.chat_template is None:
            ids = tokenizer(text)["input_ids"]
        else:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        room = min(max_new_tokens, loaded.context - len(ids))
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens and the model's context is {loaded.context}",
                mend="start a new conversation",
            )
        turn += 1
        request = SampleRequest(tuple(ids), SampleSettings(room, temperature), (turn,))
        found = run_to_end(lambda: engine.generate(request))
        said: str = tokenizer.decode(found.tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
        return said

    if prompt is not None:
        print(answer(prompt))
        return
    watched = sys.stdin.isatty()
    if watched:
        print(f"{loaded.name}: type a line and press Enter; an empty line or Ctrl-D ends.")
    while True:
        try:
            line = input("> " if watched else "")
        except EOFError:
            return
        if not line and watched:
            return
        if line:
            print(answer(line), flush=True)
