"""What should run on this machine for a resource, and the next steps towards it.

Pure: no clock, no process, no file. The steps follow a Deployment's rolling update with one engine of surge:
an engine of the old specification goes only when enough others are ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from octavo_operator.resource import InferenceService, engine_args, router_args, settings

HOST = "127.0.0.1"
SURGE = 1  # engines beyond the wanted number while a replacement is under way: each costs its memory twice
# The router drops a drained engine as soon as the endpoints file says so; a cluster needs seconds.
DRAIN_GRACE_S = 1

Phase = Literal["starting", "ready", "unready", "backoff", "stopping"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine, but for its ports. Two engines are interchangeable when these are equal."""

    model: str  # path
    args: tuple[str, ...]
    threads: int
    memory_shares: int = 1  # engines that divide the free memory between their caches

    def command(self, port: int, private_port: int) -> list[str]:
        """Arguments of ``octavo``."""
        place = [f"--host={HOST}", f"--port={port}", f"--private-port={private_port}"]
        return ["serve", self.model, f"--drain-grace-s={DRAIN_GRACE_S}", *self.args, *place]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterSpec:
    args: tuple[str, ...]

    def command(self, port: int, endpoints_file: str) -> list[str]:
        """Arguments of ``octavo``."""
        return [
            "router",
            f"--host={HOST}",
            f"--port={port}",
            f"--endpoints-file={endpoints_file}",
            *self.args,
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Desired:
    """What the resource asks of this machine."""

    name: str
    model_name: str
    replicas: int
    engine: EngineSpec
    router: RouterSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """An engine as it runs now. ``retry_at``: when one in backoff may start again, on the caller's clock."""

    name: str
    spec: EngineSpec
    phase: Phase
    retry_at: float = 0.0


@dataclasses.dataclass(frozen=True)
class Start:
    """Run ``count`` new engines of the desired specification."""

    count: int


@dataclasses.dataclass(frozen=True)
class Restart:
    name: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """Let a replica finish its streams and end."""

    name: str


Action = Start | Restart | Stop


def desired(
    service: InferenceService,
    model: str,
    cores: int,
    *,
    replicas: int | None = None,
    api_key_dir: str | None = None,
) -> Desired:
    """The processes for ``service``. ``replicas``: the autoscaler's number, where it has decided one.

    The engines share out the cores: each gets an equal, whole number of threads, at least one. Where
    nothing says how large their caches are, they share out the memory too. Under autoscaling the share is
    that of the maximum, so that scaling replaces no engine.
    """
    count = service.start_replicas if replicas is None else replicas
    most = max(1, service.autoscaling.max_replicas if service.autoscaling else count)
    sized = service.engine.device != "cpu" or settings(service).kv_cache_memory_bytes is not None
    keys = () if api_key_dir is None else (f"--api-key-dir={api_key_dir}",)
    return Desired(
        name=service.name,
        model_name=service.model.name,
        replicas=count,
        engine=EngineSpec(
            model=model,
            args=(*engine_args(service), *keys),
            threads=max(1, cores // most),
            memory_shares=1 if sized else most,
        ),
        router=RouterSpec(args=(*router_args(service), *keys)),
    )


def plan(wanted: Desired, replicas: Sequence[Replica], now: float) -> list[Action]:
    """The steps that can be taken at ``now``; an empty list when there is nothing to do but wait."""
    live = [replica for replica in replicas if replica.phase != "stopping"]
    current = [replica for replica in live if replica.spec == wanted.engine]
    stale = [replica for replica in live if replica.spec != wanted.engine]
    stops = [*_excess(current, wanted.replicas), *_replaced(wanted.replicas, current, stale)]
    stopped = {replica.name for replica in stops}
    actions: list[Action] = [Stop(replica.name) for replica in stops]
    missing = min(
        wanted.replicas - len(current),
        wanted.replicas + (SURGE if stale else 0) - (len(live) - len(stops)),
    )
    if missing > 0:
        actions.append(Start(missing))
    actions += [
        Restart(replica.name)
        for replica in live
        if replica.phase == "backoff" and replica.retry_at <= now and replica.name not in stopped
    ]
    return actions


def _excess(current: Sequence[Replica], wanted: int) -> list[Replica]:
    """The engines to end when the number fell: those that serve nobody yet first, then the youngest."""
    ordered = [replica for replica in current if replica.phase == "ready"]
    ordered += [replica for replica in current if replica.phase != "ready"]
    return ordered[wanted:]


def _replaced(wanted: int, current: Sequence[Replica], stale: Sequence[Replica]) -> list[Replica]:
    """The engines of an older specification that may end: the idle, and as many as others replace."""
    idle = [replica for replica in stale if replica.phase != "ready"]
    serving = [replica for replica in stale if replica.phase == "ready"]
    ready = min(wanted, sum(replica.phase == "ready" for replica in current))
    spare = max(0, ready + len(serving) - wanted)
    return idle + serving[:spare]


def endpoints(ready: Iterable[tuple[str, int, int]]) -> dict[str, Any]:
    """The router's membership file, from the (name, port, private port) of the engines that are ready."""
    return {
        "endpoints": [
            {"name": name, "url": f"http://{HOST}:{port}", "private_url": f"http://{HOST}:{private_port}"}
            for name, port, private_port in ready
        ]
    }


def changes(old: Desired, new: Desired) -> list[str]:
    """What an edit of the manifest changed, a line each."""
    lines = []
    if old.replicas != new.replicas:
        lines.append(f"replicas {old.replicas} -> {new.replicas}")
    if old.engine.model != new.engine.model or old.engine.args != new.engine.args:
        lines.append("the engine's settings changed: its replicas are replaced one by one")
    elif old.engine != new.engine:
        shares = f"from {_share(old.engine)} to {_share(new.engine)}"
        lines.append(f"an engine's share of the machine changed {shares}: they are replaced one by one")
    if old.router != new.router:
        lines.append("the router's settings changed: it is restarted")
    return lines


def _share(engine: EngineSpec) -> str:
    memory = f" and 1/{engine.memory_shares} of the memory" if engine.memory_shares > 1 else ""
    return f"{engine.threads} threads{memory}"


def only_in_a_cluster(service: InferenceService) -> list[str]:
    """The fields of the resource that one machine does not apply, a line each."""
    lines = []
    if service.engine.resources or service.router.resources:
        lines.append("resources are not enforced here: engines share out the cores and what memory is free")
    if service.engine.pod_template or service.router.pod_template:
        lines.append("podTemplate applies in a cluster only")
    if service.router.replicas > 1:
        lines.append(f"router.replicas is {service.router.replicas}: one machine runs one router")
    if service.model.secret is not None:
        lines.append(
            "model.secretRef applies in a cluster only: here the download takes this shell's environment"
        )
    if service.external_scaler:
        lines.append("autoscaling.mode is external: here `replicas` in the file is what scales")
    return lines
