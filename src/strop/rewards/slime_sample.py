"""The sample that slime's functions are given, and stand-ins for the modules that they import.

Source: `slime/utils/types.py` of slime, whose field names these are.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

POSTS: list[Callable[[str, Any], Awaitable[Any] | None]] = []
"""Those who answer a request of `post` without a connection, each where the address is its own."""


class SampleStatus(Enum):
    """How a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One completion of a prompt.

    prompt: as the data has it. tokens: ids, of prompt and response where a sample is generated, of what was sampled
    where one is scored. response_length: how many of them, from the end, are the response. label: the answer column.
    loss_mask: one number for each token of the response, 1 where it is trained; None for all. metadata: the column
    `metadata`, and every other column beside it.
    """

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    Status = SampleStatus

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or its part that `args.reward_key` names."""
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """More of the response, sampled (`trainable`) or given."""
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = [*self.tokens, *tokens]
        self.response += text
        self.response_length += len(tokens)
        self.loss_mask += [int(trainable)] * len(tokens)
        self.rollout_log_probs += list(log_probs) if log_probs else [0.0] * len(tokens)
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take the status and the version of the weights from an answer of the server."""
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        kinds = {
            "stop": SampleStatus.COMPLETED,
            "length": SampleStatus.TRUNCATED,
            "abort": SampleStatus.ABORTED,
        }
        self.status = kinds.get(meta_info["finish_reason"]["type"], self.status)


def metadata_of(row: Mapping[str, Any], *, without: tuple[str, ...] = ("prompt", "answer")) -> dict[str, Any]:
    """What a sample's metadata is of a row."""
    own = row.get("metadata")
    others = {name: value for name, value in row.items() if name not in without and name != "metadata"}
    return others | (dict(own) if isinstance(own, Mapping) else {} if own is None else {"metadata": own})


def stand_in() -> None:
    """Give `from slime.utils.types import Sample` and the like a meaning where slime is not installed.

    What there is: `slime.utils.types.Sample`, `slime.utils.http_utils.post`, and in `slime.rollout.sglang_rollout`
    `GenerateState`, with the tokenizer. Where slime is installed, its own modules are used.
    """
    if "slime" in sys.modules or importlib.util.find_spec("slime") is not None:
        return
    modules: dict[str, dict[str, Any]] = {
        "slime": {},
        "slime.utils": {},
        "slime.rollout": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.http_utils": {"post": post},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    }
    for name, contents in modules.items():
        module = ModuleType(name, "Stands in for the module of slime, which is not installed.")
        vars(module).update(contents)
        if "." not in name or name in ("slime.utils", "slime.rollout"):
            module.__path__ = []
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


class GenerateState:
    """What generate functions ask for their tokenizer: `GenerateState(args).tokenizer`."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = args.tokenizer
        self.processor = None
        self.aborted = False
        self.sampling_params: dict[str, Any] = dict(args.sampling_params)


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None, **_: Any
) -> Any:
    """Post JSON and return the JSON that is answered.

    Raises:
        httpx.HTTPError: it was not answered.
    """
    for answering in POSTS:
        answer = answering(url, payload)
        if answer is not None:
            return await answer
    import httpx

    async with httpx.AsyncClient(timeout=None) as client:
        response = await client.post(url, json=payload or {}, headers=dict(headers or {}))
        response.raise_for_status()
        return response.json()
