"""Engines without a model: real HTTP, real rendering and block hashes, a simulated prefix cache and load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.core.block_hash import BlockHasher
from octavo.errors import InvalidRequest
from octavo.prompt.anthropic import MESSAGES
from octavo.prompt.assets import PromptAssets
from octavo.prompt.renderer import PromptRenderer
from octavo.prompt.responses import RESPONSES
from octavo_router.app import Router, RouterSettings, build_app
from octavo_router.membership import FileMembership

PRIVATE_KEY = "private"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"


def byte_assets(template: str = TEMPLATE) -> PromptAssets:
    """A tokenizer of one token per byte, and a plain template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PromptAssets(tokenizer_json=tokenizer.to_str(), vocab_size=len(alphabet), chat_template=template)


ASSETS = byte_assets()


class FakeEngine:
    """One engine replica on two ports. Its behaviour is changed by setting attributes.

    ``mode``: ok, silent (takes connections and never answers), dying (resets after reading a request), dying
    once, refusing (503), breaking (resets in mid-stream). ``hold``: an event for which requests wait before
    their first byte; ``prefill``: one for which chat streams wait between role and first token.
    """

    def __init__(
        self, name: str, *, model: str = "fake", block_size: int = 16, assets: PromptAssets = ASSETS
    ):
        self.name, self.model, self.assets = name, model, assets
        self.block_size = block_size
        self.max_model_len = 4096
        self.epoch = uuid.uuid4().hex
        self.mode = "ok"
        self.state = "ready"
        self.hold: asyncio.Event | None = None
        self.prefill: asyncio.Event | None = None
        self.tokens = 4
        self.token_s = 0.0
        self.first_token_s = 0.0
        self.root: str | None = None
        self.load_header = True
        self.caching = True
        self.tokenises = True
        self.cache: set[bytes] = set()
        self.running = 0
        self.most_running = 0
        self.seen: list[dict[str, Any]] = []  # body, path, headers, cached tokens
        self.aborted = 0
        self.port = self.private_port = 0
        self._runners: list[web.AppRunner] = []
        self._renderer = PromptRenderer(assets)

    # --- lifecycle

    async def start(self) -> FakeEngine:
        public = web.Application(client_max_size=2**26)
        public.router.add_post("/v1/chat/completions", self._generate)
        public.router.add_post("/v1/completions", self._generate)
        public.router.add_post("/v1/responses", self._generate)
        public.router.add_post("/v1/messages", self._generate)
        for path in ("/v1/responses/{id}", "/v1/responses/{id}/cancel"):
            public.router.add_route("*", path, self._kept)
        public.router.add_post("/tokenize", self._tokenize)
        public.router.add_get("/", self._page)
        private = web.Application()
        private.router.add_get("/server_info", self._server_info)
        private.router.add_get("/prompt_assets", self._prompt_assets)
        self.port = await self._listen(public, self.port)
        self.private_port = await self._listen(private, self.private_port)
        return self

    async def _listen(self, app: web.Application, port: int) -> int:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self._runners.append(runner)
        return int(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]

    async def stop(self) -> None:
        """As when the process is killed: nothing listens, open connections break."""
        runners, self._runners = self._runners, []
        for runner in runners:
            for connection in list(runner.server.connections):  # type: ignore[union-attr]
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def restart(self, **changes: Any) -> None:
        """Another process on the same ports: new epoch, empty cache."""
        await self.stop()
        self.epoch, self.cache, self.mode, self.state = uuid.uuid4().hex, set(), "ok", "ready"
        for name, value in changes.items():
            setattr(self, name, value)
        await self.start()

    @property
    def endpoint(self) -> dict[str, str]:
        return {
            "name": self.name,
            "url": f"http://127.0.0.1:{self.port}",
            "private_url": f"http://127.0.0.1:{self.private_port}",
        }

    @property
    def load(self) -> dict[str, Any]:
        return {
            "running": self.running, "waiting": 0, "waiting_tokens": 0, "kv_usage": 0.0,
            "prefill_tokens_per_s": 5000.0,
        }  # fmt: skip

    # --- private port

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        if self.mode == "silent":
            await asyncio.Event().wait()
        if request.headers.get("Authorization") != f"Bearer {PRIVATE_KEY}":
            return web.Response(status=401)
        hasher = BlockHasher("sha256", self.block_size)
        return web.json_response(
            {
                "version": "0.1.0", "state": self.state, "epoch": self.epoch, "ranks": 1,
                "model": {
                    "name": self.model, "aliases": [], "adapters": [], "max_model_len": self.max_model_len,
                },
                "prompt": {
                    "tokenizer_digest": self.assets.tokenizer_digest,
                    "template_digest": self.assets.template_digest,
                },
                "kv": {
                    "hash": "sha256", "root": self.root or hasher.root.hex(), "block_size": self.block_size,
                    "num_blocks": 10_000, "groups": [{"kind": "full"}],
                },
                "limits": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_queue": 1024},
                "load": self.load,
            }
        )  # fmt: skip

    async def _prompt_assets(self, request: web.Request) -> web.Response:
        return web.Response(body=self.assets.to_bytes())

    # --- public port

    def _cached(self, path: str, body: dict[str, Any]) -> tuple[int, int]:
        if not self.tokenises:
            return 0, 0
        dialect = {"/v1/responses": RESPONSES, "/v1/messages": MESSAGES}.get(path)
        if dialect is not None:
            ids = self._renderer.chat(dialect.chat(body))
        elif path.endswith("chat/completions"):
            ids = self._renderer.chat(body)
        else:
            ids = self._renderer.completion(body.get("prompt"))[0]
        hashes = BlockHasher("sha256", self.block_size).hash_blocks(ids, body.get("cache_salt"))
        hit = next((i for i, h in enumerate(hashes) if h not in self.cache), len(hashes))
        if self.caching:
            self.cache.update(hashes)
        return len(ids), min(hit, (len(ids) - 1) // self.block_size) * self.block_size

    async def _misbehave(self, request: web.Request) -> web.Response | None:
        if self.mode == "silent":
            await asyncio.Event().wait()
        if self.mode in ("dying", "dying once"):
            self.mode = "ok" if self.mode == "dying once" else self.mode
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
        if self.mode == "refusing":
            error = {"message": "draining", "type": "service_unavailable_error", "param": None, "code": "x"}
            return web.json_response({"error": error}, status=503, headers={"Retry-After": "7"})
        return None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        record: dict[str, Any] = {"path": request.path, "headers": request.headers, "body": body}
        self.seen.append(record)
        try:
            if (refusal := await self._misbehave(request)) is not None:
                return refusal
            try:
                total, cached = self._cached(request.path, body)
            except InvalidRequest as error:
                return web.json_response(
                    {"error": {"message": error.message, "code": error.code}}, status=400
                )
            record["cached"] = cached
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(self.first_token_s)
            return await self._answer(request, body, total, cached)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _kept(self, request: web.Request) -> web.StreamResponse:
        """A response by its id."""
        if (refusal := await self._misbehave(request)) is not None:
            return refusal
        asked = {"method": request.method, "path": request.path_qs, "from": self.name}
        return web.json_response(asked, status=200 if self.epoch in request.path else 404)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], total: int, cached: int
    ) -> web.StreamResponse:
        usage = {"prompt_tokens": total, "prompt_tokens_details": {"cached_tokens": cached}}
        headers = {"X-Octavo-Load": json.dumps(self.load)} if self.load_header else {}
        if not body.get("stream"):
            await asyncio.sleep(self.tokens * self.token_s)
            choices = [{"index": 0, "text": self.name * self.tokens}]
            name = f"resp_{self.epoch}{uuid.uuid4().hex}"
            return web.json_response({"id": name, "choices": choices, "usage": usage}, headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.path.endswith("chat/completions"):
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            if self.prefill is not None:
                await self.prefill.wait()
        for number in range(self.tokens):
            await response.write(f"data: {json.dumps({'n': number, 'from': self.name})}\n\n".encode())
            if self.mode == "breaking":
                assert request.transport is not None
                await asyncio.sleep(0.05)
                request.transport.abort()
            await asyncio.sleep(self.token_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        if "x-octavo-router" in request.headers:
            await response.write(f": cached_tokens {cached}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _page(self, request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "default-src 'none'"}
        return web.Response(text="<title>a chat</title>", content_type="text/html", headers=headers)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.running += 1
        self.seen.append({"path": request.path, "body": body, "headers": request.headers})
        try:
            if (refusal := await self._misbehave(request)) is not None:
                return refusal
            if self.hold is not None:
                await self.hold.wait()
            tokens = self._renderer.encode(body["prompt"])
            return web.json_response({"count": len(tokens), "tokens": tokens})
        finally:
            self.running -= 1


class Site:
    """A router in this process, its engines, and a client."""

    def __init__(self, router: Router, url: str, client: aiohttp.ClientSession, file: Path) -> None:
        self.router, self.url, self.client, self._file = router, url, client, file
        self.engines: list[FakeEngine] = []

    @property
    def fleet(self) -> Any:
        return self.router.fleet

    def inflight(self) -> dict[str, int]:
        return {name: engine.inflight for name, engine in self.fleet.engines.items()}

    def set_engines(self, engines: list[FakeEngine]) -> None:
        """Rewrite the endpoints file."""
        write_endpoints(self._file, engines)

    async def until(self, condition: Any, seconds: float = 30.0) -> None:
        """Wait for something that the router will notice by itself."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_ready(self, *engines: FakeEngine) -> None:
        """Every one of these takes work, and prefixes are named as the engines do it (or never will be)."""
        names = {e.name for e in engines}
        await self.until(
            lambda: (
                not self.router.not_ready()
                and names <= {n for n, e in self.fleet.engines.items() if e.takes_work}
            )
        )

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        """Status, headers, and the JSON (or the bytes of a stream)."""
        async with self.client.post(self.url + path, json=body, **kwargs) as response:
            data = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, response.headers, json.loads(data) if is_json else data

    async def complete(self, prompt: str, **more: Any) -> str:
        """The name of the engine that answered a completion."""
        status, headers, body = await self.post(
            "/v1/completions", {"model": "fake", "prompt": prompt, **more}
        )
        assert status == 200, body
        return str(headers["x-octavo-engine"])

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.client.get(self.url + path, **kwargs) as response:
            data = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(data) if is_json else data.decode()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        _, text = await self.get("/metrics")
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith("octavo_router:" + name)]
        lines = [x for x in lines if x[len("octavo_router:" + name)] in "{ " and all(w in x for w in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def write_endpoints(file: Path, engines: list[FakeEngine]) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"endpoints": [e.endpoint for e in engines]}))
    new.replace(file)


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, engines: list[FakeEngine], *, start: bool = True, wait: bool = True, **settings: Any
) -> AsyncIterator[Site]:
    """Start the engines and a router before them; stop all at the end."""
    if start:
        for engine in engines:
            await engine.start()
    file = tmp_path / "endpoints.json"
    write_endpoints(file, engines)
    defaults: dict[str, Any] = {"private_key": PRIVATE_KEY, "poll_interval_s": 0.1, "poll_timeout_s": 0.5}
    router = Router(RouterSettings(**{**defaults, **settings}), FileMembership(file))
    config = uvicorn.Config(
        build_app(router), host="127.0.0.1", port=0, log_config=None, access_log=False, server_header=False,
        date_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
            if task.done():
                task.result()
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            site = Site(router, url, client, file)
            site.engines = engines
            if wait:
                await site.until_ready(*engines)
            yield site
    finally:
        server.should_exit = True
        await task
        for engine in engines:
            await engine.stop()
