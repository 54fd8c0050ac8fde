"""A child process that ends with us: in a group of its own, logging to a file, killed if we are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.child_process import die_with_parent, octavo_command

_TAIL_BYTES = 8192  # enough for the last lines of a log


class Child:
    """A running ``octavo`` subcommand."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(cls, args: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Run ``octavo ARGS`` with its output appended to ``log``. Raises ``OSError``."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *octavo_command(args),
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone; we end the others in order
                preexec_fn=die_with_parent(),
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit status once it has ended; negative: a signal's number. What it left behind is killed."""
        status = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        return status

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, which ends its own children in order."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, as wanted
                self._process.send_signal(number)

    def kill(self) -> None:
        """End the process and all it started, now."""
        if self.running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(self.pid, number)

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = ", often for want of memory" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
