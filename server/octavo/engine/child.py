"""A process of ours, told on its standard input what to do; the input's end tells it that we are gone.

It is a new interpreter: a fork of a process with threads could hang on a lock that one of them held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

ORPHANED = 3  # exit status when the owner is gone

_log = logging.getLogger("octavo.engine")


class Child:
    """Runs ``python -m module``, which gets ``frame`` by ``read_frame``. ``exited`` is called with its exit
    status, on the loop that made it. Raises ``OSError`` where no process can be started.
    """

    def __init__(self, module: str, frame: bytes, exited: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._exited = exited
        # A session of its own: Ctrl-C and signals to the group reach the owner, which drains first.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(frame).to_bytes(4, "big") + frame)
            self._process.stdin.flush()  # stays open
        except BrokenPipeError:
            _log.debug("%s ended before it was told what to do", module)  # its exit status says why
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


def cause_of(status: int) -> str:
    """What an exit status tells of a process's end."""
    if status >= 0:
        return f"exit status {status}"
    hint = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-status).name}{hint}"


def read_frame(stdin: int) -> bytes:
    """In the child: what it is told to do."""
    return _read(stdin, int.from_bytes(_read(stdin, 4), "big"))


def end_with_owner(stdin: int) -> None:
    """In the child, from now on: end when the owner does, whatever else goes on here."""
    threading.Thread(target=_wait_for_end, args=(stdin,), daemon=True).start()


def _read(stdin: int, size: int) -> bytes:
    """So many bytes, fewer only at the end. Unbuffered: a buffer's lock would trip the interpreter's exit."""
    data = b""
    while len(data) < size and (part := os.read(stdin, size - len(data))):
        data += part
    return data


def _wait_for_end(stdin: int) -> NoReturn:
    while os.read(stdin, 1):
        pass  # the owner says nothing more; only its end counts
    os._exit(ORPHANED)
