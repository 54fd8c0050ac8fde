"""A process of ours, watched on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Callable

from octavo.child_process import tell


class Child:
    """A process of ``start_module``, told ``frame``. ``exited`` is called with its exit status, on the loop
    that made it.
    """

    def __init__(self, process: subprocess.Popen[bytes], frame: bytes, exited: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._exited = exited
        self._process = process
        tell(process, frame)
        threading.Thread(target=self._wait, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def close(self, within_s: float) -> None:
        """Wait for its end, which was asked for; kill it where it does not come in ``within_s`` seconds."""
        try:
            await asyncio.to_thread(self._process.wait, within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it had read what is still buffered
            self._process.stdin.close()

    def _wait(self) -> None:
        """Runs in a thread of its own: returns when the process has ended, whatever ended it."""
        status = self._process.wait()
        if not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self._loop.call_soon_threadsafe(self._exited, status)
