"""``octavo operator``: wait for the Lease, then reconcile until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import kopf

from octavo.config import CommandParser
from octavo.errors import ConfigError, OctavoError
from octavo_operator import handlers, health, platform, resource
from octavo_operator.cache import Body
from octavo_operator.controller import Controller
from octavo_operator.kube import ApiError, Kube
from octavo_operator.leader import Lease

log = logging.getLogger("octavo.operator")

LEASE = "octavo-operator"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CRD_RETRY_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM (0) or until the Lease is lost (1; the pod starts again)."""
    parser = CommandParser(prog="octavo operator", description="Reconcile InferenceServices in a cluster.")
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this one; repeat for several"
    )
    parser.add_argument(
        "--lease-namespace", default=None, help="namespace of the Lease (default: the pod's own)"
    )
    parser.add_argument("--host", default="0.0.0.0", help="address of the health and metrics port")
    parser.add_argument("--port", type=int, default=8080, help="health and metrics port")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    args = parser.parse_args(list(argv))
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for chatty in ("kopf", "celpy"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # that signals are ours, not its
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    chosen = platform.from_env(os.environ)
    stop = asyncio.Event()
    try:
        kube = Kube()
    except Exception as error:  # the client raises several kinds, all about the configuration
        raise ConfigError(f"no Kubernetes API is configured: {error}") from error
    async with kube:
        controller = Controller(kube, chosen)
        lease = Lease(
            kube, args.lease_namespace or _own_namespace(), LEASE, f"{socket.gethostname()}_{uuid.uuid4()}"
        )
        try:
            server = await health.serve(args.host, args.port, lambda: not controller.stuck(), lambda: True)
        except OSError as error:
            raise OctavoError(f"port {args.port} cannot be used: {error.strerror}") from error
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            return await _lead(lease, controller, args.namespace, stop)
        finally:
            await server.cleanup()


async def _lead(lease: Lease, controller: Controller, namespaces: list[str], stop: asyncio.Event) -> int:
    stopping = asyncio.create_task(stop.wait())
    if not await _until(stopping, lease.acquire()):
        return 0
    try:
        if not await _until(stopping, _crd_served(controller.kube)):
            return 0
        holding = asyncio.create_task(lease.hold())
        watching = asyncio.create_task(_watch(controller, namespaces))
        await asyncio.wait({stopping, holding, watching}, return_when=asyncio.FIRST_COMPLETED)
        lost = holding.done()
        for task in (holding, watching):
            task.cancel()
        results = await asyncio.gather(holding, watching, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return 1 if lost else 0
    finally:
        await controller.close()  # before another may lead
        try:
            await lease.release()
        except ApiError as error:
            log.warning("the Lease was not released: %s", error.message)


async def _until(stopping: asyncio.Task[bool], work: Coroutine[Any, Any, None]) -> bool:
    """Whether ``work`` ended before the operator was told to stop."""
    task = asyncio.create_task(work)
    await asyncio.wait({stopping, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    return False


async def _crd_served(kube: Kube) -> None:
    """Return once the API server knows InferenceServices: they may be installed after the operator."""
    said = False
    while True:
        try:
            known = await kube.get(f"/apis/{resource.API_VERSION}")
        except ApiError as error:
            known = None
            log.warning("%s", error.message)
        if known and any(r["name"] == resource.PLURAL for r in known["resources"]):
            return
        if not said:
            said = True
            log.warning("waiting: the CRD %s.%s is not installed", resource.PLURAL, resource.GROUP)
        await asyncio.sleep(CRD_RETRY_S)


async def _watch(controller: Controller, namespaces: list[str]) -> None:
    """Run kopf in a thread with a loop of its own: at its end it waits for every task of its loop."""
    loop, stop = asyncio.get_running_loop(), threading.Event()

    def tell(kind: str, body: Body, gone: bool) -> None:
        loop.call_soon_threadsafe(controller.seen, kind, body, gone)

    def run() -> None:
        watching = kopf.operator(
            registry=handlers.registry(controller.kube, tell),
            settings=handlers.settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
        asyncio.run(watching)

    thread = asyncio.create_task(asyncio.to_thread(run))
    try:
        await asyncio.shield(thread)
    except asyncio.CancelledError:
        stop.set()
        await thread
        raise


def _own_namespace() -> str:
    if _NAMESPACE_FILE.exists():
        return _NAMESPACE_FILE.read_text().strip()
    return "default"
