"""What the translations of other APIs' requests into chats share: an error names what the client sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.errors import ContextLengthExceeded, InvalidRequest

# Fields of our chats that these APIs do not know; they are taken under the same names.
EXTENSIONS = frozenset([
    "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "structured_outputs", "chat_template_kwargs",
    "cache_salt", "priority", "timeout_s", "truncate_prompt_tokens", "truncation_side",
])  # fmt: skip


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """An API whose requests are chats in other words.

    ``fields`` are all that it knows. ``chat`` makes the body of a chat. ``renamed``: patterns of its fields,
    and what they are called here.
    """

    fields: frozenset[str]
    chat: Callable[[dict[str, Any]], dict[str, Any]]
    renamed: tuple[tuple[str, str], ...]

    def as_asked(self, error: InvalidRequest) -> InvalidRequest:
        """What is said of a field of the chat, said of the field that the client sent.

        What is too long is the prompt in every API: clients know that error by its words.
        """
        for pattern, name in self.renamed:
            if error.param is not None and re.match(rf"(?:{pattern})(?=[.\[]|$)", error.param):
                whole = re.compile(rf"(?<![\w.])(?:{pattern})(?!\w)")
                param, message = whole.sub(name, error.param), whole.sub(name, error.message)
                if isinstance(error, ContextLengthExceeded) and error.param in ("prompt", "messages"):
                    message = error.message
                return type(error)(message, param=param, code=error.code)
        return error


def wrong(where: str, value: Any, allowed: str) -> InvalidRequest:
    """The error for a field that holds something else than ``allowed``."""
    return InvalidRequest(f"{where} is {value!r:.100}: it must be {allowed}", param=where)


def unsupported(where: str, value: Any, allowed: str) -> InvalidRequest:
    """As ``wrong``, of what others may support."""
    message = f"{where} is {value!r:.100}: not supported; {allowed}"
    return InvalidRequest(message, param=where, code="unsupported_parameter")


def refuse_off(body: dict[str, Any], off: dict[str, tuple[Any, ...]]) -> None:
    """Raise ``InvalidRequest`` for a field that asks for something not supported."""
    for name, allowed in off.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            other = f", or give {allowed[0]!r}" if allowed else ""
            raise unsupported(name, value, f"leave it out{other}")


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects with a string ``type`` or none."""
    if not isinstance(value, list):
        raise wrong(where, value, "a list of objects")
    for index, one in enumerate(value):
        if not isinstance(one, dict):
            raise wrong(f"{where}[{index}]", one, "an object")
    return value


def string(holder: dict[str, Any], name: str, where: str) -> str:
    """The string ``holder[name]``, which must be there."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", value, "a string")
    return value


def parts(value: Any, where: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Text parts of a content: a string, or a list of parts of these ``kinds`` or refusals."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong(where, value, "a string or a list of parts")
    texts = []
    for index, part in enumerate(objects(value, where)):
        here, kind = f"{where}[{index}]", part.get("type")
        if kind == "refusal":
            texts.append(string(part, "refusal", here))
        elif kind in kinds:
            texts.append(string(part, "text", here))
        else:
            raise unsupported(f"{here}.type", kind, f"this model reads parts of type {', '.join(kinds)}")
    return [{"type": "text", "text": text} for text in texts]


def content(texts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as the content of a message: one alone is a string."""
    if len(texts) > 1:
        return texts
    return str(texts[0]["text"]) if texts else ""
