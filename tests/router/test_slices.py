"""EndpointSlices followed through a small API server over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from octavo.errors import ConfigError
from octavo_router.membership import Endpoint
from octavo_router.slices import ClusterAccess, SliceMembership, endpoints_of


def slice_of(
    name: str, *pods: tuple[str, str] | tuple[str, str, dict[str, bool]], **more: Any
) -> dict[str, Any]:
    """An EndpointSlice of pods: (name, address) or (name, address, conditions)."""
    endpoints = [
        {
            "addresses": [pod[1]],
            "targetRef": {"kind": "Pod", "name": pod[0]},
            "conditions": pod[2] if len(pod) > 2 else {"ready": True},
        }
        for pod in pods
    ]
    ports = [{"name": "http", "port": 8000}, {"name": "private", "port": 8001}]
    metadata = {"name": name, "labels": {"kubernetes.io/service-name": "smollm2-engine"}}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints, "ports": ports, **more}


class FakeApi:
    """List and watch of EndpointSlices: versions, bookmarks, pages, expiry and refusal."""

    def __init__(self) -> None:
        self.version = 100
        self.slices: dict[str, dict[str, Any]] = {}
        self.watchers: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.requests: list[Any] = []
        self.refuse: int | None = None
        self.page = 500
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self.refuse:
            message = "endpointslices.discovery.k8s.io is forbidden: User cannot list"
            return web.json_response({"kind": "Status", "message": message}, status=self.refuse)
        if "watch" in request.query:
            return await self.watch(request)
        start = int(request.query.get("continue", 0))
        names = sorted(self.slices)[start : start + self.page]
        more = {"continue": str(start + self.page)} if start + self.page < len(self.slices) else {}
        metadata = {"resourceVersion": str(self.version), **more}
        return web.json_response({"metadata": metadata, "items": [self.slices[n] for n in names]})

    async def watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.watchers.append(queue)
        try:
            while (event := await queue.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                await response.write(line[:7])  # an event comes in pieces
                await response.write(line[7:])
        finally:
            self.watchers.remove(queue)
        return response

    def send(self, kind: str, item: dict[str, Any]) -> None:
        for queue in self.watchers:
            queue.put_nowait({"type": kind, "object": item})

    def change(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            del self.slices[item["metadata"]["name"]]
        else:
            self.slices[item["metadata"]["name"]] = item
        self.send(kind, item)

    def end_watches(self) -> None:
        for queue in self.watchers:
            queue.put_nowait(None)


class Following:
    """A membership at work and the lists it gave."""

    def __init__(self, api: FakeApi, membership: SliceMembership) -> None:
        self.api, self.membership = api, membership
        self.lists: list[list[Endpoint]] = []

    async def until(self, *names: str, seconds: float = 30) -> None:
        async with asyncio.timeout(seconds):
            while not self.lists or [e.name for e in self.lists[-1]] != list(names):
                await asyncio.sleep(0.005)

    async def until_watching(self) -> None:
        async with asyncio.timeout(30):
            while not self.api.watchers:
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def following(tmp_path: Path, api: FakeApi) -> AsyncIterator[Following]:
    app = web.Application()
    path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
    app.router.add_get(path, api.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    token = tmp_path / "token"
    token.write_text("first\n")
    access = ClusterAccess(f"http://127.0.0.1:{port}", token, None)
    follow = Following(api, SliceMembership(access, "smollm2-engine", "models", backoff_s=(0.02, 0.1)))
    task = asyncio.create_task(follow.membership.run(follow.lists.append))
    try:
        yield follow
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()


def test_slices_are_listed_then_followed(tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices["s1"] = slice_of("s1", ("pod-a", "10.0.0.1"))
        async with following(tmp_path, api) as follow:
            await follow.until("pod-a")
            assert follow.lists[-1] == [Endpoint("pod-a", "http://10.0.0.1:8000", "http://10.0.0.1:8001")]
            await follow.until_watching()
            api.change("ADDED", slice_of("s2", ("pod-b", "10.0.0.2")))
            await follow.until("pod-a", "pod-b")
            api.change(
                "MODIFIED", slice_of("s2", ("pod-b", "10.0.0.2", {"ready": False, "terminating": True}))
            )
            async with asyncio.timeout(30):
                while not follow.lists[-1][1].terminating:
                    await asyncio.sleep(0.005)
            api.change("DELETED", api.slices["s2"])
            await follow.until("pod-a")
            assert follow.membership.problem == ""
            first, watch = api.requests[0], api.requests[1]
            assert first.headers["Authorization"] == "Bearer first"
            assert first.query["labelSelector"] == "kubernetes.io/service-name=smollm2-engine"
            assert (watch.query["resourceVersion"], watch.query["allowWatchBookmarks"]) == ("100", "true")
            assert int(watch.query["timeoutSeconds"]) > 0

    asyncio.run(main())


def test_a_watch_that_ends_goes_on_from_the_last_bookmark(tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        async with following(tmp_path, api) as follow:
            await follow.until_watching()
            (tmp_path / "token").write_text("rotated")
            api.send("BOOKMARK", {"metadata": {"resourceVersion": "175"}})
            api.end_watches()
            async with asyncio.timeout(30):
                while len(api.requests) < 3:
                    await asyncio.sleep(0.005)
            again = api.requests[2]
            assert (again.query.get("watch"), again.query["resourceVersion"]) == ("1", "175")
            assert again.headers["Authorization"] == "Bearer rotated"

    asyncio.run(main())


def test_an_expired_version_leads_to_a_new_list(tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices["s1"] = slice_of("s1", ("pod-a", "10.0.0.1"))
        async with following(tmp_path, api) as follow:
            await follow.until("pod-a")
            await follow.until_watching()
            api.slices = {"s9": slice_of("s9", ("pod-z", "10.0.0.9"))}  # events that were missed
            api.send("ERROR", {"code": 410, "reason": "Expired", "message": "too old resource version"})
            await follow.until("pod-z")

    asyncio.run(main())


def test_a_long_list_comes_in_pages(tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        api.page = 2
        for number in range(5):
            api.slices[f"s{number}"] = slice_of(f"s{number}", (f"pod-{number}", f"10.0.0.{number}"))
        async with following(tmp_path, api) as follow:
            await follow.until(*(f"pod-{n}" for n in range(5)))

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_role_that_is_missing_and_recovers(tmp_path: Path, status: int) -> None:
    async def main() -> None:
        api = FakeApi()
        api.refuse = status
        api.slices["s1"] = slice_of("s1", ("pod-a", "10.0.0.1"))
        async with following(tmp_path, api) as follow:
            async with asyncio.timeout(30):
                while str(status) not in follow.membership.problem:
                    await asyncio.sleep(0.005)
            problem = follow.membership.problem
            assert "forbidden: User cannot list" in problem
            assert "get, list and watch on endpointslices.discovery.k8s.io in namespace models" in problem
            api.refuse = None
            await follow.until("pod-a")
            assert follow.membership.problem == ""

    asyncio.run(main())


def test_the_last_list_stays_while_the_api_server_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        api.slices["s1"] = slice_of("s1", ("pod-a", "10.0.0.1"))
        async with following(tmp_path, api) as follow:
            await follow.until("pod-a")
            await follow.until_watching()
            api.refuse, api.slices = 500, {}
            api.end_watches()
            async with asyncio.timeout(30):
                while "500" not in follow.membership.problem:
                    await asyncio.sleep(0.005)
            assert [e.name for e in follow.lists[-1]] == ["pod-a"]

    asyncio.run(main())


def test_ports_and_addresses_are_taken_from_the_slice() -> None:
    ports = [{"name": "http", "port": 80}, {"name": "private", "port": 81}]
    six = slice_of("b", ("pod-a", "fd00::1"), ("pod-b", "fd00::2"), addressType="IPv6", ports=ports)
    four = slice_of("c", ("pod-a", "10.0.0.1"))
    names = slice_of("d", ("pod-x", "example.org"), addressType="FQDN")
    other = slice_of("e", ("pod-y", "10.0.0.7"), ports=[{"name": "http", "port": 80}])
    empty = {"metadata": {"name": "f"}, "addressType": "IPv4", "endpoints": None, "ports": None}
    assert endpoints_of([six, four, names, other, empty]) == [
        Endpoint("pod-a", "http://10.0.0.1:8000", "http://10.0.0.1:8001"),
        Endpoint("pod-b", "http://[fd00::2]:80", "http://[fd00::2]:81"),
    ]


def test_a_pod_in_two_slices_is_terminating_only_where_all_say_so() -> None:
    going = slice_of("a", ("pod-a", "10.0.0.1", {"ready": False, "terminating": True}))
    here = slice_of("b", ("pod-a", "10.0.0.1"))
    assert [e.terminating for e in endpoints_of([going, here])] == [False]
    assert [e.terminating for e in endpoints_of([going])] == [True]


def test_a_pod_that_is_not_ready_yet_is_known_so_that_the_router_can_ask_it_itself() -> None:
    assert len(endpoints_of([slice_of("a", ("pod-a", "10.0.0.1", {"ready": False}))])) == 1


def test_outside_a_cluster_a_service_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--endpoints-file"):
        ClusterAccess.in_pod({})
    access = ClusterAccess.in_pod({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert access.base_url == "https://[fd00::1]:6443"
