"""From a request's fields to ``SamplingParams``; the model's own ``generation_config.json`` gives the
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.api.fields import Fields, wrong
from octavo.core.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.errors import InvalidRequest

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's completions; a chat may fill the context


class Defaults(msgspec.Struct, frozen=True):
    """What a request gets that does not say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> Defaults:
        values = {name: generation_config.get(name) for name in cls.__struct_fields__}
        return cls(**{name: value for name, value in values.items() if value is not None})


def sampling_params(fields: Fields, defaults: Defaults, chat: bool) -> SamplingParams:
    """Raises ``InvalidRequest`` naming the field, its value and what is allowed."""
    skip = fields.flag("skip_special_tokens", True)
    if fields.flag("spaces_between_special_tokens", False) and not skip:
        raise InvalidRequest(
            "spaces_between_special_tokens is true: not supported, none are added",
            param="spaces_between_special_tokens",
            code="unsupported_parameter",
        )
    return SamplingParams(
        n=fields.integer("n", 1) or 0,
        temperature=fields.number("temperature", defaults.temperature),
        top_p=fields.number("top_p", defaults.top_p),
        top_k=fields.integer("top_k", defaults.top_k) or 0,
        seed=fields.integer("seed"),
        max_tokens=_max_tokens(fields, defaults, chat),
        stop=fields.stop(),
        stop_token_ids=fields.token_ids("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos", False),
        include_stop_str_in_output=fields.flag("include_stop_str_in_output", False),
        skip_special_tokens=skip,
        logprobs=_chat_logprobs(fields) if chat else fields.integer("logprobs"),
    )


def _max_tokens(fields: Fields, defaults: Defaults, chat: bool) -> int | None:
    if not chat:
        return fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS)
    name = "max_completion_tokens" if fields.body.get("max_completion_tokens") is not None else "max_tokens"
    value = fields.integer(name, defaults.max_new_tokens)
    if value is not None and value < 1:
        raise wrong(name, value, "at least 1")
    return value


def _chat_logprobs(fields: Fields) -> int | None:
    asked = fields.flag("logprobs", False)
    top = fields.integer("top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise wrong("top_logprobs", top, f"between 0 and {MAX_LOGPROBS}")
    if top and not asked:
        raise InvalidRequest(f"top_logprobs is {top}: it needs logprobs true", param="top_logprobs")
    return (top or 0) if asked else None
