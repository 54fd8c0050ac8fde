"""An OpenAI endpoint whose answers a test scripts: on the test's own loop, or on a thread for commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from aiohttp import web

Body = dict[str, Any]
# The body and how many requests came before it, to the parts of a stream (bytes), or one whole answer.
Answer = Callable[[Body, int], "AsyncIterator[bytes] | web.Response"]


def event(*choices: Body, **fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": list(choices), **fields}).encode() + b"\n\n"


def text(said: str, **fields: Any) -> Body:
    return {"index": 0, "delta": {"content": said}, "finish_reason": None, **fields}


ROLE = event(text("", delta={"role": "assistant", "content": ""}))
STOP = event({"index": 0, "delta": {}, "finish_reason": "stop"})
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, made: int, cached: int = 0) -> Body:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Fake:
    """Serves ``answer``; ``bodies`` holds every request that came, as (path, body)."""

    def __init__(self, answer: Answer, models: tuple[str, ...] = ("first", "second")) -> None:
        self.bodies: list[tuple[str, Body]] = []
        self.keys: set[str | None] = set()
        self.gone = threading.Event()  # a client left in the middle of a stream
        self._answer, self._models = answer, models
        self.url = ""

    async def _models_route(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self._models]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append((request.path, body))
        self.keys.add(request.headers.get("authorization"))
        answer = self._answer(body, number)
        if isinstance(answer, web.Response):
            return answer
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            async for part in answer:
                await response.write(part)
        except (ConnectionResetError, asyncio.CancelledError):
            self.gone.set()
        return response

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models_route)
        app.router.add_post("/{path:.*}", self._post)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Fake]:
        app = web.Application()
        self.routes(app)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def on_a_thread(self) -> Iterator[Fake]:
        loop, up = asyncio.new_event_loop(), threading.Event()
        stop = asyncio.Event()

        async def main() -> None:
            async with self.served():
                up.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
        thread.start()
        assert up.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)
            loop.close()


def refused(status: int, message: str, param: str | None = None, **headers: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": f"code_{status}"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": error}, status=status, headers=named)
