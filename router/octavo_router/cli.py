"""``octavo router``: flags, the server, and its orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
import uvloop

from octavo.config import CommandParser
from octavo.errors import ConfigError
from octavo.http_protocol import HttpProtocol
from octavo.values import parse_size
from octavo_router.app import Router, RouterSettings, build_app
from octavo_router.cost import POLICIES
from octavo_router.index import DEFAULT_BUDGET_BYTES
from octavo_router.membership import FileMembership, Membership
from octavo_router.proxy import DEFAULT_MAX_BODY_BYTES
from octavo_router.slices import ClusterAccess, SliceMembership, pod_namespace

log = logging.getLogger(__name__)

# Kubernetes goes on sending for some seconds after SIGTERM, until every node has heard that the pod is going.
DEFAULT_DRAIN_GRACE_S = 5.0
DEFAULT_DRAIN_TIMEOUT_S = 60.0
# Clients' connections are kept this long when idle; above the 60 s of common load balancers in front.
CLIENT_KEEPALIVE_S = 75
BACKLOG = 2048  # connections that wait to be taken


def parser() -> argparse.ArgumentParser:
    """The flags of ``octavo router``."""
    out = CommandParser(
        prog="octavo router",
        description="Send OpenAI requests to the engine replica that gives the first token soonest.",
    )
    out.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    out.add_argument(
        "--port", type=int, default=8000, help="port to listen on, 0: any free one (default: 8000)"
    )
    out.add_argument("--policy", choices=POLICIES, default="prefix-affinity", help="default: prefix-affinity")
    source = out.add_mutually_exclusive_group(required=True)
    source.add_argument("--endpoints-file", type=Path, metavar="FILE", help="JSON list of engines, followed")
    source.add_argument(
        "--service", metavar="NAME", help="headless Service whose EndpointSlices are followed"
    )
    out.add_argument("--namespace", metavar="NS", help="of --service (default: this pod's)")
    out.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key clients must send; repeat for several",
    )
    out.add_argument(
        "--api-key-dir", type=Path, metavar="DIR", help="folder of files, each holding one API key; followed"
    )
    out.add_argument(
        "--drain-grace-s", type=float, default=DEFAULT_DRAIN_GRACE_S, metavar="S",
        help=f"seconds after SIGTERM in which new requests are taken (default: {DEFAULT_DRAIN_GRACE_S})",
    )  # fmt: skip
    out.add_argument(
        "--drain-timeout-s", type=float, default=DEFAULT_DRAIN_TIMEOUT_S, metavar="S",
        help=f"seconds after SIGTERM until running streams are cut (default: {DEFAULT_DRAIN_TIMEOUT_S})",
    )  # fmt: skip
    out.add_argument(
        "--index-memory", default=DEFAULT_BUDGET_BYTES, metavar="BYTES",
        help="what the prefix index may take (default: 256Mi)",
    )  # fmt: skip
    out.add_argument(
        "--max-body-bytes", default=DEFAULT_MAX_BODY_BYTES, metavar="BYTES",
        help="largest request body, a larger one gets 413 (default: 32Mi)",
    )  # fmt: skip
    out.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: info"
    )
    return out


def main(argv: Sequence[str]) -> int:
    """Run until a signal ends it, then return 0. Raises ``ConfigError``."""
    args = parser().parse_args(list(argv))
    for name in ("drain_grace_s", "drain_timeout_s"):
        if getattr(args, name) < 0:
            raise ConfigError(f"{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 0")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port is {args.port}: it must be between 0 and 65535")
    if args.namespace and not args.service:
        raise ConfigError("--namespace goes with --service")
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    settings = RouterSettings(
        policy=args.policy,
        private_key=os.environ.get("OCTAVO_PRIVATE_KEY") or None,
        api_keys=tuple(args.api_key),
        api_key_dir=args.api_key_dir,
        index_bytes=parse_size(args.index_memory),
        max_body_bytes=parse_size(args.max_body_bytes),
    )
    membership: Membership = (
        FileMembership(args.endpoints_file)
        if args.endpoints_file
        else SliceMembership(ClusterAccess.in_pod(), args.service, args.namespace or pod_namespace())
    )
    router = Router(settings, membership)
    with _listen(args.host, args.port) as listening:
        server = RouterServer(router, listening, grace_s=args.drain_grace_s, timeout_s=args.drain_timeout_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run())
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``ConfigError`` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


class RouterServer:
    """uvicorn with an end of our own: SIGTERM makes ``/ready`` fail at once, serving goes on for ``grace_s``,
    then no connection is taken any more and running answers are finished, all within ``timeout_s``. SIGINT
    skips the grace; a second signal cuts.
    """

    def __init__(self, router: Router, listening: socket.socket, *, grace_s: float, timeout_s: float) -> None:
        self.router = router
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._stop: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            build_app(router), http=HttpProtocol, ws="none", log_config=None, access_log=False,
            server_header=False, date_header=False, timeout_keep_alive=CLIENT_KEEPALIVE_S,
        )  # fmt: skip
        self._server = _Server(config)
        self._listening = listening

    async def run(self) -> None:
        """Serve until told to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)
        host, port = self._listening.getsockname()[:2]
        log.info("listening on http://%s:%s, policy %s", host, port, self.router.settings.policy)
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if self._stop is not None:
                self._stop.cancel()

    def _signal(self, number: signal.Signals) -> None:
        if self._stop is not None:
            log.warning("second signal: running answers are cut")
            self._server.force_exit = True
            self._server.should_exit = True
            return
        self.router.not_ready()  # remembers whether it is ready now
        self.router.draining = True
        self._stop = asyncio.create_task(self._drain(number))

    async def _drain(self, number: signal.Signals) -> None:
        # A router that was never ready has had no clients sent to it.
        grace_s = self._grace_s if number == signal.SIGTERM and self.router.was_ready else 0.0
        if grace_s:
            log.info("draining: not ready from now on, new requests are taken for %s s", grace_s)
            await asyncio.sleep(grace_s)
        log.info("closing: running answers are finished")
        self._server.config.timeout_graceful_shutdown = max(1, round(self._timeout_s - grace_s))
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by ``RouterServer``."""
        yield
