"""An `octavo` command in a terminal of its own, as a person has it."""

from __future__ import annotations

import os
import pty
import select
import sys
import time

_WITHIN_S = 60.0


class Terminal:
    """Types into the command and reads its screen; a context manager that ends it."""

    def __init__(self, *args: str) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [sys.executable, "-m", "octavo.cli", *args])
        self.screen = ""
        self._seen = 0
        self._closed = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def press(self, key: str, text: str) -> None:
        """Press ``key`` until ``text`` shows: readline sees no Ctrl-C that comes just before it waits."""
        for _ in range(int(_WITHIN_S)):
            self.type(key)
            while text not in self.screen[self._seen :] and select.select([self._fd], [], [], 1.0)[0]:
                assert self._read() and not self._closed, self.screen
            if text in self.screen[self._seen :]:
                break
        self.wait_for(text)

    def wait_for(self, text: str) -> None:
        """Read until ``text`` stands behind what was waited for before."""
        until = time.monotonic() + _WITHIN_S
        while (at := self.screen.find(text, self._seen)) < 0:
            alive = not self._closed and time.monotonic() < until
            assert alive and self._read(), f"no {text!r} in {self.screen!r}"
        self._seen = at + len(text)

    def end(self) -> int:
        """The exit status, once it has ended."""
        while not self._closed:
            assert self._read(), f"it goes on: {self.screen!r}"
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        try:
            ready, _, _ = select.select([self._fd], [], [], _WITHIN_S)
            data = os.read(self._fd, 4096) if ready else b""
        except OSError:  # EIO: the command closed its end
            self._closed = True
            return True
        self.screen += data.decode(errors="replace")
        return bool(data)
