"""The fields of a request: which are known, which are supported, and how each is read.

A known field that is not supported may only hold a value that means "off"; a name nobody knows is ignored and
counted. Names and meanings are OpenAI's, and vLLM's where OpenAI is silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.errors import InvalidRequest

MAX_STOP_STRINGS = 4  # as OpenAI

_OFF: dict[str, tuple[Any, ...]] = {
    "kv_transfer_params": (),
    "logprob_token_ids": ([],),
    "stop_regex": (),
    "thinking_token_budget": (-1,),
    # Older names of structured_outputs, and other servers': an answer in any form is not what they ask.
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"), ()),
}
_OFF_CHAT: dict[str, tuple[Any, ...]] = {
    **_OFF,
    "modalities": (["text"],),
    "audio": (),
}
_OFF_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_OFF,
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
    "include_reasoning": (True,),
    "reasoning_effort": (),
}
_SAMPLING = [
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "max_tokens", "min_tokens",
    "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "logprobs", "prompt_logprobs", "use_beam_search", "length_penalty",
    "early_stopping", "structured_outputs", "response_format",
]  # fmt: skip
_COMMON = [
    "model", "stream", "stream_options", "cache_salt", "priority", "timeout_s", "truncate_prompt_tokens",
    "truncation_side", "request_id", "user", "return_token_ids", "return_tokens_as_token_ids",
]  # fmt: skip
_CHAT = [
    "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "documents", "tools", "tool_choice", "parallel_tool_calls",
    "functions", "function_call", "include_reasoning", "reasoning_effort", "echo",
]  # fmt: skip
_COMPLETION = ["prompt", "add_special_tokens", "echo"]
REFUSED_FIELDS = frozenset([*_OFF_CHAT, *_OFF_COMPLETION]).difference(
    _CHAT, _COMPLETION
)  # unless they say "off"
CHAT_FIELDS = frozenset([*_SAMPLING, *_COMMON, *_CHAT, *_OFF_CHAT])
COMPLETION_FIELDS = frozenset([*_SAMPLING, *_COMMON, *_COMPLETION, *_OFF_COMPLETION])


class Fields:
    """Typed reading of a JSON object. Each method returns the default for a missing field or null, and raises
    ``InvalidRequest`` with the field's name, its value and what is allowed.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def flag(self, name: str, default: bool) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():  # some languages know one kind of number
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise wrong(name, value, "a number")
        return value

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, value, "a string")
        return value

    def stop(self) -> tuple[str, ...]:
        value = self.body.get("stop")
        if value is None:
            return ()
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
            raise wrong("stop", value, "a string or a list of strings")
        if len(strings) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop holds {len(strings)} strings: at most {MAX_STOP_STRINGS}", param="stop"
            )
        if not all(strings):
            raise wrong("stop", value, "non-empty strings")
        return tuple(strings)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.body.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
            raise wrong(name, value, "a list of non-empty strings")
        return tuple(value)

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.body.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, value, "an object")
        return value

    def logit_bias(self) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in (self.object("logit_bias") or {}).items():
            token = key.isascii() and key.isdigit() and len(key) <= len(str(2**31))
            if not token or not isinstance(value, (int, float)) or isinstance(value, bool):
                raise wrong("logit_bias", {key: value}, "an object of token ids of this model and numbers")
            bias[int(key)] = value
        return bias

    def token_ids(self, name: str, *, empty: bool = True) -> tuple[int, ...]:
        value = self.body.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not (value or empty):
            raise wrong(name, value, "a list of token ids" if empty else "a list of at least one token id")
        for token in value:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
                raise wrong(name, token, "a list of token ids of this model")
        return tuple(value)


def wrong(name: str, value: Any, allowed: str) -> InvalidRequest:
    """The error for a field of the wrong type or out of range."""
    return InvalidRequest(f"{name} is {value!r:.100}: it must be {allowed}", param=name)


def refuse_unsupported(body: Mapping[str, Any], chat: bool) -> None:
    """Raise ``InvalidRequest`` for a known field that asks for something not supported."""
    for name, off in (_OFF_CHAT if chat else _OFF_COMPLETION).items():
        value = body.get(name)
        if value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in off
        ):
            continue
        allowed = f" or give {off[0]!r}" if off else ""
        raise InvalidRequest(
            f"{name} is {value!r:.100}: not supported yet; leave it out{allowed}",
            param=name,
            code="unsupported_parameter",
        )


def unknown_names(body: Iterable[str], chat: bool) -> list[str]:
    """Names in the body that mean nothing here."""
    return [name for name in body if name not in (CHAT_FIELDS if chat else COMPLETION_FIELDS)]
