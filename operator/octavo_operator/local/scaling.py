"""Native autoscaling on one machine: the operator's own decision, fed by the engines of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from octavo_operator.autoscaler import Decision, Load, Pod, Wanted, decide
from octavo_operator.local.engine import Engine
from octavo_operator.local.supervised import probes
from octavo_operator.resource import Autoscaling

INTERVAL_S = 5.0  # as in a cluster


class Scaler:
    """Remembers what the last decisions were. ``key`` opens the engines' private ports."""

    def __init__(self, key: str) -> None:
        self._headers = {"Authorization": f"Bearer {key}"}
        self._history: tuple[Wanted, ...] = ()

    async def decide(self, spec: Autoscaling, engines: Sequence[Engine], current: int) -> Decision:
        """The replicas to run now, by what each engine says of its load."""
        pods = await asyncio.gather(*(self._pod(engine) for engine in engines))
        decision = decide(pods, current, spec, self._history, time.monotonic())
        self._history = decision.history
        return decision

    def forget(self) -> None:
        """Autoscaling is off: what was wanted before counts no more."""
        self._history = ()

    async def _pod(self, engine: Engine) -> Pod:
        load = await self._load(engine.private_port) if engine.phase == "ready" else None
        return Pod(name=engine.name, ready=engine.phase == "ready", ending=engine.stopping, load=load)

    async def _load(self, private_port: int) -> Load | None:
        """None where there is no answer: such an engine is unknown to the decision, not idle."""
        try:
            async with (
                probes(private_port) as session,
                session.get("/server_info", headers=self._headers) as answer,
            ):
                answer.raise_for_status()
                info = await answer.json()
        except (aiohttp.ClientError, TimeoutError):
            return None
        return Load(
            waiting=info["load"]["waiting"],
            running=info["load"]["running"],
            kv_usage=info["load"]["kv_usage"],
            concurrency=info["limits"]["max_num_seqs"],
        )
