"""The router of this machine, and the file by which it learns the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from octavo_operator.local.plan import RouterSpec, endpoints
from octavo_operator.local.supervised import Say, Supervised, probe, probes

LIVE_POLL_S = 0.1
ENDPOINTS_POLL_S = 0.05


class Router(Supervised):
    """`octavo router` on the port that clients use; ready as soon as it answers, with engines or without."""

    def __init__(
        self, spec: RouterSpec, port: int, key: str, folder: Path, say: Say, changed: Callable[[], None]
    ) -> None:
        self.spec, self._port, self._key = spec, port, key
        self._endpoints = folder / "endpoints.json"
        super().__init__("router", folder / "router.log", say, changed)

    def command(self) -> Sequence[str]:
        return self.spec.command(self._port, str(self._endpoints))

    def environment(self) -> Mapping[str, str]:
        return {"OCTAVO_PRIVATE_KEY": self._key, "OMP_NUM_THREADS": "1"}

    async def watch(self) -> None:
        async with probes(self._port) as session:
            while (await probe(session, "/live"))[0] != 200:
                await asyncio.sleep(LIVE_POLL_S)
        if self.phase == "starting":
            self.enter("ready")

    async def knows_an_engine(self) -> None:
        """Return once a request would be answered."""
        async with probes(self._port) as session:
            while (await probe(session, "/ready"))[0] != 200:
                await asyncio.sleep(ENDPOINTS_POLL_S)


def write_endpoints(folder: Path, ready: Iterable[tuple[str, int, int]]) -> None:
    """Replace the membership file in one step: the router never reads half of it."""
    fresh = folder / "endpoints.json.new"
    fresh.write_text(json.dumps(endpoints(ready)))
    fresh.replace(folder / "endpoints.json")
