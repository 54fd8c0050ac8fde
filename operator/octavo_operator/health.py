"""The operator's own port: /healthz (liveness), /readyz (readiness) and /metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


async def serve(host: str, port: int, alive: Callable[[], bool], ready: Callable[[], bool]) -> web.AppRunner:
    """Listen; the caller calls ``cleanup()`` on what is returned. Raises ``OSError`` if the port is taken."""

    def answer(good: Callable[[], bool], word: str) -> Callable[[web.Request], object]:
        async def handle(_: web.Request) -> web.Response:
            return web.Response(text=word) if good() else web.Response(text=f"not {word}", status=503)

        return handle

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", answer(alive, "alive"))  # type: ignore[arg-type]
    app.router.add_get("/readyz", answer(ready, "ready"))  # type: ignore[arg-type]
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
