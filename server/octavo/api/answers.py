"""The shape of answers: whole ones and the chunks of streams, of chats and of completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from octavo.api.generation import Delta
from octavo.api.logprobs import CompletionLogprobs, chat_logprobs, joined, prompt_logprobs
from octavo.api.requests import ParsedRequest
from octavo.api.turn import Turn, delta_of
from octavo.core.plan import TokenLogprobs
from octavo.prompt.tools.parser import Content, Event, Reasoning


class _Choice:
    """What was said so far of one choice; for whole answers."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.turn = Turn()
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class _Answer(ABC):
    """Common to both kinds: an answer is built from deltas, either all at once or chunk by chunk."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, request: ParsedRequest, name: str, created: int) -> None:
        self._request = request
        self._head = {"id": f"{self.prefix}-{name}", "created": created, "model": request.model}
        self._choices = [_Choice() for _ in range(len(request.prompts) * request.sampling.n)]
        self._first_shown: set[int] = set()
        self.prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()  # for each prompt, once they are known

    def add(self, delta: Delta) -> None:
        """Take a delta into the whole answer."""
        choice = self._choices[delta.index]
        choice.text.append(delta.text)
        choice.turn.add(self._events(delta))
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs.append(self._logprobs(delta))
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """The chunk of a delta; None when there is nothing to show yet (text held back)."""
        said = self._text_of(delta)
        shows = any(said.values()) or delta.logprobs is not None or delta.finish_reason is not None
        if not shows and not self._request.return_token_ids:
            return None
        logprobs = None if delta.logprobs is None else self._logprobs(delta)
        choice: dict[str, Any] = {
            "index": delta.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.index not in self._first_shown and not self._request.chat:
                self._first_shown.add(delta.index)
                choice["prompt_token_ids"] = self._prompt_of(delta.index)
        return self._chunk([choice])

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Chunks that go out before any token."""
        return iter(())

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, when usage was asked for."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def _prompt_of(self, index: int) -> list[int]:
        return self._request.prompts[index // self._request.sampling.n]

    def _prompt_logprobs_of(self, index: int) -> list[dict[str, Any] | None]:
        request, number = self._request, self._request.prompt_logprobs or 0
        logprobs = self.prompt_logprobs[index // request.sampling.n]
        return prompt_logprobs(
            request.renderer, self._prompt_of(index), logprobs, number, request.tokens_as_ids
        )

    def _end(self, index: int, choice: _Choice) -> dict[str, Any]:
        end: dict[str, Any] = {
            "index": index,
            "logprobs": joined(choice.logprobs) if self._request.sampling.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.return_token_ids:
            end["token_ids"] = choice.token_ids
        return end

    def _events(self, delta: Delta) -> list[Event]:
        """What a delta is, without the reasoning where that is not wanted."""
        if delta.events is None:
            return [Content(delta.text)]
        wanted = self._request.include_reasoning
        return [event for event in delta.events if wanted or not isinstance(event, Reasoning)]

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _text_of(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]: ...


class CompletionAnswer(_Answer):
    """``text_completion`` objects."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: ParsedRequest, name: str, created: int) -> None:
        super().__init__(request, name, created)
        self._builders = [CompletionLogprobs(request.renderer, request.tokens_as_ids) for _ in self._choices]
        self._to_echo = set(range(len(self._choices))) if request.echo else set()

    def add(self, delta: Delta) -> None:
        super().add(self._echoed(delta))
        self._to_echo.discard(delta.index)

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        chunk = super().chunk(self._echoed(delta))
        self._to_echo.discard(delta.index)
        return chunk

    def _echoed(self, delta: Delta) -> Delta:
        """The first delta of a choice begins with the prompt, where that is to be shown."""
        if delta.index not in self._to_echo:
            return delta
        prompt = self._request.echoed(delta.index // self._request.sampling.n)
        return msgspec.structs.replace(delta, text=prompt + delta.text)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert delta.logprobs is not None
        index, builder = delta.index, self._builders[delta.index]
        if index not in self._to_echo:
            return builder.chunk(delta.token_ids, delta.logprobs)
        scores = self.prompt_logprobs[index // self._request.sampling.n]
        before = builder.prompt(self._prompt_of(index), scores, self._request.sampling.logprobs or 0)
        return joined([before, builder.chunk(delta.token_ids, delta.logprobs)])

    def _text_of(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        whole = {"text": "".join(choice.text), **self._end(index, choice)}
        if self._request.return_token_ids:
            whole["prompt_token_ids"] = self._prompt_of(index)
        if self._request.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs_of(index)
        return whole


class ChatAnswer(_Answer):
    """``chat.completion`` objects and ``chat.completion.chunk`` ones, the first of which carries the role."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ParsedRequest, name: str, created: int) -> None:
        super().__init__(request, name, created)
        self._echo = request.echoed(0)
        for choice in self._choices:
            choice.turn.add([Content(self._echo)])

    def add(self, delta: Delta) -> None:
        super().add(self._ended(delta))

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        return super().chunk(self._ended(delta))

    def _ended(self, delta: Delta) -> Delta:
        """A call of a function is the end of the older form."""
        if not self._request.functions or delta.finish_reason != "tool_calls":
            return delta
        return msgspec.structs.replace(delta, finish_reason="function_call")

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._choices)):
            chunk = self._unfinished(index, {"role": "assistant", "content": ""})
            if self._request.return_token_ids:
                chunk["prompt_token_ids"] = self._request.prompts[0]
            yield chunk
            if self._echo:
                yield self._unfinished(index, {"content": self._echo})

    def _unfinished(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        whole = super().whole(usage)
        if self._request.return_token_ids:
            whole["prompt_token_ids"] = self._request.prompts[0]
        if self._request.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs_of(0)
        return whole

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        assert delta.logprobs is not None
        renderer, as_ids = self._request.renderer, self._request.tokens_as_ids
        return chat_logprobs(renderer, delta.token_ids, delta.logprobs, as_ids)

    def _text_of(self, delta: Delta) -> dict[str, Any]:
        if delta.events is None:
            return {"delta": {"content": delta.text} if delta.text else {}}
        return {"delta": delta_of(self._events(delta), self._request.functions)}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        reading = self._request.reading
        reasons = reading is not None and reading.reasoning is not None and self._request.include_reasoning
        forced = reading is not None and reading.choice.mode == "required"
        message = choice.turn.message(reasons, forced, self._request.functions)
        return {"message": message, **self._end(index, choice)}
