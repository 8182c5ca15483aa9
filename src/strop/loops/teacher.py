"""The teacher of on-policy distillation: a model that only scores the tokens that the policy sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.config import Config
from strop.config.model import ModelSettings
from strop.errors import ModelError
from strop.models.attention import running
from strop.models.forward import check_forward, packed_logprobs
from strop.models.load import ModelFacts, inspect_model, load_model
from strop.training.batching import micro_batches

if TYPE_CHECKING:
    from strop.loops.assembly import Roles
    from strop.loops.prepare import Prepared


@dataclass
class Teacher:
    """A frozen model. temperature: log-probabilities are taken at it, the policy's. budget, chunk: as the trainer's."""

    model: Any
    device: torch.device
    temperature: float
    budget: int
    chunk: int

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """[T] float32 on the CPU, 0 where the loss mask is False."""
        out = torch.zeros(batch.input_ids.shape[0])
        with torch.no_grad():
            for micro in micro_batches(batch, self.budget, self.device):
                if not len(micro.trained):
                    continue
                with running(self.model, micro.inputs.attention):
                    values, _ = packed_logprobs(
                        self.model, micro.inputs, temperature=self.temperature, chunk=self.chunk, entropy="none"
                    )
                inside = torch.isin(batch.seq_ids, micro.sequences) & batch.loss_mask
                out[inside] = values.cpu()
        return out


def check_teacher(config: Config, student: ModelFacts, longest: int) -> None:
    """See that the teacher is there and reads the same tokens as the policy, without loading its weights.

    Args:
        longest: tokens of the longest sequence that is expected.

    Raises:
        ModelError: it cannot be used.
    """
    facts = inspect_model(_settings(config))
    if facts.tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise ModelError(
            "the teacher has another tokenizer than the policy, so it cannot score the policy's tokens",
            where=f"algorithm.teacher = {config.algorithm.teacher}",
            mend="use a teacher of the same family as the model that is trained",
        )
    if facts.context < longest:
        raise ModelError(
            f"sequences of up to {longest} tokens do not fit the teacher's context of {facts.context}",
            where=f"algorithm.teacher = {config.algorithm.teacher}",
            mend="set rollout.max_new_tokens or data.max_prompt_tokens lower",
        )


def load_teacher(prepared: Prepared, roles: Roles) -> Teacher | None:
    """The teacher of a recipe; None where it names none."""
    config, hardware = prepared.config, prepared.hardware
    if config.algorithm.teacher is None:
        return None
    loaded = load_model(_settings(config), device=hardware.device, dtype=hardware.dtype, seed=config.run.seed)
    model = loaded.model.requires_grad_(False)
    check_forward(model, vocabulary=int(model.get_output_embeddings().weight.shape[0]))
    return Teacher(
        model=model,
        device=hardware.device,
        temperature=config.rollout.temperature,
        budget=roles.sizes.tokens_per_micro_batch,
        chunk=config.training.logprob_chunk,
    )


def _settings(config: Config) -> ModelSettings:
    return ModelSettings(path=config.algorithm.teacher, trust_remote_code=config.model.trust_remote_code)
