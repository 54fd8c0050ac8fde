"""What a caller reads: the merged outputs of the requests it handed over together."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence

from octavo.core.outputs import EngineOutput
from octavo.errors import OctavoError, SlowReader

MAX_WAITING = 4096  # outputs of a sequence that may wait for a reader: a MB or two, with 20 logprobs ten


class OutputStream(AsyncIterator[EngineOutput]):
    """The outputs of some requests, merged; ends when each has finished.

    The engine waits for no reader: when ``MAX_WAITING`` outputs wait for each sequence, all are ended
    and the reader gets ``SlowReader`` in place of what waits.

    Closing it, cancelling a wait on it, or dropping it aborts those that have not finished.
    """

    def __init__(
        self,
        request_ids: list[str],
        abandon: Callable[[Sequence[str]], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._abandon_requests = abandon
        self._loop = loop
        self.request_ids = request_ids
        self._open = set(request_ids)
        self._queue: asyncio.Queue[EngineOutput | OctavoError] = asyncio.Queue()

    async def __anext__(self) -> EngineOutput:
        if not self._open and self._queue.empty():
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self._abandon()
            raise
        if isinstance(item, OctavoError):
            raise item
        return item

    async def aclose(self) -> None:
        """Abort what has not finished. The blocks are free within a step."""
        self._abandon()

    def __del__(self) -> None:
        if self._open and not self._loop.is_closed():  # perhaps on another thread: the collector picks any
            self._loop.call_soon_threadsafe(self._abandon_requests, list(self._open))

    def put(self, output: EngineOutput) -> None:
        """One more output of one of the requests."""
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        if self._queue.qsize() < MAX_WAITING * len(self.request_ids):
            self._queue.put_nowait(output)
            return
        waiting = self._queue.qsize()
        self._abandon()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(SlowReader(f"{waiting} outputs waited to be read: the request was ended"))

    def fail(self, error: OctavoError) -> None:
        """End with an error; the first one counts."""
        if self._open:
            self._open.clear()
            self._queue.put_nowait(error)

    def _abandon(self) -> None:
        if self._open:
            ids = list(self._open)
            self._open.clear()
            self._abandon_requests(ids)


class OpenStreams:
    """The requests that have not finished, and who reads each: a reader that is dropped is not kept alive."""

    def __init__(self) -> None:
        self._readers: dict[str, weakref.ref[OutputStream]] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._readers

    @property
    def request_ids(self) -> list[str]:
        return list(self._readers)

    def add(self, stream: OutputStream) -> None:
        self._readers |= dict.fromkeys(stream.request_ids, weakref.ref(stream))

    def deliver(self, output: EngineOutput) -> bool:
        """Hand it to its reader. True when it is the last of its request."""
        if (stream := self._reader(output.request_id)) is not None:
            stream.put(output)
        if output.finish_reason is None:
            return False
        return self._readers.pop(output.request_id, None) is not None

    def fail(self, request_ids: Sequence[str], error: OctavoError) -> None:
        """They end with this error."""
        for name in request_ids:
            if (stream := self._reader(name)) is not None:
                stream.fail(error)
        self.forget(request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self._readers.pop(name, None)

    def _reader(self, request_id: str) -> OutputStream | None:
        reference = self._readers.get(request_id)
        return None if reference is None else reference()
