"""One client request on its way through the engine: its choices, their text, its usage.

Whoever holds a ``Generation`` owns its engine requests: closing it, at whatever point, frees what they hold.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import msgspec

from octavo.api.errors import error_of
from octavo.api.metrics import Metrics
from octavo.core.admission import check_deadline, check_queue
from octavo.core.outputs import EngineOutput, EngineRequest, FinishReason, RequestTimes
from octavo.core.plan import TokenLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import EngineClient
from octavo.engine.messages import Ready
from octavo.engine.stream import OutputStream
from octavo.errors import InvalidRequest
from octavo.prompt.engine_params import engine_params
from octavo.prompt.renderer import PromptRenderer
from octavo.prompt.text_stream import TextDelta, TextStream
from octavo.prompt.tools.parser import Event
from octavo.prompt.tools.reading import OutputReading

ANSWER_WITHIN_S = 0.25  # how long the engine may take to refuse; after that a stream's headers go out


class Delta(msgspec.Struct, frozen=True):
    """What is new of one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | Literal["tool_calls", "function_call"] | None = None
    stop_reason: int | str | None = None
    events: list[Event] | None = None  # what the text is, where it is more than content
    event_ends: Sequence[int] = ()  # how many of the events there were after each token


class _Sequence:
    """One engine request and the choices that show it (several, when greedy choices would all be equal)."""

    def __init__(
        self,
        request: EngineRequest,
        choices: list[int],
        renderer: PromptRenderer,
        sampling: SamplingParams,
        reading: OutputReading | None,
    ) -> None:
        self.request = request
        self.choices = choices
        self.text = TextStream(
            renderer, request.prompt_token_ids, sampling, reading.shown if reading is not None else ()
        )
        self.parser = reading.parser() if reading is not None else None
        self.reasoning_tokens = 0
        self.num_tokens = 0
        self.cached_tokens = 0
        self.last_time = 0.0
        self.times: RequestTimes | None = None  # the engine's, with its first output and its last
        self.finish_reason: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def read(self, output: EngineOutput) -> tuple[TextDelta, list[Event] | None, list[int]]:
        """The text of an output, what it is, and how many of these events there were after each token."""
        if self.parser is None:
            return self.text.push(output.token_ids, output.finish_reason, output.stop_reason), None, []
        events: list[Event] = []
        ends: list[int] = []
        texts: list[str] = []
        counted = 0
        delta = TextDelta("", 0)
        ids = output.token_ids
        for start in range(max(1, len(ids))):  # one by one, since each counts as reasoning or does not
            ended = (output.finish_reason, output.stop_reason) if start >= len(ids) - 1 else ()
            thinking = self.parser.in_reasoning
            delta = self.text.push(ids[start : start + 1], *ended)
            events += self.parser.push(delta.text)
            self.reasoning_tokens += delta.num_tokens if thinking and self.parser.in_reasoning else 0
            texts.append(delta.text)
            counted += delta.num_tokens
            if delta.finish_reason is not None:
                events += self.parser.finish()
                ends.append(len(events))
                break
            ends.append(len(events))
        return msgspec.structs.replace(delta, text="".join(texts), num_tokens=counted), events, ends


class Generation:
    """Prompts x n choices; choice ``p * n + i`` is sample ``i`` of prompt ``p``."""

    def __init__(
        self,
        engine: EngineClient,
        info: Ready,
        renderer: PromptRenderer,
        metrics: Metrics,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        max_queue: int,
        max_queue_tokens: int,
        max_running: int,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        reading: OutputReading | None = None,
        prompt_only: bool = False,
    ) -> None:
        """``prompt_only``: what is drawn is not shown."""
        self._prompt_only = prompt_only
        self._engine = engine
        self._metrics = metrics
        self.sampling = sampling
        self.prompts = prompts
        self.num_choices = len(prompts) * sampling.n
        samples = 1 if sampling.greedy else sampling.n
        if len(prompts) * samples > max_queue:
            asked = f"{len(prompts) * samples} sequences ({len(prompts)} prompts x n {samples})"
            raise InvalidRequest(
                f"the request asks for {asked}: at most {max_queue} fit the queue",
                param="n" if samples > len(prompts) else "prompt",
            )
        self._max_queue, self._max_queue_tokens, self._seats = max_queue, max_queue_tokens, max_running
        self._deadline = deadline
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        self._arrival = time.time()
        name = uuid.uuid4().hex
        self._stream: OutputStream | None = None
        self._first: asyncio.Future[EngineOutput]
        self._sequences: dict[str, _Sequence] = {}
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in prompts]
        for p, prompt in enumerate(prompts):
            most = _max_tokens(sampling, prompt, info)
            alone = engine_params(sampling, renderer, seed=seed, max_tokens=most)
            for sample in range(samples):
                request = EngineRequest(
                    request_id=f"{name}-{p}-{sample}",
                    prompt_token_ids=prompt,
                    sampling=alone,
                    sample_index=sample,
                    group=f"{name}-{p}" if samples > 1 else None,
                    cache_salt=cache_salt,
                    priority=priority,
                    deadline=deadline,
                    arrival_time=self._arrival,
                )
                first = p * sampling.n
                choices = list(range(first, first + sampling.n)) if samples < sampling.n else [first + sample]
                self._sequences[request.request_id] = _Sequence(request, choices, renderer, sampling, reading)

    async def start(self, *, answer_first: bool) -> None:
        """Hand the requests to the engine.

        With ``answer_first`` it also waits, a moment, for what the engine says first, so that a refusal still
        gets a status of its own. Raises ``InvalidRequest``, ``QueueFull``, ``DeadlineExceeded`` or
        ``Unavailable``.
        """
        requests = [sequence.request for sequence in self._sequences.values()]
        self._check_room()
        self._stream = self._engine.submit(requests)
        self._metrics.started(requests, self.sampling)
        self._first = asyncio.ensure_future(anext(self._stream))
        if answer_first:
            await asyncio.wait({self._first}, timeout=ANSWER_WITHIN_S)
            if self._first.done() and (error := self._first.exception()) is not None:
                await self.close()
                raise error

    def _check_room(self) -> None:
        """What the scheduler would say as well, by the load after its last step."""
        tokens, rate = self._engine.stats.waiting_tokens, self._engine.stats.prefill_tokens_per_s
        check_deadline(self._deadline, now=time.time(), tokens=tokens, rate=rate)
        check_queue(
            max_queue=self._max_queue,
            max_queue_tokens=self._max_queue_tokens,
            waiting=self._engine.in_flight_everywhere,
            seats=self._seats,
            tokens=tokens,
            new_tokens=sum(map(len, self.prompts)),
            rate=rate,
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, until every choice has ended. Raises ``InternalFault``, ``InvalidRequest`` (its
        settings contradict each other) or ``Unavailable`` when one failed.
        """
        assert self._stream is not None
        left = len(self._sequences)
        output = await self._first
        while True:
            sequence = self._sequences[output.request_id]
            if not sequence.finished:
                for delta in self._take(sequence, output):
                    yield delta
                left -= sequence.finished
            if not left:
                return
            output = await anext(self._stream)

    def abort(self) -> bool:
        """End what runs; the reader gets what there is, and finish reason "abort". False if all had ended."""
        running = [name for name, one in self._sequences.items() if not one.finished]
        self._engine.abort(running)
        return bool(running)

    async def close(self) -> None:
        """Abort what has not ended. Must be called, however the request ends."""
        if self._stream is None:
            return
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._stream.aclose()
        for sequence in self._sequences.values():
            if not sequence.finished:
                sequence.finish_reason = "abort"
                self._metrics.finished("abort")

    def _take(self, sequence: _Sequence, output: EngineOutput) -> list[Delta]:
        if output.finish_reason == "error":
            sequence.finish_reason = "error"
            self._metrics.finished("error")
            if not output.refused:
                self._metrics.internal_errors.inc()
            raise error_of(output)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[sequence.choices[0] // self.sampling.n] = output.prompt_logprobs
        now = time.time()
        delta, events, ends = sequence.read(output)
        if self._prompt_only:
            delta = TextDelta("", 0, delta.finish_reason and "length")
        counted = output.token_ids[: delta.num_tokens]
        self._metrics.tokens(
            now - (sequence.last_time or self._arrival), len(counted), not sequence.num_tokens
        )
        sequence.num_tokens += len(counted)
        sequence.last_time = now
        sequence.times = output.times or sequence.times
        sequence.cached_tokens = max(sequence.cached_tokens, output.num_cached_tokens)
        if delta.finish_reason is not None:
            sequence.finish_reason = delta.finish_reason
            self._metrics.finished(delta.finish_reason)
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._engine.abort([output.request_id])
                if sequence.times is not None:
                    sequence.times = msgspec.structs.replace(sequence.times, finished=now)
            self._metrics.sequence(now - self._arrival, sequence.num_tokens, sequence.times)
        logprobs = None if output.logprobs is None else output.logprobs[: delta.num_tokens]
        called = delta.finish_reason == "stop" and sequence.parser is not None and sequence.parser.completed
        reason = "tool_calls" if called else delta.finish_reason
        shown = (delta.text, counted, logprobs, reason, delta.stop_reason, events, ends)
        return [Delta(choice, *shown) for choice in sequence.choices]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the cache held."""
        return sum(one.cached_tokens for one in self._sequences.values() if not one.request.sample_index)

    @property
    def times(self) -> RequestTimes | None:
        """Of the first sequence that was scheduled."""
        return next((one.times for one in self._sequences.values() if one.times is not None), None)

    def summary(self) -> dict[str, Any]:
        """What the access log tells: tokens, and how long the first sequence waited to be scheduled."""
        sequences = list(self._sequences.values())
        times = self.times
        reasons = {one.finish_reason for one in sequences if one.finish_reason is not None}
        return {
            "prompt_tokens": sum(map(len, self.prompts)),
            "completion_tokens": sum(one.num_tokens for one in sequences),
            "cached_tokens": self.cached_tokens,
            "queue_s": round(times.scheduled - times.arrival, 4) if times is not None else None,
            "finish_reasons": sorted(reasons),
        }

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``; a prompt counts once, however many samples it has."""
        prompt_tokens = sum(map(len, self.prompts))
        completion = sum(one.num_tokens * len(one.choices) for one in self._sequences.values())
        reasoning = sum(one.reasoning_tokens * len(one.choices) for one in self._sequences.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def _max_tokens(sampling: SamplingParams, prompt: list[int], info: Ready) -> int:
    """What was asked for, else all that fits beside the prompt (at least 1: the engine says what does not
    fit).
    """
    if sampling.max_tokens is not None:
        return sampling.max_tokens
    longest = info.limits.capacity + 1  # the last token drawn is never stored
    return max(1, min(info.max_model_len, longest) - len(prompt))
