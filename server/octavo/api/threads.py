"""Work off the event loop that must not hold up the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """The result of ``work()``, run on a thread of its own. Whoever stops waiting leaves the thread behind: a
    download or a large tokenizer does not delay the exit, as it would on the loop's own executor, which is
    joined at the end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T itself when there was no error

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # carried over to whoever waits
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future
