"""`rollout:` how completions are sampled."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from strop.config.base import Auto, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel
from strop.config.window import WindowSettings


class ServerSettings(StrictModel):
    """Servers that sample, started by others for this run alone."""

    urls: Annotated[list[str], Field(min_length=1)]
    """Addresses, such as `http://gpu2:30000`; all completions of a prompt go to one of them."""
    model: str = ""
    """Of `openai`: the name that the servers know the model by. Not needed where they have only one."""
    api_key_env: str | None = None
    """The environment variable that holds the key; none when not set."""
    timeout: PositiveFloat = 600.0
    """Seconds for one completion."""
    retries: NonNegativeInt = 3
    """Further tries after a failure that may pass."""
    concurrency: PositiveInt = 256
    """Requests to each server at a time."""
    folder: str | None = None
    """Where each version of the weights is written, which the servers have to see under the same name. It is `weights`
    in the run's folder when not set."""


class EngineSettings(StrictModel):
    """The sampler engine."""

    kind: Literal["local", "vllm", "sglang", "openai"] = "local"
    """`local` samples with the trainer's own weights; `vllm` with [vLLM](https://docs.vllm.ai), which has a copy of
    them, in the same process; `sglang` and `openai` with servers, of SGLang or of an OpenAI-compatible kind that gives
    token ids and takes weights, such as vLLM's."""
    server: ServerSettings | None = None
    """Of `sglang` and `openai`: where the servers are."""
    max_sequences: PositiveInt | Auto = "auto"
    """Of `local` and `vllm`: sequences decoded together; others wait for a free place. `auto` is 256, on a GPU
    512, or fewer if the memory is small."""
    prefill_tokens: PositiveInt | Auto = "auto"
    """Of `local` and `vllm`: prompt tokens processed in one forward pass. `auto` is 4,096; for `local` on a GPU up to
    16,384, as the memory allows."""
    pack_weights: bool | Auto = "auto"
    """Of `local`: hold a second copy of the weights laid out for small matrix products. `auto` does so for float32 on a
    CPU, when the model is large enough to gain from it."""
    memory: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Of `vllm` on a GPU: share of its memory for weights, keys and values, and workspace. `auto` is 0.3 where the
    trainer is on the same GPU, 0.6 where both take turns on it (`sleep` and `training.offload`), and 0.85 elsewhere."""
    eager: bool | Auto = "auto"
    """Of `local` and `vllm`: neither compile the model nor capture CUDA graphs. It starts sooner and samples slower.
    `auto` does so on a CPU; on a GPU both are done, but `local` compiles only models of 100 million weights and
    more."""
    consistent: bool = False
    """Of `local`: compute engine and trainer by operators whose results for a token do not depend on what else is
    computed, so that the log-probability noted at sampling is bit for bit the trainer's. Slower; for models of the
    families Llama, Mistral, Qwen2 and Qwen3 (docs/engine.md)."""
    tensor: PositiveInt = 1
    """Of `vllm`: GPUs of one machine that share each layer (tensor parallelism), on a CPU processes; they must divide
    the attention heads. On Ray each engine gets as many GPUs. With several it does not sleep."""
    merge_adapters: bool = True
    """Of `vllm`, with `model.lora`: bring the weights with their adapters merged in. Otherwise vLLM has the adapters
    beside the weights, and a publication brings nothing else; each step of sampling costs more."""
    prefix_caching: bool = True
    """Of `vllm`: keep the keys and values of prompts, for completions and turns that begin alike, until the weights
    change."""
    after_update: Literal["keep", "recompute"] | Auto = "auto"
    """Of `local` and `vllm`: what becomes of the keys and values of completions that go on with new weights
    (`rollout.in_flight_updates`): kept as they were computed, or computed anew. `auto` keeps them with `local`, and
    computes them anew with `vllm`, which keeps them without `prefix_caching` only."""
    sleep: Literal["always", "never"] | Auto = "auto"
    """Of `local` and `vllm`: give the memory of keys and values, and vLLM that of its weights, to the trainer while it
    computes. `auto` does so on a GPU that both share, where both together would not fit it. `vllm` sleeps on CUDA
    only (docs/performance.md)."""


class TreeSettings(StrictModel):
    """Tree sampling: episodes branch between turns, and each turn is compared with the other branches of its place.

    A completion becomes `branches` to the power of the number of branchings episodes, each with a reward of its own.
    """

    at: Annotated[list[PositiveInt], Field(min_length=1)]
    """Before which turns of the policy an episode branches, counted from 0: `[1]` branches once, after the environment
    has answered the first turn."""
    branches: Annotated[int, Field(ge=2)] = 2
    """Ways that go on from each branching."""

    @property
    def leaves(self) -> int:
        """Most episodes that one completion becomes."""
        return int(self.branches ** len(self.at))

    @field_validator("at")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        if sorted(set(value)) != value:
            raise ValueError("the turns must be in order, and each named once")
        return value


class RolloutSettings(StrictModel):
    """`rollout:` how completions are sampled."""

    groups_per_step: PositiveInt = 8
    """Prompts in one step."""
    group_size: PositiveInt = 8
    """Completions of each prompt."""
    max_new_tokens: PositiveInt = 256
    """Longest completion in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are taken at the same temperature everywhere."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion, beside the end-of-text tokens of the model; the stop text is kept."""
    max_staleness: NonNegativeInt = 0
    """How many versions older than the trainer the weights that sampled a token may be. 0 is synchronous; with more,
    sampling goes on while the trainer computes, up to so many steps ahead."""
    in_flight_updates: bool = True
    """With `max_staleness`: completions that are under way go on with new weights from their next token on. Otherwise
    they are waited for before the weights change, and each completion is of one version."""
    update_every: PositiveInt = 1
    """With `max_staleness`: steps from one publication of new weights to the next; at most one more than
    `max_staleness`."""
    window: WindowSettings = WindowSettings()
    """Which groups a step trains."""
    tree: TreeSettings | None = None
    """Let episodes of several turns branch; none when not set."""
    engine: EngineSettings = EngineSettings()
    """The sampler engine."""

    @model_validator(mode="after")
    def _weights_come_in_time(self) -> Self:
        if self.update_every > self.max_staleness + 1:
            raise ValueError(
                f"update_every ({self.update_every}) steps with the same weights sample tokens that are up to "
                f"{self.update_every - 1} versions old, and max_staleness is {self.max_staleness}: raise it, or lower "
                "update_every"
            )
        return self

    @property
    def off_policy(self) -> bool:
        """Whether a step trains tokens that older weights sampled."""
        return self.max_staleness > 0 or self.window.past is not None

    @property
    def ahead(self) -> int:
        """Steps that sampling may run ahead of training: what the order of the window leaves of `max_staleness`."""
        if self.window.order == "admission" or self.max_staleness < 2:
            return self.max_staleness
        slack = self.max_staleness // 2 if self.window.slack == "auto" else self.window.slack
        return self.max_staleness - slack

    @model_validator(mode="after")
    def _order_leaves_time(self) -> Self:
        if self.max_staleness < 2 or self.window.order == "admission":
            return self
        if self.ahead < 1:
            raise ValueError(
                f"window.slack ({self.window.slack}) has to be less than max_staleness ({self.max_staleness}): the "
                "rest is what sampling runs ahead of training"
            )
        if self.update_every > self.ahead + 1:
            raise ValueError(
                f"update_every ({self.update_every}) can be at most {self.ahead + 1} here: window.order leaves "
                f"sampling {self.ahead} steps ahead of training; raise max_staleness, or lower update_every"
            )
        return self

    @model_validator(mode="after")
    def _past_groups_live(self) -> Self:
        past = self.window.past
        if past is not None and past.max_age <= self.max_staleness:
            raise ValueError(
                f"window.past.max_age ({past.max_age}) has to be more than max_staleness ({self.max_staleness}): a "
                "group may be that old when it is first trained, and would be forgotten before it came again"
            )
        return self

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, value: list[str]) -> list[str]:
        if any(not text for text in value):
            raise ValueError("an empty stop text would end every completion at once")
        return value
