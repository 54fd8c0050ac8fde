"""Sends conversations at a rate, or so many at a time, and keeps what became of each request."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.client.bench.tally import Tally, gaps
from octavo.client.bench.traffic import Conversation
from octavo.client.endpoint import Endpoint, EndpointError

CHAT, COMPLETIONS = "/chat/completions", "/completions"
# What makes figures exact, dropped one by one where an endpoint refuses it.
_EXTRAS = {"return_token_ids": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
_COUNTING = {"include_usage": True, "continuous_usage_stats": True}


@dataclasses.dataclass
class Outcome:
    """One request. Times in seconds on the event loop's clock; latencies only of those without ``error``."""

    sent: float
    ended: float = 0.0
    error: str | None = None  # a code
    message: str = ""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = ""
    chunks: Sequence[tuple[float, int]] = ()

    @property
    def ttft(self) -> float:
        return self.chunks[0][0] - self.sent

    @property
    def e2e(self) -> float:
        return self.chunks[-1][0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return gaps(self.chunks)

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after those that came first; None where none came."""
        later = sum(count for _, count in self.chunks[1:])
        return (self.chunks[-1][0] - self.chunks[0][0]) / later if later else None


@dataclasses.dataclass(frozen=True)
class Target:
    """Where requests go, and the fields that all of them have."""

    endpoint: Endpoint
    path: str
    fields: Mapping[str, Any]

    async def ask(self, body: Mapping[str, Any]) -> Outcome:
        clock, tally = asyncio.get_running_loop().time, Tally()
        outcome = Outcome(clock())
        try:
            async for event in self.endpoint.stream(self.path, {**self.fields, **body, "stream": True}):
                tally.add(clock(), event)
        except EndpointError as error:
            outcome.error, outcome.message = error.code, error.message
        outcome.ended = clock()
        outcome.text, outcome.chunks, outcome.counted_by = tally.text, tally.chunks(), tally.counted_by
        outcome.prompt_tokens, outcome.cached_tokens = tally.prompt_tokens, tally.cached_tokens
        outcome.output_tokens = tally.output_tokens
        if outcome.error is None and not outcome.chunks:
            outcome.error, outcome.message = "empty", "the answer held no token"
        return outcome


async def choose_fields(endpoint: Endpoint, path: str, model: str) -> dict[str, Any]:
    """Ask a small question, and learn which of the fields that make figures exact the endpoint takes."""
    said: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
    )
    fields: dict[str, Any] = {"model": model, "temperature": 0, **_EXTRAS}
    optional = set(_EXTRAS)
    while True:
        counted = False
        try:
            async for event in endpoint.stream(path, {**fields, **said, "max_tokens": 4, "stream": True}):
                counted = counted or any(choice.get("token_ids") for choice in event.get("choices") or ())
        except EndpointError as error:
            if error.status not in (400, 422) or not optional:
                return fields
            if fields.get("stream_options") == _COUNTING:
                fields["stream_options"] = _EXTRAS["stream_options"]
                return fields
            told = f"{error.param} {error.message}"
            for name in [name for name in optional if name in told] or list(optional):
                del fields[name]
                optional.remove(name)
            continue
        if counted or fields.get("stream_options") != _EXTRAS["stream_options"]:
            return fields
        fields["stream_options"] = _COUNTING


async def offer(
    target: Target,
    conversations: Sequence[Conversation],
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    seed: int = 1,
    done: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Send all conversations: starts come at random (Poisson) with ``rate`` a second, at most ``concurrency``
    are under way. A turn that fails ends its conversation. ``done`` is called after each request.
    """
    rng, outcomes = random.Random(seed), []
    slots = asyncio.Semaphore(concurrency or len(conversations) or 1)
    clock = asyncio.get_running_loop().time
    start = clock()

    async def talk(conversation: Conversation) -> None:
        answers: list[str] = []
        try:
            while len(answers) < len(conversation.turns):
                outcome = await target.ask(conversation.body(target.path == CHAT, answers))
                outcomes.append(outcome)
                done()
                if outcome.error is not None:
                    return
                answers.append(outcome.text)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        for conversation in conversations:
            if rate is not None:
                start += rng.expovariate(rate)
                await asyncio.sleep(start - clock())
            await slots.acquire()
            tasks.create_task(talk(conversation))
    return outcomes
