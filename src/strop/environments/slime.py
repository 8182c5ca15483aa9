"""Generate functions as slime has them: the function makes the completion and asks the policy for its tokens."""

from __future__ import annotations

import asyncio
import copy
import inspect
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from strop.config.adapted_environments import SlimeEnvironment
from strop.environments.driven import Driven, Path, Policy
from strop.environments.loopback import HOST, Loopback
from strop.environments.own_loop import OwnLoop
from strop.environments.protocol import EnvironmentFactory
from strop.environments.sglang import SglangPolicy
from strop.errors import UserError
from strop.rewards.python import load_function
from strop.rewards.slime_sample import POSTS, Sample, SampleStatus, metadata_of, stand_in


class SlimeFactory(EnvironmentFactory):
    """Lets a function make the completions. Functions run in an event loop of their own, in a thread of its own, so
    that one that blocks does not stop the engine.

    Raises:
        UserError: the function cannot be imported or is of another form.
    """

    drives = True

    def __init__(self, settings: SlimeEnvironment, *, where: str = "environment") -> None:
        stand_in()
        self._settings = settings
        self._function = load_function(settings.generate, where=f"{where}.generate")
        wanted = f"write it as `async def {settings.generate.partition(':')[2]}(args, sample, sampling_params)`"
        if not inspect.iscoroutinefunction(inspect.unwrap(self._function)):
            raise UserError(f"{settings.generate!r} is no `async def`", where=f"{where}.generate", mend=wanted)
        try:
            inspect.signature(self._function).bind(None, None, {})
        except TypeError as error:
            raise UserError(
                f"{settings.generate!r} takes other arguments: {error}", where=f"{where}.generate", mend=wanted
            ) from error
        self._loop = OwnLoop("strop-slime")
        self._copies: dict[int, Any] = {}

    def make(self) -> SlimeEpisode:
        return SlimeEpisode(self._function, self._settings, self._loop, self._copy)

    async def close(self) -> None:
        self._loop.stop()

    def _copy(self, tokenizer: Any) -> Any:
        """A tokenizer for the functions' thread: one object must not serve two threads at a time."""
        if id(tokenizer) not in self._copies:
            self._copies[id(tokenizer)] = copy.deepcopy(tokenizer)
        return self._copies[id(tokenizer)]


class SlimeEpisode:
    """One call of the function, with a server of its own for as long as it runs."""

    def __init__(
        self,
        function: Callable[..., Awaitable[Any]],
        settings: SlimeEnvironment,
        loop: OwnLoop,
        copied: Callable[[Any], Any],
    ) -> None:
        self._function = function
        self._settings = settings
        self._loop = loop
        self._copied = copied
        self._server: Loopback | None = None
        self._answers: Callable[[str, Any], Awaitable[Any] | None] | None = None

    async def drive(self, policy: Policy) -> Driven:
        served = SglangPolicy(policy)
        home = asyncio.get_running_loop()

        async def generate(payload: Any) -> Any:
            """The policy, from the function's loop."""
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(served.generate(payload), home))

        self._server = Loopback({"/generate": lambda payload, _: served.generate(payload)})
        port = await self._server.open()
        address = f"http://{HOST}:{port}/generate"
        self._answers = lambda url, payload: generate(payload) if url == address else None
        POSTS.append(self._answers)
        sample = self._sample(policy)
        args = self._args(policy, served, port, generate)
        keywords = {}
        if "evaluation" in inspect.signature(self._function).parameters:
            keywords["evaluation"] = policy.evaluation
        work = self._called(args, sample, served.params(), keywords)
        found = await self._loop.run(work)
        return _driven(args, found, policy)

    async def close(self) -> None:
        if self._answers is not None and self._answers in POSTS:
            POSTS.remove(self._answers)
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    async def _called(self, *arguments: Any) -> Any:
        *given, keywords = arguments
        return await self._function(*given, **keywords)

    def _sample(self, policy: Policy) -> Sample:
        prompt = policy.rendered if self._settings.prompt == "rendered" else policy.prompt
        return Sample(
            group_index=policy.group,
            index=policy.sample_index,
            prompt=prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
            label=policy.answer,
            metadata=metadata_of(policy.row),
            session_id=f"{policy.group}-{policy.sample_index}",
        )

    def _args(self, policy: Policy, served: SglangPolicy, port: int, generate: Any) -> Namespace:
        """What slime's command line would have set, as far as functions look at it."""
        known = {
            "sglang_router_ip": HOST,
            "sglang_router_port": port,
            "generate": generate,
            "tokenizer": self._copied(policy.tokenizer),
            "sampling_params": served.params(),
            "rollout_temperature": policy.temperature,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": policy.max_new_tokens,
            "rollout_max_context_len": policy.context,
            "rollout_stop": list(policy.stop),
            "partial_rollout": False,
            "use_rollout_routing_replay": False,
            "sglang_speculative_algorithm": None,
            "router_policy": None,
            "reward_key": None,
            "group_rm": False,
            "ci_test": False,
        }
        return Namespace(**known | self._settings.arguments)


def _driven(args: Namespace, found: Any, policy: Policy) -> Driven:
    """What a function returned, as the episode that it was."""
    samples = list(found) if isinstance(found, list | tuple) else [found]
    if not samples or not all(hasattr(one, "tokens") and hasattr(one, "loss_mask") for one in samples):
        return Driven(error=f"the function returned {type(found).__name__}, no sample and no list of samples")
    status = str(getattr(samples[-1].status, "value", samples[-1].status))
    if status not in (SampleStatus.COMPLETED.value, SampleStatus.TRUNCATED.value, SampleStatus.PENDING.value):
        return Driven(error=f"the function gave the sample the status {status}")
    kept = [one for one in samples if not one.remove_sample]
    if not kept:
        return Driven(error="the function removed the sample")
    rewards = [one.get_reward_value(args) for one in kept if one.reward is not None]
    return Driven(
        paths=[_path(one) for one in kept],
        finish="length" if status == SampleStatus.TRUNCATED.value else "stop",
        text=str(samples[-1].response),
        reward=None if not rewards else float(rewards[-1]),
    )


def _path(sample: Any) -> Path:
    length = int(sample.response_length)
    tokens = [int(token) for token in sample.tokens]
    if not 0 < length < len(tokens):
        raise ValueError(f"response_length is {length} of {len(tokens)} tokens; there must be a prompt and a response")
    marks = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if len(marks) != length:
        raise ValueError(f"loss_mask has {len(marks)} entries for a response of {length} tokens")
    if any(mark not in (0, 1) for mark in marks):
        raise ValueError("loss_mask holds something else than 0 and 1")
    return Path(tokens, len(tokens) - length, [mark == 1 for mark in marks])
