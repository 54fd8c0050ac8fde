"""Calls of the engine's admin methods that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from octavo.engine import messages
from octavo.errors import OctavoError


class AdminCalls:
    """Belongs to one client; ``send`` hands the engine a message."""

    def __init__(self, send: Callable[[messages.ToEngine], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """What the method returns. Raises what it raises, or what ``fail`` is told."""
        call_id = next(self._numbers)
        self._waiting[call_id] = future = asyncio.get_running_loop().create_future()
        self._send(messages.AdminCall(call_id, method, arguments))
        try:
            return await future
        finally:
            self._waiting.pop(call_id, None)

    def answered(self, reply: messages.AdminReply) -> None:
        """Nobody may wait for it any more."""
        if (future := self._waiting.get(reply.call_id)) is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(reply.error.error())

    def fail(self, error: OctavoError) -> None:
        """No answer will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
