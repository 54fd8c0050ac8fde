"""How the API processes of one server call each other: by number, over Unix sockets.

A call is a JSON line of arguments and a JSON answer, on a connection of its own: calls are rare (a scrape, a
response that another process keeps, an administrator's order), and a process that starts anew needs no care.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from octavo.api.errors import InternalFault
from octavo.engine.messages import ErrorInfo
from octavo.errors import OctavoError, Unavailable

FIRST = 0  # number of the process that owns the engine, the private port and the signals
ANSWER_S = 5.0  # after so long a process is taken to hang
_log = logging.getLogger("octavo.api")
_encoder = msgspec.json.Encoder()


class _Call(msgspec.Struct):
    method: str
    arguments: list[Any]


class _Answer(msgspec.Struct):
    value: Any = None
    error: ErrorInfo | None = None


_calls = msgspec.json.Decoder(_Call)
_answers = msgspec.json.Decoder(_Answer)


class Peers:
    """This process among the ``count`` of its server. ``answers`` are the methods that may be called here,
    also by this process itself, directly: a server of one process has no ``folder`` and no sockets.

    ``others``: those that the first process tells what it decides; it alone keeps them.
    """

    def __init__(self, number: int = FIRST, count: int = 1, folder: Path | None = None) -> None:
        self.number, self.count = number, count
        self.folder = folder
        self.answers: dict[str, Callable[..., Awaitable[Any]]] = {}
        self.others: set[int] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Answer the others from now on."""
        self._server = await asyncio.start_unix_server(self._serve, self._path(self.number))

    async def call(self, number: int, method: str, *arguments: Any, within_s: float | None = ANSWER_S) -> Any:
        """What ``method`` comes to in that process. Raises what it raises, or ``Unavailable`` where that
        process does not answer within ``within_s`` seconds.
        """
        if number == self.number:
            return await self.answers[method](*arguments)
        try:
            async with asyncio.timeout(within_s):
                data = await _exchange(self._path(number), _encoder.encode(_Call(method, list(arguments))))
            answer = _answers.decode(data)
        except (OSError, msgspec.DecodeError) as error:  # TimeoutError is the former; no answer is no JSON
            _log.warning("API process %d did not answer a call of %s: %s", number, method, error)
            raise Unavailable("an API process of this server starts anew: try again") from error
        if answer.error is not None:
            raise answer.error.error()
        return answer.value

    async def tell_others(
        self, method: str, *arguments: Any, within_s: float | None = ANSWER_S
    ) -> dict[int, Any]:
        """Call all ``others`` at once: their answers, of those that gave one."""
        numbers = sorted(self.others)
        results = await asyncio.gather(
            *(self.call(one, method, *arguments, within_s=within_s) for one in numbers),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Unavailable):
                raise result
        told = zip(numbers, results, strict=True)
        return {number: result for number, result in told if not isinstance(result, BaseException)}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _path(self, number: int) -> Path:
        assert self.folder is not None, "a server of one process calls nobody else"
        return self.folder / f"api-{number}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(await reader.read())
            writer.write(_encoder.encode(answer))
            await writer.drain()
        except OSError as error:  # the caller is gone, or was cancelled
            _log.debug("the answer to a call of another API process was not read: %s", error)
        finally:
            writer.close()

    async def _answer(self, data: bytes) -> _Answer:
        try:
            call = _calls.decode(data)
            return _Answer(await self.answers[call.method](*call.arguments))
        except OctavoError as error:
            return _Answer(error=ErrorInfo.of(error))
        except Exception:  # told as a fault, as a request's own would be
            _log.exception("a call of another API process failed")
            return _Answer(error=ErrorInfo.of(InternalFault("the server failed on this request")))


async def _exchange(path: Path, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(data)
        writer.write_eof()
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
