"""What the engine `local` scores: tokens that are given, through the weights that it samples with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from strop.models.attention import Plan
from strop.models.consistent_mode import is_consistent
from strop.models.forward import PackedInputs, by_stream, packed_inputs, token_logprobs
from strop.models.layout import pack
from strop.models.repeated import RepeatedScores
from strop.rollout.engines.derived import Derived

# Tokens whose logits exist at a time.
_CHUNK = 512

Hidden = Callable[[Tensor, Tensor, Plan], Tensor]


class TokenScores:
    """Scores of one model; see `of`.

    Args:
        hidden, captured: (input_ids, position_ids [1, T], plan of attention) to hidden states [T, H]; the second with
            operations that can be captured.
    """

    def __init__(self, model: nn.Module, derived: Derived, hidden: Hidden, captured: Hidden) -> None:
        self._model, self._derived, self._hidden, self._captured = model, derived, hidden, captured
        self._device = next(model.parameters()).device
        self._consistent = is_consistent(model)
        self._repeated = RepeatedScores(model)

    def of(
        self, token_lists: Sequence[Sequence[int]], temperature: float, version: int, *, capture: bool
    ) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        streams = [np.asarray(tokens, dtype=np.int64) for tokens in token_lists]

        def scores(hidden: Hidden) -> Callable[[], Tensor]:
            inputs = packed_inputs(pack(streams), [np.arange(len(s)) > 0 for s in streams], self._device)
            return lambda: self._compute(hidden, inputs, temperature, version)

        flat = None
        if capture:
            # Before each replay too: a graph reads what the copies hold then.
            self._derived.joined(version)
            flat = self._repeated.of([s.tolist() for s in streams], temperature, lambda: scores(self._captured))
        if flat is None:
            flat = scores(self._hidden)()
        return by_stream(flat, streams)

    def forget(self) -> None:
        """What is held for scores that are asked for again reads weights that will not stay where they are."""
        self._repeated.forget()

    def _compute(self, hidden: Hidden, inputs: PackedInputs, temperature: float, version: int) -> Tensor:
        """[N] float32."""
        states = hidden(inputs.input_ids, inputs.position_ids, inputs.attention)
        if self._consistent:
            at = states[inputs.predictors]
            return token_logprobs(self._model, at, inputs.targets, temperature=temperature, chunk=_CHUNK)[0]
        found = [torch.zeros(0, device=self._device)]
        for start in range(0, len(inputs.targets), _CHUNK):
            span = slice(start, start + _CHUNK)
            logits = self._derived.logits(states[inputs.predictors[span]], version) / temperature
            found.append(logits.gather(1, inputs.targets[span, None])[:, 0] - torch.logsumexp(logits, -1))
        return torch.cat(found)
