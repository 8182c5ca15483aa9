"""Teachers: frozen models that say what they think of tokens that the policy sampled, or of given texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.algorithms.batch import TokenBatch
from strop.algorithms.distillation import mixture
from strop.config import Config
from strop.config.model import ModelSettings
from strop.config.teachers import TeacherSettings
from strop.errors import ModelError
from strop.models.attention import running
from strop.models.forward import check_forward, packed_hidden, packed_logprobs
from strop.models.load import ModelFacts, inspect_model, load_model
from strop.models.logprobs import output_head
from strop.models.topk_logprobs import TeacherRows, mixture_topk
from strop.planning.hardware import choose_chunk
from strop.training.batching import MicroBatch, micro_batches

if TYPE_CHECKING:
    from strop.loops.assembly import Roles
    from strop.loops.prepare import Prepared
    from strop.loops.prepare_examples import PreparedExamples


@dataclass
class Teachers:
    """One or more frozen models, of which the weighted mean of the probabilities counts.

    names: as the recipe has them. fingerprints: name their weights. weights: one for each model, above 0. vocabulary:
    tokens that the tokenizer knows. temperature: every distribution is taken at it. budget, chunk: as the trainer's.
    """

    models: Sequence[Any]
    names: Sequence[str]
    fingerprints: Sequence[str]
    weights: Sequence[float]
    vocabulary: int
    device: torch.device
    temperature: float
    budget: int
    chunk: int

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """[T] float32 on the CPU: of the batch's own tokens, 0 where the loss mask is False."""
        out = torch.zeros(batch.input_ids.shape[0])
        for micro, inside in self._cut(batch):
            found = [self._score(model, micro) for model in self.models]
            mixed = found[0] if len(found) == 1 else mixture(torch.stack(found), self.weights)
            out[inside] = mixed.cpu()
        return out

    @torch.no_grad()
    def fill_targets(self, batch: TokenBatch, k: int) -> None:
        """Leave in a batch what the teachers say of it: `teacher_logprobs`, as `logprobs` gives them, and the targets
        of `algorithms/targets.py`, with K the smaller of `k` and the vocabulary."""
        count, k = batch.input_ids.shape[0], min(k, self.vocabulary)
        sampled, topk = torch.zeros(count), torch.zeros(count, k + 1)
        ids = torch.zeros((count, k), dtype=torch.int32)
        total = sum(self.weights)
        for micro, inside in self._cut(batch):
            rows = []
            for model, weight in zip(self.models, self.weights, strict=True):
                with running(model, micro.inputs.attention):
                    hidden = packed_hidden(model, micro.inputs).index_select(0, micro.inputs.predictors)
                rows.append(TeacherRows(hidden, *output_head(model), weight / total))
            found = mixture_topk(
                rows,
                k,
                targets=micro.inputs.targets,
                vocabulary=self.vocabulary,
                temperature=self.temperature,
                chunk=self.chunk,
            )
            for out, values in zip((ids, topk, sampled), found, strict=True):
                out[inside] = values.cpu().to(out.dtype)
        batch.teacher_logprobs = sampled
        batch.extra |= {"target_ids": ids, "target_logprobs": topk}

    def _cut(self, batch: TokenBatch) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Each micro-batch that has trained tokens, and [T] where in the batch these are."""
        for micro in micro_batches(batch, self.budget, self.device):
            if len(micro.trained):
                yield micro, torch.isin(batch.seq_ids, micro.sequences) & batch.loss_mask

    def _score(self, model: Any, micro: MicroBatch) -> Tensor:
        with running(model, micro.inputs.attention):
            values, _ = packed_logprobs(
                model, micro.inputs, temperature=self.temperature, chunk=self.chunk, entropy="none"
            )
        return values


def named_teachers(config: Config) -> tuple[str, list[TeacherSettings]]:
    """The teachers of a recipe, and the key that names them; none is an empty list."""
    if config.supervised is not None:
        return "supervised.teachers", list(config.supervised.teachers)
    if config.algorithm.teacher is not None:
        return "algorithm.teacher", [TeacherSettings(path=config.algorithm.teacher)]
    return "algorithm.teachers", list(config.algorithm.teachers)


def check_teachers(config: Config, student: ModelFacts, longest: int) -> None:
    """See that the teachers are there and read the same tokens as the student, without loading their weights.

    Args:
        longest: tokens of the longest sequence that is expected.

    Raises:
        ModelError: one of them cannot be used.
    """
    key, teachers = named_teachers(config)
    own, tokens = ("policy", "policy's") if config.supervised is None else ("student", "student's")
    for teacher in teachers:
        facts = inspect_model(_settings(config, teacher))
        if facts.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            raise ModelError(
                f"the teacher has another tokenizer than the {own}, so it cannot score the {tokens} tokens",
                where=f"{key} = {teacher.path}",
                mend="use a teacher of the same family as the model that is trained",
            )
        if facts.context < longest:
            keys = "supervised.max_tokens"
            if config.supervised is None:
                keys = "rollout.max_new_tokens or data.max_prompt_tokens"
            raise ModelError(
                f"sequences of up to {longest} tokens do not fit the teacher's context of {facts.context}",
                where=f"{key} = {teacher.path}",
                mend=f"set {keys} lower",
            )


def load_teacher(prepared: Prepared, roles: Roles) -> Teachers | None:
    """The teachers of a recipe of reinforcement learning; None where it names none."""
    if not named_teachers(prepared.config)[1]:
        return None
    temperature = prepared.config.rollout.temperature
    return load_teachers(prepared, temperature=temperature, budget=lambda _: roles.sizes.tokens_per_micro_batch)


def load_teachers(
    prepared: Prepared | PreparedExamples, *, temperature: float, budget: Callable[[Any], int]
) -> Teachers:
    """The teachers that a recipe names.

    Args:
        budget: says for the first model how many tokens go through at once.
    """
    config, hardware = prepared.config, prepared.hardware
    _, named = named_teachers(config)
    loaded = [
        load_model(_settings(config, teacher), device=hardware.device, dtype=hardware.dtype, seed=config.run.seed)
        for teacher in named
    ]
    models = [_frozen(one.model) for one in loaded]
    chunk = config.training.logprob_chunk
    if chunk == "auto":
        chunk = choose_chunk(hardware, vocabulary_of(prepared.facts.tokenizer))
    return Teachers(
        models=models,
        names=[teacher.path for teacher in named],
        fingerprints=[one.fingerprint for one in loaded],
        weights=[teacher.weight for teacher in named],
        vocabulary=vocabulary_of(prepared.facts.tokenizer),
        device=hardware.device,
        temperature=temperature,
        budget=budget(models[0]),
        chunk=chunk,
    )


def vocabulary_of(tokenizer: Any) -> int:
    """One more than the highest token that a tokenizer knows; output heads may have more rows, as padding."""
    return max(tokenizer.get_vocab().values()) + 1


def _frozen(model: Any) -> Any:
    model = model.requires_grad_(False)
    check_forward(model, vocabulary=int(model.get_output_embeddings().weight.shape[0]))
    return model


def _settings(config: Config, teacher: TeacherSettings) -> ModelSettings:
    return ModelSettings(path=teacher.path, trust_remote_code=config.model.trust_remote_code)
