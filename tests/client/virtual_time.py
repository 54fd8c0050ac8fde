"""An event loop whose clock stands still while anything can be done, and jumps to the next timer when not.

Client and server on one such loop talk over real sockets and real HTTP, and each wait takes exactly its time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_SOCKETS_S = 0.001  # real seconds in which what was written to a loopback socket surely arrives


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0 if timeout is not None and timeout <= 0 else _SOCKETS_S)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:  # no timer to jump to
            return super().select(None)
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
