"""The policy as SGLang's `/generate` answers: the same JSON in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.environments.driven import Policy, Sampled, refuse_other_sampling

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (-1, 0, None, 1 << 30),
    "min_p": (0, None),
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "min_new_tokens": (0, None),
    "n": (1, None),
    "ignore_eos": (False, None),
    "stop_token_ids": (None, []),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
}
"""Parameters that would change what is sampled, with the values at which they do not: scoring knows none of them."""
_HARMLESS = (
    "max_new_tokens",
    "stop",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "sampling_seed",
)


class SglangPolicy:
    """Answers the requests of one episode.

    A request with a `text` goes on behind the tokens that were sampled, where the text begins as prompt and completion
    of an earlier request did: only the rest is tokenised.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: list[tuple[str, list[int]]] = [(policy.rendered, list(policy.tokens))]

    def params(self) -> dict[str, Any]:
        """The sampling parameters that a function is given."""
        return {
            "temperature": self._policy.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": self._policy.max_new_tokens,
            "stop": list(self._policy.stop),
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """One request: `input_ids` or `text`, `sampling_params`, `return_logprob`.

        Raises:
            ValueError: it asks for what is not sampled here.
        """
        wanted = dict(payload.get("sampling_params") or {})
        stop = self._checked(payload, wanted)
        if payload.get("input_ids") is not None:
            tokens = [int(token) for token in payload["input_ids"]]
        elif isinstance(payload.get("text"), str):
            tokens = self._tokenised(payload["text"])
        else:
            raise ValueError("give `input_ids`, or `text`, of one sequence")
        found = await self._policy.sample(tokens, max_new_tokens=wanted.get("max_new_tokens"), stop=stop)
        if isinstance(payload.get("text"), str):
            self._known.append((payload["text"] + self._text(found, {}, ()), [*tokens, *found.tokens]))
        return self._answer(payload, wanted, stop, tokens, found)

    def _checked(self, payload: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
        """The texts at which to stop; refuses what would change the distribution."""
        refuse_other_sampling(self._policy, wanted, _NEUTRAL)
        unknown = [name for name in wanted if name not in ("temperature", *_NEUTRAL, *_HARMLESS)]
        if unknown:
            raise ValueError(f"the sampling parameter {unknown[0]!r} is not known here")
        if payload.get("stream"):
            raise ValueError("answers are not streamed here")
        stop = wanted.get("stop") or []
        return [stop] if isinstance(stop, str) else list(stop)

    def _tokenised(self, text: str) -> list[int]:
        # Of equal texts the latest: what was sampled may have no text, as the token that ends a turn.
        known, tokens = max(
            ((begin, ids) for begin, ids in reversed(self._known) if begin and text.startswith(begin)),
            key=lambda one: len(one[0]),
            default=("", []),
        )
        rest = text[len(known) :]
        if not rest:
            return list(tokens)
        return [*tokens, *self._policy.tokenizer(rest, add_special_tokens=False)["input_ids"]]

    def _text(self, found: Sampled, wanted: Mapping[str, Any], stop: tuple[str, ...]) -> str:
        skip = bool(wanted.get("skip_special_tokens", True))
        text = found.text if skip else str(self._policy.tokenizer.decode(found.tokens, skip_special_tokens=False))
        ends = [text.find(one) for one in stop if one in text]
        return text[: min(ends)] if ends and not wanted.get("no_stop_trim") else text

    def _answer(
        self,
        payload: Mapping[str, Any],
        wanted: Mapping[str, Any],
        stop: list[str],
        tokens: list[int],
        found: Sampled,
    ) -> dict[str, Any]:
        reasons: dict[str, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": found.tokens[-1] if found.tokens else None},
            "length": {"type": "length", "length": len(found.tokens)},
            "aborted": {"type": "abort", "message": "the request was aborted"},
        }
        information = {
            "id": f"{self._policy.group}-{self._policy.sample_index}-{len(tokens)}",
            "finish_reason": reasons[found.finish],
            "prompt_tokens": len(tokens),
            "completion_tokens": len(found.tokens),
            "cached_tokens": 0,
            "weight_version": str(found.versions[-1]) if found.versions else "default",
        }
        if payload.get("return_logprob"):
            information["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(found.logprobs, found.tokens, strict=True)
            ]
        text = self._text(found, wanted, (*stop, *self._policy.stop))
        return {"text": text, "output_ids": list(found.tokens), "meta_info": information}
