"""One engine replica of this machine: its stages while it starts, and whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from octavo.child_process import free_ports
from octavo_operator.local.plan import EngineSpec, Replica
from octavo_operator.local.supervised import Say, Supervised, probe, probes

STARTUP_POLL_S = 0.1
READY_POLL_S = 1.0


class Engine(Supervised):
    """`octavo serve` on two free ports. ``key``: what opens its private port."""

    def __init__(
        self, name: str, spec: EngineSpec, key: str, folder: Path, say: Say, changed: Callable[[], None]
    ) -> None:
        self.spec, self._key = spec, key
        self.port = self.private_port = 0
        super().__init__(name, folder / f"{name}.log", say, changed)

    def state(self) -> Replica:
        """Itself as the planner sees it."""
        return Replica(name=self.name, spec=self.spec, phase=self.phase, retry_at=self.retry_at)

    def command(self) -> Sequence[str]:
        self.port, self.private_port = free_ports(2)
        return self.spec.command(self.port, self.private_port)

    def environment(self) -> Mapping[str, str]:
        return {
            "OCTAVO_PRIVATE_KEY": self._key,
            "OMP_NUM_THREADS": str(self.spec.threads),
            "OCTAVO_ENGINES_HERE": str(self.spec.memory_shares),
        }

    async def watch(self) -> None:
        """Follow /startup, saying each stage, until the engine is up; then /ready."""
        async with probes(self.port) as session:
            shown = 0  # stages said: the engine keeps them all, however short they were
            while True:
                status, body = await probe(session, "/startup")
                for stage, detail in body.get("stages", [])[shown:]:
                    self.say(f"{self.name}: {stage} {detail}".rstrip())
                    shown += 1
                if status == 200:
                    break
                await asyncio.sleep(STARTUP_POLL_S)
            while True:
                status, body = await probe(session, "/ready")
                if self.stopping:
                    return
                if status == 200 and self.phase != "ready":
                    self.say(f"{self.name}: ready")
                    self.enter("ready")
                elif status != 200 and self.phase == "ready":
                    self.say(
                        f"{self.name}: not ready: {body.get('error') or body.get('state') or 'no answer'}"
                    )
                    self.enter("unready")
                await asyncio.sleep(READY_POLL_S)
