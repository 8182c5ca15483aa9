"""A reward model in use: whole texts in, scores out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strop.errors import ModelError
from strop.models.attention import check_supported, running
from strop.models.forward import packed_hidden, packed_inputs
from strop.models.layout import pack
from strop.models.load import load_scalar_model, load_tokenizer
from strop.models.scalar import packed_scores

BUDGET = 8192
"""Tokens in one pass."""


class ScoringModel:
    """A model with a scalar head and its tokenizer. `ScoringModel.load` makes it.

    Args:
        model: in evaluation mode. tokenizer: its own. render: "chat" reads prompts through the chat template, "text" as
            they are, "auto" decides by what a prompt is.
    """

    def __init__(self, model: Any, tokenizer: Any, *, render: str = "auto") -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._render = render
        self._device = next(model.parameters()).device
        self._leading: list[int] | None = None

    @classmethod
    def load(cls, folder: Path, *, render: str = "auto", device: str = "auto") -> ScoringModel:
        """Read a folder as `...ForSequenceClassification` saves it.

        Raises:
            ModelError: it cannot be loaded, gives not one score but labels or text, or there is no such device.
        """
        if device == "auto":
            device = next((d for d in ("cuda", "mps") if getattr(torch, d).is_available()), "cpu")
        elif device != "cpu" and not getattr(torch, device).is_available():
            raise ModelError(
                f"there is no {device} device on this machine for the reward model",
                where=str(folder),
                mend="leave the verifier's device on auto, or install a torch build for the device",
            )
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = load_scalar_model(folder, device=device, dtype=dtype)
        check_supported(model)
        return cls(model, load_tokenizer(folder), render=render)

    def score(self, texts: Sequence[tuple[Any, str, bool]]) -> list[float]:
        """One number for each (prompt, completion, whether the completion ended by itself), in order.

        A prompt is a text or a list of messages; what completions begin with alike is computed once.
        """
        streams = [np.asarray(self.tokens(*text), dtype=np.int64) for text in texts]
        found: list[float] = []
        first = 0
        while first < len(streams):
            last, used = first, 0
            while last < len(streams) and (last == first or used + len(streams[last]) <= BUDGET):
                used += len(streams[last])
                last += 1
            found += self._pass(streams[first:last])
            first = last
        return found

    def tokens(self, prompt: Any, completion: str, finished: bool) -> list[int]:
        """What is scored, at its last token: as `supervised.method: reward_model` lays out its examples."""
        tokenizer = self._tokenizer
        ends = tokenizer.eos_token_id
        if self._render == "text" or (self._render == "auto" and isinstance(prompt, str)):
            text = prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)
            before, after = [*self._before(), *self._ids(text)], self._ids(completion)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            start = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            answer = {"role": "assistant", "content": completion}
            whole = tokenizer.apply_chat_template([*messages, answer], tokenize=False)
            before = self._ids(start)
            after = self._ids(whole[len(start) :] if finished and whole.startswith(start) else completion)
            if ends in after:
                after = after[: after.index(ends) + 1]
        return [*before, *after, *([ends] if finished and ends not in after else [])]

    def _pass(self, streams: list[np.ndarray]) -> list[float]:
        wanted = [np.arange(len(stream)) == len(stream) - 1 for stream in streams]
        with torch.no_grad():
            inputs = packed_inputs(pack(streams, [len(s) - 1 for s in streams]), wanted, self._device)
            with running(self._model, inputs.attention):
                hidden = packed_hidden(self._model, inputs).index_select(0, inputs.places)
                scores: list[float] = packed_scores(self._model, hidden).cpu().tolist()
        return scores

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _before(self) -> list[int]:
        """What the tokenizer itself puts before a text, as its BOS token."""
        if self._leading is None:
            probe = self._ids("1")
            full: list[int] = self._tokenizer("1")["input_ids"]
            at = next((at for at in range(len(full)) if probe and full[at : at + len(probe)] == probe), 0)
            self._leading = full[:at]
        return self._leading
