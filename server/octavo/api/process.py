"""An API process beside the first: ``python -m octavo.api.process``, told on standard input what to do.

It has the routes of the public port, a client of its own at the engine, and nothing else; it takes requests
once the engine does, and ends with the first.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import msgspec
import uvloop

from octavo.api.app import public_app
from octavo.api.http_server import http_server, listen
from octavo.api.peers import FIRST, Peers
from octavo.api.processes import ApiLaunch
from octavo.api.server import set_up_logging
from octavo.api.service import Service
from octavo.api.tls import tls_context
from octavo.child_process import end_with_owner, read_frame
from octavo.config import engine_config
from octavo.engine.client import EngineClient
from octavo.errors import OctavoError

_log = logging.getLogger("octavo.api")


async def run(launch: ApiLaunch) -> int:
    """Serve until told to stop."""
    values = dict(launch.config)
    config = engine_config(values.pop("model"), values)
    set_up_logging(config.log_level)
    peers = Peers(launch.number, launch.count, Path(launch.folder))
    service = Service(config, EngineClient(), peers, epoch=launch.epoch, created=launch.created)
    http = http_server(public_app(service), config, tls_context(config))
    stop = asyncio.Event()

    async def take_stop() -> None:
        stop.set()

    peers.answers["stop"] = take_stop
    await peers.listen()
    await service.join(Path(launch.model_path), launch.place)
    public = listen(config.host, launch.port, "port", shared=True)
    service.engine.stages = await peers.call(FIRST, "joined", launch.number)
    serving = asyncio.ensure_future(http.serve([public]))
    _log.info("API process %d takes requests", launch.number)
    await stop.wait()
    http.should_exit = True
    await serving
    peers.close()
    await service.close()
    return 0


def main() -> int:
    stdin = sys.stdin.fileno()
    launch = msgspec.msgpack.decode(read_frame(stdin), type=ApiLaunch)
    end_with_owner(stdin)
    try:
        return uvloop.run(run(launch))
    except OctavoError as error:
        _log.error("API process %d cannot go on: %s", launch.number, error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
