"""One forward pass over packed streams: from token ids to log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from strop.errors import ModelError
from strop.models.adapters import without_adapters
from strop.models.attention import PackedAttention, check_supported, running
from strop.models.consistent_mode import is_consistent
from strop.models.layout import PackedStreams, pack
from strop.models.logprobs import Entropy, Vocabulary, linear_logprobs, output_head
from strop.models.moving import moved
from strop.models.topk_logprobs import linear_topk_logprobs


def backbone(model: nn.Module) -> nn.Module:
    """The causal model less its output head: token ids to final hidden states."""
    causal = without_adapters(model)
    return causal.get_decoder() if hasattr(causal, "get_decoder") else causal.base_model


@dataclass
class PackedInputs:
    """A packed row on its device, with the tokens to score.

    input_ids, position_ids: [1, T] int64. predictors: [N], packed places whose hidden state predicts the target.
    targets: [N] token ids. places: [N], packed places of the targets. attention: the plan for `running`.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    targets: Tensor
    places: Tensor
    attention: PackedAttention

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def packed_inputs(packed: PackedStreams, wanted: Sequence[np.ndarray], device: torch.device) -> PackedInputs:
    """What a model needs to score tokens of packed streams.

    Args:
        packed: the streams.
        wanted: for each stream a bool [L_i], True for each token to score; the first token of a stream cannot be.
    """
    predictors, targets, own = [], [], []
    for places, mask in zip(packed.places, wanted, strict=True):
        at = np.flatnonzero(mask)
        if len(at) and at[0] == 0:
            raise ValueError("the first token of a stream has nothing before it, so it cannot be scored or trained")
        predictors.append(places[at - 1])
        targets.append(packed.layout.input_ids[places[at]])
        own.append(places[at])

    def tensor(array: np.ndarray) -> Tensor:
        return moved(torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)), device)

    return PackedInputs(
        input_ids=tensor(packed.layout.input_ids)[None],
        position_ids=tensor(packed.layout.position_ids)[None],
        predictors=tensor(np.concatenate(predictors)),
        targets=tensor(np.concatenate(targets)),
        places=tensor(np.concatenate(own)),
        attention=PackedAttention(packed.layout, device),
    )


def packed_logprobs(
    model: nn.Module,
    inputs: PackedInputs,
    *,
    temperature: float = 1.0,
    chunk: int = 512,
    entropy: Entropy = "none",
    hits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropy) of the wanted tokens, [N] float32 each; call it inside `running(model, ...)`.

    hits: see `linear_logprobs`.
    """
    hidden = packed_hidden(model, inputs).index_select(0, inputs.predictors)
    return token_logprobs(
        model, hidden, inputs.targets, temperature=temperature, chunk=chunk, entropy=entropy, hits=hits
    )


def token_logprobs(
    model: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 512,
    entropy: Entropy = "none",
    hits: Tensor | None = None,
    even: bool = False,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """The same from the hidden states [N, H] that predict the targets [N]. even, vocabulary: see `linear_logprobs`."""
    weight, bias, softcap = output_head(model)
    return linear_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        chunk=chunk,
        entropy=entropy,
        hits=hits,
        even=even,
        vocabulary=vocabulary,
        consistent=is_consistent(model),
    )


def packed_topk_logprobs(
    model: nn.Module,
    inputs: PackedInputs,
    ids: Tensor,
    *,
    temperature: float,
    topk_temperature: float,
    chunk: int,
    entropy: Entropy,
    hits: Tensor,
    agreement: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities [N] of the wanted tokens, [N, K + 1] of the tokens `ids` [N, K] and of all others, entropy);
    call it inside `running(model, ...)`. For the rest see `linear_topk_logprobs`."""
    hidden = packed_hidden(model, inputs)
    weight, bias, softcap = output_head(model)
    return linear_topk_logprobs(
        hidden.index_select(0, inputs.predictors),
        weight,
        inputs.targets,
        ids,
        bias=bias,
        temperature=temperature,
        topk_temperature=topk_temperature,
        softcap=softcap,
        chunk=chunk,
        entropy=entropy,
        hits=hits,
        agreement=agreement,
    )


def packed_hidden(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """[T, H]: the last hidden states of a packed row; call it inside `running(model, ...)`."""
    found = backbone(model)(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False)
    return found.last_hidden_state[0]


def score_streams(
    model: nn.Module, streams: Sequence[np.ndarray], *, temperature: float = 1.0, chunk: int = 512
) -> list[np.ndarray]:
    """Log-probability of each token given those before it, float32 [L_i]; the first one is NaN. No gradient."""
    device = next(model.parameters()).device
    wanted = [np.arange(len(stream)) > 0 for stream in streams]
    with torch.no_grad():
        inputs = packed_inputs(pack(streams), wanted, device)
        with running(model, inputs.attention):
            flat, _ = packed_logprobs(model, inputs, temperature=temperature, chunk=chunk)
    return by_stream(flat, streams)


def by_stream(flat: Tensor, streams: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Scores of all tokens of some streams but the first of each, end to end, as float32 [L_i]; the first ones are
    NaN."""
    pieces = np.split(flat.cpu().numpy(), np.cumsum([len(stream) - 1 for stream in streams])[:-1])
    return [np.concatenate([[np.float32("nan")], piece]).astype(np.float32) for piece in pieces]


def check_forward(model: nn.Module, *, vocabulary: int) -> None:
    """Prove on two short streams that the packed forward pass gives the model's own log-probabilities.

    Architectures scale, cap or mix in ways that cannot all be listed; a difference here is caught before any work.

    Raises:
        ModelError: the model cannot be packed, or its log-probabilities differ.
    """
    check_supported(without_adapters(model))
    device = next(model.parameters()).device
    streams = [np.arange(length, dtype=np.int64) * 7919 % vocabulary for length in (5, 9)]
    # One shared beginning, as the completions of a group have.
    streams[0][:3] = streams[1][:3]
    ours = score_streams(model, streams)
    worst = 0.0
    with torch.no_grad():
        for stream, mine in zip(streams, ours, strict=True):
            ids = torch.from_numpy(stream).to(device)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
            theirs = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            worst = max(worst, float(np.abs(theirs.cpu().numpy() - mine[1:]).max()))
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.25
    if not worst <= tolerance:
        raise ModelError(
            f"{type(model).__name__} computes its output in a way strop does not reproduce: log-probabilities of a "
            f"packed row differ from the model's own by {worst:.2g}",
            mend="please report the architecture; a model of another family works",
        )
