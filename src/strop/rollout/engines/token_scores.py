"""What the engine `local` scores: tokens that are given, through the weights that it samples with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from strop.models.attention import Plan
from strop.models.consistent_mode import is_consistent
from strop.models.forward import PackedInputs, packed_inputs, token_logprobs
from strop.models.layout import pack
from strop.rollout.engines.derived import Derived
from strop.rollout.engines.graphs import Repeated

# Tokens up to which scores that are asked for again are a graph, and those whose logits exist at a time.
_FEW = 64
_CHUNK = 512

Hidden = Callable[[Tensor, Tensor, Plan], Tensor]


class TokenScores:
    """Scores of one model; see `of`.

    A proof of delivery scores the same few tokens with each version. The second time they become a CUDA graph: such a
    pass is a thousand kernels, each of which Python needs longer to start than the GPU to compute.

    Args:
        hidden, captured: (input_ids, position_ids [1, T], plan of attention) to hidden states [T, H]; the second with
            operations that can be captured.
    """

    def __init__(self, model: nn.Module, derived: Derived, hidden: Hidden, captured: Hidden) -> None:
        self._model, self._derived, self._hidden, self._captured = model, derived, hidden, captured
        self._device = next(model.parameters()).device
        self._consistent = is_consistent(model)
        self._repeats = not self._consistent
        self._asked: tuple[list[list[int]], float] | None = None
        self._repeated: Repeated | None = None

    def of(
        self, token_lists: Sequence[Sequence[int]], temperature: float, version: int, *, capture: bool
    ) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32 [L]; the first one is NaN."""
        streams = [np.asarray(tokens, dtype=np.int64) for tokens in token_lists]
        few = sum(map(len, streams)) <= _FEW
        flat = self._again(streams, temperature, version) if capture and few and self._repeats else None
        if flat is None:
            flat = self._compute(self._hidden, self._inputs(streams), temperature, version)
        pieces = np.split(flat.cpu().numpy(), np.cumsum([len(stream) - 1 for stream in streams])[:-1])
        return [np.concatenate([[np.float32("nan")], piece]).astype(np.float32) for piece in pieces]

    def forget(self) -> None:
        """Give the graph back: what it reads will not stay where it is."""
        self._asked = self._repeated = None

    def _again(self, streams: Sequence[np.ndarray], temperature: float, version: int) -> Tensor | None:
        """[N], if the same was asked before, and can be captured."""
        asked = [stream.tolist() for stream in streams], temperature
        before, self._asked = self._asked, asked
        if asked != before:
            self._repeated = None
            return None
        # Before each replay too: the graph reads what the copies hold then.
        self._derived.joined(version)
        if self._repeated is None or not self._repeated.fits():
            self._repeated = None
            inputs = self._inputs(streams)
            try:
                self._repeated = Repeated(
                    self._model, lambda: self._compute(self._captured, inputs, temperature, version)
                )
            except Exception as error:
                self._repeats = False
                warnings.warn(
                    f"what is scored again and again is computed without a CUDA graph, which is slower: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return None
        return self._repeated.again()

    def _inputs(self, streams: Sequence[np.ndarray]) -> PackedInputs:
        return packed_inputs(pack(streams), [np.arange(len(stream)) > 0 for stream in streams], self._device)

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
