"""A server of our own for the time of a command: a child process on free loopback ports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

import aiohttp

from octavo.child_process import LOOPBACK, die_with_parent, free_ports, octavo_command
from octavo.errors import Unavailable

POLL_S = 0.1
END_WITHIN_S = 15.0


class OwnServer:
    """``octavo serve MODEL FLAGS``; an asynchronous context manager that enters when it is ready."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        ports = free_ports(2)
        self.url = f"http://{LOOPBACK}:{ports[0]}"
        ours = [
            f"--host={LOOPBACK}",
            f"--port={ports[0]}",
            f"--private-port={ports[1]}",
            "--drain-grace-s=0",
        ]
        self._command = octavo_command(["serve", model, "--log-level=warning", *flags, *ours])

    async def __aenter__(self) -> OwnServer:
        """Raises ``Unavailable`` when the server ends before it is ready; it says itself why."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches us alone: we end it
            preexec_fn=die_with_parent(),
        )
        try:
            await self.unless_dead(self._ready())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):  # SIGINT: the server ends without waiting for streams
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), END_WITHIN_S)
                return

    async def unless_dead(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, or raise ``Unavailable`` as soon as the server has ended."""
        working, dead = asyncio.ensure_future(work), asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({working, dead}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Unavailable(f"the server ended with status {dead.result()}")
            working.result()
        finally:
            for task in (working, dead):
                task.cancel()
            await asyncio.gather(working, dead, return_exceptions=True)

    async def _ready(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):  # it does not listen yet
                    async with session.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(POLL_S)
