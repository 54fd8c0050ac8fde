"""A process kept running: started, watched, restarted with backoff when it dies, drained when it must go."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

import aiohttp

from octavo_operator.local.plan import HOST, Phase
from octavo_operator.local.process import Child, describe_exit

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
STEADY_S = 60.0  # a process that was up for so long starts again with the first backoff
KILL_MARGIN_S = 5.0  # beyond the process's own limit of draining, before it is killed
PROBE_TIMEOUT_S = 5.0
LOG_LINES = 5  # shown of a process that died

Say = Callable[[str], None]


class Supervised(ABC):
    """One process and its restarts; ``changed`` is called whenever its phase is another."""

    def __init__(self, name: str, log: Path, say: Say, changed: Callable[[], None]) -> None:
        self.name = name
        self.phase: Phase = "starting"
        self.retry_at = 0.0  # of the monotonic clock, in phase "backoff"
        self.failure: list[str] = []  # what there is to say of the last death, the gist first
        self._log, self.say, self._changed = log, say, changed
        self._child: Child | None = None
        self._deaths = 0
        self._life = asyncio.create_task(self._live())

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Arguments of ``octavo`` for this start."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Variables beside our own."""

    @abstractmethod
    async def watch(self) -> None:
        """Keep the phase true while the process runs; cancelled at its end."""

    @property
    def stopping(self) -> bool:
        return self.phase == "stopping"

    def restart(self) -> None:
        """Start again after a backoff."""
        self.enter("starting")
        self._life = asyncio.create_task(self._live())

    def enter(self, phase: Phase) -> None:
        if self.phase != phase:
            self.phase = phase
            self._changed()

    async def stop(self, limit_s: float, signal: Signals = Signals.SIGTERM) -> None:
        """Ask it to end, and kill it with all it started when it has not after ``limit_s`` seconds."""
        self.enter("stopping")
        if self._child is not None:
            self._child.send(signal)
        await asyncio.wait([self._life], timeout=limit_s)
        self.kill()
        await asyncio.wait([self._life])

    def kill(self) -> None:
        """End it and all it started, now."""
        self.phase = "stopping"
        if self._child is not None:
            self._child.kill()

    async def _live(self) -> None:
        """From the start of the process to its end."""
        if self.stopping:
            return
        started = time.monotonic()
        try:
            self._child = child = await Child.start(self.command(), self.environment(), self._log)
        except OSError as error:
            self._die([f"{self.name} cannot be started: {error}"], lived_s=0.0)
            return
        if self.stopping:  # told so while the process was being made
            child.kill()
        watch = asyncio.create_task(self.watch())
        try:
            status = await child.wait()
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        if self.stopping:
            return
        self._die(self._obituary(child, status), lived_s=time.monotonic() - started)

    def _die(self, failure: list[str], lived_s: float) -> None:
        self._deaths = 1 if lived_s > STEADY_S else self._deaths + 1
        self.retry_at = time.monotonic() + min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._deaths - 1))
        self.failure = failure
        self.enter("backoff")

    def _obituary(self, child: Child, status: int) -> list[str]:
        """Its own last word where it had one, else how it ended and the end of its log."""
        lines = child.last_lines(LOG_LINES)
        own = [line.removeprefix("octavo: ") for line in lines if line.startswith("octavo: ")]
        if own:
            return [f"{self.name}: {own[-1]}"]
        return [
            f"{self.name} {describe_exit(status)}; the end of its log {child.log}:",
            *(f"    {line}" for line in lines),
        ]


def probes(port: int) -> aiohttp.ClientSession:
    """A client for the health routes of a process of this machine."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    return aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=timeout)


async def probe(session: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of a health route; (0, {}) while nobody answers."""
    try:
        async with session.get(path) as response:
            body = await response.json(content_type=None)
            return response.status, body if isinstance(body, dict) else {}
    except (aiohttp.ClientError, TimeoutError):
        return 0, {}
    except ValueError:  # an answer, but no JSON
        return response.status, {}
