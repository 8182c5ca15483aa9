"""Generate and reward functions as slime's users write them; a recipe names them as `tiny_slime:NAME`."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from slime.rollout.sglang_rollout import GenerateState  # type: ignore[import-not-found]
from slime.utils.http_utils import post  # type: ignore[import-not-found]
from slime.utils.types import Sample  # type: ignore[import-not-found]


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """In the manner of slime's examples with tools: a turn, something said by hand, and another turn."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids: list[int] = []
    mask: list[int] = []
    response = ""
    for turn in range(2):
        payload = {
            "input_ids": prompt_ids + ids,
            "sampling_params": {**sampling_params, "max_new_tokens": 3},
            "return_logprob": True,
        }
        output = await post(url, payload)
        new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        ids += new
        mask += [1] * len(new)
        response += output["text"]
        if output["meta_info"]["finish_reason"]["type"] == "length" and turn == 1:
            sample.status = Sample.Status.TRUNCATED
            break
        if turn == 0:
            said = state.tokenizer(args.says, add_special_tokens=False)["input_ids"]
            ids += said
            mask += [0] * len(said)
            response += args.says
    else:
        sample.status = Sample.Status.COMPLETED
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = mask
    sample.reward = response.count("1") / 4
    return sample


def _over_http(url: str, payload: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


async def by_text(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Posts texts, over a real connection and blocking its loop; takes the ids that come back."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids, mask, text = [], [], sample.prompt
    for _ in range(2):
        payload = {"text": text, "sampling_params": {**sampling_params, "max_new_tokens": 2}, "return_logprob": True}
        output = _over_http(url, payload)
        ids += output["output_ids"]
        mask += [1] * len(output["output_ids"])
        text += output["text"]
    prompt_ids = args.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.response_length, sample.loss_mask = prompt_ids + ids, len(ids), mask
    sample.response, sample.status = text[len(sample.prompt) :], Sample.Status.COMPLETED
    sample.metadata["evaluation"] = evaluation
    sample.reward = sample.response.count("1") / 4
    return sample


async def retokenised(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A mistake: it trains tokens that nobody sampled."""
    sample = await two_turns(args, sample, sampling_params)
    sample.tokens[-1] = (sample.tokens[-1] + 1) % 8 + 3
    return sample


async def too_hot(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    return await two_turns(args, sample, {**sampling_params, "top_p": 0.5})


async def raises(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    raise KeyError("search")


async def dawdles(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    await asyncio.sleep(args.pause)
    return await two_turns(args, sample, sampling_params)


async def fails(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample = await two_turns(args, sample, sampling_params)
    sample.status = Sample.Status.FAILED
    return sample


async def branches(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two samples that go on behind one turn in two ways."""
    prompt_ids = args.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    params = {**sampling_params, "max_new_tokens": 2}
    first = (await args.generate({"input_ids": prompt_ids, "sampling_params": params}))["output_ids"]
    found = []
    for said in ("1", "2"):
        between = args.tokenizer(said, add_special_tokens=False)["input_ids"]
        before = prompt_ids + first + between
        second = (await args.generate({"input_ids": before, "sampling_params": params}))["output_ids"]
        one = Sample(tokens=before + second, response_length=len(first + between + second), response=said)
        one.loss_mask = [1] * len(first) + [0] * len(between) + [1] * len(second)
        one.status, one.reward = Sample.Status.COMPLETED, 1.0
        found.append(one)
    return found


async def ones(args: Any, sample: Any) -> float:
    return getattr(args, "scale", 1.0) * sample.response.count("1") / 4


def twos(args: Any, sample: Any) -> float:
    return sample.response.count("2") / 4


async def parts(args: Any, sample: Any) -> dict[str, float]:
    return {"ones": sample.response.count("1") / 4, "twos": sample.response.count("2") / 4}


async def either(args: Any, given: Any) -> Any:
    """Of a group, what is worth less the more there are."""
    if isinstance(given, list):
        return [sample.response.count("1") / len(given) for sample in given]
    return given.response.count("1") / 2
