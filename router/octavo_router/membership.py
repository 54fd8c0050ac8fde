"""Which endpoints there are: from a file that something else rewrites. (In a cluster: ``slices.py``.)"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

# How often the file's status is looked at; a stat costs microseconds, and a change is seen within this.
FILE_POLL_S = 0.05


class Endpoint(msgspec.Struct, frozen=True):
    """One engine replica: its name is the same on every router, its addresses have no trailing slash.

    A ``terminating`` endpoint gets no new work.
    """

    name: str
    url: str
    private_url: str
    terminating: bool = False


class _File(msgspec.Struct):
    endpoints: list[Endpoint]


class Membership(ABC):
    """A source of endpoints: ``run`` calls ``on_change`` with the whole list each time it differs.

    ``problem`` says why there is no list, or why it may be old; empty when all is well.
    """

    problem: str = ""

    @abstractmethod
    async def run(self, on_change: Callable[[list[Endpoint]], None]) -> None:
        """Follow the source until cancelled."""


def parse_endpoints(data: bytes) -> list[Endpoint]:
    """The endpoints of a file's bytes. Raises ``ValueError`` naming what is wrong."""
    try:
        endpoints = msgspec.json.decode(data, type=_File).endpoints
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    names = [e.name for e in endpoints]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"two endpoints are named {twice!r}")
    for endpoint in endpoints:
        for url in (endpoint.url, endpoint.private_url):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"endpoint {endpoint.name!r}: {url!r} is not an http:// address")
    return [Endpoint(e.name, e.url.rstrip("/"), e.private_url.rstrip("/"), e.terminating) for e in endpoints]


class FileMembership(Membership):
    """``{"endpoints": [{"name", "url", "private_url"}]}``, replaced atomically by its writer.

    While the file is missing or cannot be read the last good list stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = f"endpoints file {path} has not been read yet"

    async def run(self, on_change: Callable[[list[Endpoint]], None]) -> None:
        seen: tuple[int, int, int] | None = None
        current: list[Endpoint] | None = None
        while True:
            try:
                status = self.path.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                if stamp != seen:
                    seen = stamp
                    endpoints = parse_endpoints(self.path.read_bytes())
                    self.problem = ""
                    if endpoints != current:
                        current = endpoints
                        on_change(endpoints)
            except (OSError, ValueError) as error:
                problem = f"endpoints file {self.path} cannot be used: {error}"
                if problem != self.problem:
                    log.warning("%s%s", problem, "" if current is None else "; the last good list stays")
                self.problem = problem
            await asyncio.sleep(FILE_POLL_S)
