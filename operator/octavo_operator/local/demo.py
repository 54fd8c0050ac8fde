"""What `octavo up` shows once it serves: how to call it, and one question answered through the router."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from octavo.errors import Unavailable

QUESTION = "What is the capital of France? Answer in one sentence."
MAX_TOKENS = 64
ANSWER_TIMEOUT_S = 300  # a large model on few cores


@dataclasses.dataclass(frozen=True)
class Answer:
    """One streamed answer; times in seconds since the request was sent."""

    text: str
    tokens: int
    first_token_s: float
    total_s: float

    def summary(self) -> str:
        line = f"time to first token {self.first_token_s * 1000:.0f} ms; {self.tokens} tokens"
        if self.tokens > 1 and self.total_s > self.first_token_s:
            line += f", {(self.tokens - 1) / (self.total_s - self.first_token_s):.1f} tokens/s after it"
        return line


def how_to_call(url: str, model: str, key: str | None) -> str:
    """The endpoint, the model and two lines to paste into a shell."""
    quoted = json.dumps  # in double quotes, so that the shell's single quotes can hold it
    messages = [{"role": "user", "content": "Hello!"}]
    authorization = f" -H {shlex.quote(f'Authorization: Bearer {key}')}" if key else ""
    curl = (
        f"curl {url}/chat/completions -H 'Content-Type: application/json'{authorization} "
        f"-d {shlex.quote(json.dumps({'model': model, 'messages': messages}))}"
    )
    python = (
        "from openai import OpenAI; "
        f"client = OpenAI(base_url={quoted(url)}, api_key={quoted(key or 'none')}); "
        f"answer = client.chat.completions.create(model={quoted(model)}, messages={quoted(messages)}); "
        "print(answer.choices[0].message.content)"
    )
    return f"endpoint: {url}\nmodel:    {model}\n\n{curl}\n\npython -c {shlex.quote(python)}"


async def ask(url: str, model: str, key: str | None, write: Callable[[str], None]) -> Answer:
    """Send one streaming chat request; ``write`` gets each piece as it comes. Raises ``Unavailable``."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    text, tokens, first_s, sent = "", 0, 0.0, time.monotonic()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{url}/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                raise Unavailable(f"the first request got status {response.status}: {await response.text()}")
            async for event in _events(response):
                if "error" in event:
                    raise Unavailable(
                        f"the first request failed: {event['error'].get('message', event['error'])}"
                    )
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first_s = first_s or time.monotonic() - sent
                        text += piece
                        write(piece)
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"the first request failed: {error or type(error).__name__}") from error
    return Answer(text, tokens, first_s, time.monotonic() - sent)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to ``[DONE]``."""
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(data)
