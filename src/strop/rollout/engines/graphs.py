"""Decoding steps of the local engine as CUDA graphs: one launch for a whole step, from the newest tokens to the next.

A step of a small model is some thousand kernels of a few microseconds each, which Python cannot start as fast as a GPU
computes them. A graph is captured for a number of rows the first time that it is needed; fewer rows are filled up.
A step can be launched before anybody has looked at what the one before it drew: the GPU need not wait for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strop.errors import RunFailure
from strop.models.attention import Scores, running
from strop.models.blocks import ChangedBlocks
from strop.models.forward import backbone
from strop.models.repeated import Graph, captured, places
from strop.rollout.engines.joined_linear import JoinedLinears
from strop.rollout.engines.kv_cache import KVCache

_FEW = (1, 2, 4, 8, 16, 24, 32)
_STEP = 32


class NotCaptured(Exception):
    """A model's decoding step cannot be a graph: it asks the GPU for something on the way, or for other attention."""


class Drawn:
    """What a step draws, on its way from the GPU."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        self._held = tuple(
            torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x, non_blocking=True)
            for x in (tokens, logprobs)
        )
        self._copied: Any = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, their log-probabilities) [n] each, as soon as the GPU has them."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, logprobs = self._held
        return tokens.numpy(), logprobs.numpy()


class GraphDecoder:
    """Decodes with graphs over one cache; see `launch`.

    Args:
        draw: (tokens, log-probabilities) [n] each, from hidden states [n, H], temperatures [n] and the `u` [n] of
            `sampling.draw`, with operations that can be captured.
        blocks: of the model, compiled; None where they are not.
        joined: sibling layers computed together, brought to the current weights; None where they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        draw: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
        *,
        blocks: ChangedBlocks | None = None,
        joined: Callable[[], JoinedLinears | None] = lambda: None,
    ) -> None:
        self._model, self._cache, self._draw, self._device = model, cache, draw, device
        self._joined = joined
        self._blocks = blocks
        rows = cache.rows
        # What a step is given, in one piece, so that the GPU has one thing to fetch: five rows of eight bytes a number,
        # see `_staged`.
        self._given = torch.zeros((5, rows), dtype=torch.int64, device=device)
        # What the step that was launched last draws.
        self._newest = torch.zeros(rows, dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[Graph, Tensor, Tensor]] = {}
        self._capacity = cache.capacity
        self._places, self._moved = places(model), False
        self._pool: Any = None

    def fits(self) -> bool:
        """Whether the cache is where it was when graphs were captured, and weights were when they were last new."""
        return self._capacity == self._cache.capacity and not self._moved

    def weights_are_new(self) -> None:
        """To be called after each update of the weights, which may have given them other memory."""
        self._moved = self._places != places(self._model)

    def launch(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        temperatures: np.ndarray,
        u: np.ndarray,
        sources: np.ndarray | None = None,
    ) -> Drawn:
        """Begin to draw the next token of each of the first n rows of the cache.

        Args:
            tokens: int64 [n], the newest, which the cache does not hold yet. lengths: int64 [n], tokens it holds.
            temperatures: float32 [n]. u: float64 [n], see `draw`.
            sources: int64 [n], the row that had a row's newest token in the step that was launched before this one;
                -1 where it is that of `tokens`. None: all of them are.

        Raises:
            NotCaptured: the step is to be computed in another way; the cache is as it was, but for places behind the
                tokens that it holds.
        """
        count = len(tokens)
        size = self._size(count)
        self._given.copy_(self._staged(tokens, lengths, temperatures, u, sources), non_blocking=True)
        try:
            self._joined()
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)
        except RunFailure:
            raise
        except Exception as error:
            raise NotCaptured(f"{type(error).__name__}: {error}") from error
        graph, drawn, logprobs = self._graphs[size]
        graph.replay()
        # Not in the graph: what warms a graph up would leave tokens here too.
        self._newest[:size].copy_(drawn)
        return Drawn(drawn[:count], logprobs[:count])

    def _staged(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        temperatures: np.ndarray,
        u: np.ndarray,
        sources: np.ndarray | None,
    ) -> Tensor:
        """int64 [5, rows], where a GPU can fetch it while others work; what is given may change from now on.

        Rows that only fill up compute a first token of theirs again and again.
        """
        staged = torch.zeros(self._given.shape, dtype=torch.int64, pin_memory=self._given.is_cuda)
        count, rows = len(tokens), staged.numpy()
        rows[0, :count], rows[1, :count] = tokens, lengths
        floats = rows[2:4].view(np.float64)
        floats[0, :count], floats[1, :count] = temperatures, u
        rows[4] = -1
        if sources is not None:
            rows[4, :count] = sources
        return staged

    def _size(self, count: int) -> int:
        few = next((size for size in _FEW if size >= count), None)
        size = -(-count // _STEP) * _STEP if few is None else few
        return min(size, self._cache.rows)

    def _capture(self, size: int) -> tuple[Graph, Tensor, Tensor]:
        graph, (drawn, logprobs) = captured(lambda: self._compute(size), self._pool)
        # One pool for all: only one of them is replayed at a time.
        self._pool = graph.pool()
        return graph, drawn, logprobs

    def _compute(self, size: int) -> tuple[Tensor, Tensor]:
        own, lengths, temperatures, u, sources = self._given[:, :size]
        # -1 reads some token, which is not used.
        tokens = torch.where(sources < 0, own, self._newest[sources.clamp(min=0)])
        plan = _Step(self._cache, lengths)
        with ExitStack() as layers:
            layers.enter_context(running(self._model, plan))
            if (joined := self._joined()) is not None:
                layers.enter_context(joined.active())
            if self._blocks is not None:
                layers.enter_context(self._blocks.used())
            found = backbone(self._model)(input_ids=tokens[None], position_ids=lengths[None], use_cache=False)
        hidden = found.last_hidden_state[0]
        return self._draw(hidden, temperatures.view(torch.float64).float(), u.view(torch.float64))


class _Step:
    """Attention of one new token for each row, whose number of tokens only the GPU knows."""

    def __init__(self, cache: KVCache, lengths: Tensor) -> None:
        self._cache = cache
        self._lengths = lengths.int()
        self._at = lengths
        self._tiles: Any = None

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        from strop.rollout.engines.decode_kernel import decode_attention

        if scores.consistent:
            return self._consistent(layer, query, key, value, scores)
        if not scores.plain:
            raise NotCaptured("its attention caps scores or has sinks")
        keys, values = self._cache.layer(layer, key, value)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out = decode_attention(q, k, v, keys, values, self._lengths, scaling=scores.scaling, window=scores.window)
        return out.unsqueeze(0)

    def _consistent(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        from strop.models.attention_consistent import CachedTiles

        keys, values = self._cache.layer(layer, key, value)
        if self._tiles is None:
            self._tiles = CachedTiles(self._at)
            self._rows = torch.arange(len(self._at), device=query.device)
        keys[self._rows, :, self._at] = key[0].transpose(0, 1)
        values[self._rows, :, self._at] = value[0].transpose(0, 1)
        return self._tiles.attend(query, keys, values, scores)


def capturable(device: torch.device) -> bool:
    """Whether steps can be captured on a device at all."""
    from torch.utils._triton import has_triton

    return device.type == "cuda" and bool(has_triton())


__all__ = ["Drawn", "GraphDecoder", "NotCaptured", "capturable"]
