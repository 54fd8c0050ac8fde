"""What the terminal commands share: sampling flags, one streamed answer, and what they print of it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, TextIO

from octavo import values
from octavo.client.endpoint import Endpoint, EndpointError
from octavo.errors import ConfigError

_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    for name, kind in _NUMBERS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="default: the endpoint's")
    parser.add_argument("--stop", action="append", help="text that ends the answer; repeat for several")
    parser.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="other fields of the request"
    )
    parser.add_argument("--stats", action="store_true", help="say how many tokens were cached, and the speed")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that the flags give."""
    given = {name: getattr(args, name) for name in (*_NUMBERS, "stop")}
    return {**{name: value for name, value in given.items() if value is not None}, **args.extra_body}


def json_object(text: str) -> dict[str, Any]:
    """What ``--extra-body`` holds."""
    try:
        return values.json_object(text)
    except ConfigError as error:
        raise ConfigError(f"extra-body: {error.message}") from error


class Answer:
    """One streamed answer. ``pieces`` yields its text; afterwards, and meanwhile, ``text`` and figures."""

    def __init__(self, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> None:
        self._endpoint, self._path = endpoint, path
        self._body = {"stream_options": {"include_usage": True}, **body, "stream": True}
        self.text = ""
        self.usage: dict[str, Any] = {}
        self._first_s = self._last_s = self._sent_s = 0.0

    async def pieces(self) -> AsyncIterator[tuple[str, bool]]:
        """Text as it comes, and whether it is reasoning, which ``text`` leaves out."""
        clock = asyncio.get_running_loop().time
        self._sent_s = clock()
        async for event in self._endpoint.stream(self._path, self._body):
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices") or ():
                for piece, reasoning in _texts(choice):
                    self._last_s = clock()
                    self._first_s = self._first_s or self._last_s
                    self.text += "" if reasoning else piece
                    yield piece, reasoning

    def figures(self) -> str:
        """One line: tokens, cached ones, time to the first, speed after it."""
        prompt, made = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        if prompt is None or made is None:
            return "no usage in the answer"
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        line = f"prompt {prompt} tokens, {cached} of them cached; answer {made} tokens"
        if self._first_s:
            line += f"; first after {1000 * (self._first_s - self._sent_s):.0f} ms"
        if made > 1 and self._last_s > self._first_s:
            line += f", then {(made - 1) / (self._last_s - self._first_s):.1f} tokens/s"
        return line


def _texts(choice: Mapping[str, Any]) -> list[tuple[str, bool]]:
    delta = choice.get("delta") or choice
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    said = delta.get("content") or delta.get("text")
    return [
        (text, which) for text, which in ((reasoning, True), (said, False)) if isinstance(text, str) and text
    ]


class Screen:
    """Where an answer goes. On a terminal, control characters that a model writes are shown, never obeyed."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self.terminal = self._out.isatty()
        self._dim = False

    def write(self, text: str, dim: bool = False) -> None:
        if self.terminal:
            text = "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
            if dim != self._dim:
                self._out.write("\x1b[2m" if dim else "\x1b[0m\n")
                self._dim = dim
        self._out.write(text)
        self._out.flush()

    async def show(self, answer: Answer) -> None:
        """Write an answer as it comes. Off a terminal reasoning is left out."""
        begun = False
        try:
            async for piece, reasoning in answer.pieces():
                if self.terminal or not reasoning:
                    self.write(piece, reasoning)
                    begun = True
        finally:
            if begun:
                self.write("\n")


def say(error: EndpointError) -> None:
    print(f"octavo: {error.message}", file=sys.stderr)
