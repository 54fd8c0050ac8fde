"""Engines that die, fall silent, refuse or leave; clients that leave; endpoints that come and go."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engines import FakeEngine, Site, serving, write_endpoints

from octavo_router.engine import Engine


def engines(count: int) -> list[FakeEngine]:
    return [FakeEngine(f"e{i}") for i in range(count)]


def ask(number: int, **more: object) -> dict[str, Any]:
    return {"model": "fake", "prompt": f"{number} is the beginning of another prompt " + "x" * 200, **more}


async def many(site: Site, count: int, **more: object) -> list[tuple[int, Any, Any]]:
    posts = (site.post("/v1/completions", ask(i, **more)) for i in range(count))
    return list(await asyncio.gather(*posts))


def idle(engine: Engine) -> bool:
    """As the router sees it, nothing speaks against a new request there."""
    seen = engine.candidate(0)
    return engine.takes_work and not engine.suspect and seen.running == 0 and seen.queued_tokens == 0


def test_clients_that_leave_before_the_headers_leave_nothing_counted(tmp_path: Path) -> None:
    """Case 25."""

    async def main() -> None:
        async with serving(tmp_path, engines(3)) as site:
            for engine in site.engines:
                engine.hold = asyncio.Event()

            async def cut(number: int) -> None:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await site.post("/v1/completions", ask(number, stream=number % 2 == 0))

            await asyncio.gather(*(cut(i) for i in range(200)))
            await site.until(lambda: set(site.inflight().values()) == {0})
            # The engines are told at once: a request that had reached one is over there too.
            await site.until(lambda: all(e.running == 0 for e in site.engines))
            for engine in site.engines:
                engine.hold = None
            await site.engines[0].restart()
            await site.until_ready(*site.engines)
            # The router has heard from each that it is well and idle; until then it prefers the others.
            await site.until(lambda: all(idle(e) for e in site.fleet.engines.values()))
            counts = Counter([await site.complete(f"fresh {i} " + "y" * 200) for i in range(50)])
            assert set(counts) == {"e0", "e1", "e2"}
            assert max(counts.values()) <= 30
            assert await site.metric("inflight") == 0

    asyncio.run(main())


def test_a_fault_of_the_router_itself_comes_in_the_envelope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            monkeypatch.delattr(type(site.fleet), "select")
            status, _, body = await site.post("/v1/completions", ask(1))
            assert (status, body["error"]["code"]) == (500, "internal_error")
            status, headers, body = await site.post("/v1/models", {})
            assert (status, body["error"]["code"]) == (405, "method_not_allowed")
            assert "GET" in headers["Allow"]

    asyncio.run(main())


def test_a_client_that_leaves_in_mid_stream_ends_the_stream_at_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            (engine,) = site.engines
            engine.tokens, engine.token_s = 10_000, 0.01
            response = await site.client.post(site.url + "/v1/completions", json=ask(0, stream=True))
            await response.content.readany()
            assert engine.running == 1
            response.close()
            await site.until(lambda: engine.running == 0 and engine.aborted == 1)
            await site.until(lambda: site.inflight() == {"e0": 0})
            assert await site.metric("requests_total", outcome="client_gone") == 1

    asyncio.run(main())


def test_a_silent_engine_delays_its_own_requests_by_a_bound_and_no_others(tmp_path: Path) -> None:
    """Case 29."""

    async def main() -> None:
        async with serving(tmp_path, engines(3)) as site:
            silent = site.engines[0]
            silent.mode = "silent"
            answers = await many(site, 100)
            assert {status for status, _, _ in answers} == {200}
            assert {headers["x-octavo-engine"] for _, headers, _ in answers} == {"e1", "e2"}
            assert await site.metric("retries_total", endpoint="e0", reason="lost") == len(silent.seen) > 0
            assert not site.fleet.engines["e0"].alive
            seen = len(silent.seen)
            assert {status for status, _, _ in await many(site, 20)} == {200}
            assert len(silent.seen) == seen  # nobody waits for it again
            silent.mode = "ok"
            await site.until_ready(*site.engines)  # back by itself

    asyncio.run(main())


def test_when_all_engines_are_silent_clients_get_503_instead_of_hanging(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            for engine in site.engines:
                engine.mode = "silent"
            for status, headers, body in await many(site, 4):
                assert status == 503 and int(headers["Retry-After"]) >= 1
                assert body["error"]["code"] == "service_unavailable"

    asyncio.run(main())


def test_requests_that_have_not_started_survive_the_death_of_their_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            victim, other = site.engines
            victim.hold = asyncio.Event()
            asks = [
                asyncio.create_task(site.post("/v1/completions", ask(i, stream=i % 2 == 0)))
                for i in range(20)
            ]
            await site.until(lambda: victim.running > 0 and victim.running + len(other.seen) == 20)
            await victim.stop()
            assert {status for status, _, _ in await asyncio.gather(*asks)} == {200}
            assert len(other.seen) == 20
            await site.until(lambda: not site.fleet.engines["e0"].alive)
            assert site.inflight() == {"e0": 0, "e1": 0}

    asyncio.run(main())


def test_a_chat_stream_that_has_only_said_its_role_survives_the_death_of_its_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            victim = site.engines[0]
            victim.prefill = asyncio.Event()

            def chat(number: int) -> dict[str, Any]:
                messages = [{"role": "user", "content": f"{number} is first " + "x" * 100}]
                return {"model": "fake", "stream": True, "messages": messages}

            asks = [asyncio.create_task(site.post("/v1/chat/completions", chat(i))) for i in range(10)]
            await site.until(lambda: victim.running > 0 and sum(len(e.seen) for e in site.engines) == 10)
            await victim.stop()
            for status, _, data in await asyncio.gather(*asks):
                assert status == 200 and data.count(b'"role"') == 1
                assert data.count(b'"from": "e1"') == 4 and data.endswith(b"data: [DONE]\n\n")

    asyncio.run(main())


def test_a_refused_connection_drops_the_engine_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        # Polls that far apart do not find out; the request does.
        async with serving(tmp_path, engines(2), poll_interval_s=60) as site:
            await site.engines[0].stop()
            assert {status for status, _, _ in await many(site, 20)} == {200}
            assert not site.fleet.engines["e0"].alive
            assert await site.metric("endpoint_ready", endpoint="e0") == 0

    asyncio.run(main())


def test_an_engine_that_resets_each_request_is_tried_once_then_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            site.engines[0].mode = "dying"
            answers = await many(site, 20)
            assert {headers["x-octavo-engine"] for _, headers, _ in answers} == {"e1"}
            assert await site.metric("retries_total", reason="reset") == len(site.engines[0].seen) > 0

    asyncio.run(main())


def test_a_lone_engine_that_closed_a_kept_connection_is_asked_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            site.engines[0].mode = "dying once"
            assert await site.complete("again") == "e0"
            assert len(site.engines[0].seen) == 2

    asyncio.run(main())


def test_a_draining_engine_refuses_and_its_requests_go_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2), poll_interval_s=60) as site:
            site.engines[0].mode = "refusing"
            assert {status for status, _, _ in await many(site, 20)} == {200}

    asyncio.run(main())


def test_the_last_refusal_is_passed_on_with_its_retry_after(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            site.engines[0].mode = "refusing"
            status, headers, body = await site.post("/v1/completions", ask(0))
            assert (status, headers["Retry-After"], body["error"]["message"]) == (503, "7", "draining")

    asyncio.run(main())


@pytest.mark.parametrize("state", ["stalled", "dead"])
def test_requests_that_wait_at_an_engine_that_says_it_is_stuck_go_elsewhere(
    tmp_path: Path, state: str
) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0"), FakeEngine("e1")]) as site:
            stuck = site.engines[0]
            stuck.hold = asyncio.Event()
            waiting = [asyncio.create_task(site.post("/v1/completions", ask(i))) for i in range(6)]
            await site.until(lambda: site.fleet.engines["e0"].inflight > 0)
            stuck.state = state
            async with asyncio.timeout(30):
                answers = await asyncio.gather(*waiting)
            assert {status for status, _, _ in answers} == {200}
            stuck.hold.set()
            stuck.state = "ready"
            await site.until(lambda: site.fleet.engines["e0"].takes_work)
            assert not site.fleet.engines["e0"].lost.done()

    asyncio.run(main())


@pytest.mark.parametrize("state", ["loading", "warming", "draining", "paused", "sleeping", "stalled", "dead"])
def test_only_ready_engines_get_work(tmp_path: Path, state: str) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            site.engines[0].state = state
            await site.until(lambda: site.fleet.engines["e0"].state == state)
            await many(site, 10)
            assert site.engines[0].seen == []
            site.engines[1].state = state
            await site.until(lambda: site.fleet.engines["e1"].state == state)
            status, headers, body = await site.post("/v1/completions", ask(0))
            assert status == 503 and "Retry-After" in headers and state in body["error"]["message"]
            status, body = await site.get("/ready")
            assert status == 503 and state in body["error"]

    asyncio.run(main())


def test_a_stream_that_breaks_ends_with_an_error_event(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            site.engines[0].mode = "breaking"
            status, _, data = await site.post("/v1/completions", ask(0, stream=True))
            events = data.decode().strip().split("\n\n")
            assert status == 200 and events[-1] == "data: [DONE]"
            assert json.loads(events[-2][6:])["error"]["code"] == "service_unavailable"
            assert json.loads(events[0][6:])["n"] == 0
            assert await site.metric("requests_total", outcome="broken") == 1
            assert site.inflight() == {"e0": 0}

    asyncio.run(main())


def test_endpoints_come_and_go_with_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        three = engines(3)
        async with serving(tmp_path, three) as site:
            site.set_engines(three[:1])
            await site.until(lambda: set(site.fleet.engines) == {"e0"})
            assert {await site.complete(f"{i}") for i in range(5)} == {"e0"}
            assert "e1" not in (await site.get("/metrics"))[1].split("octavo_router:endpoint_ready")[-1]
            site.set_engines(three)
            await site.until_ready(*three)

    asyncio.run(main())


def test_an_endpoint_with_another_address_is_another_engine(tmp_path: Path) -> None:
    async def main() -> None:
        old, new = FakeEngine("e0"), FakeEngine("e0")
        async with serving(tmp_path, [old]) as site:
            await site.complete("z" * 100)
            await new.start()
            try:
                site.set_engines([new])
                await site.until(lambda: site.fleet.engines["e0"].endpoint.url.endswith(str(new.port)))
                await site.until_ready(new)
                assert site.router.index.blocks_of("e0") == 0
                await site.complete("z" * 100)
                assert len(new.seen) == 1
            finally:
                await new.stop()

    asyncio.run(main())


def test_a_terminating_endpoint_finishes_its_stream_and_gets_no_new_work(tmp_path: Path) -> None:
    async def main() -> None:
        two = engines(2)
        async with serving(tmp_path, two) as site:
            for engine in two:
                engine.tokens, engine.token_s = 30, 0.01
            stream = await site.client.post(site.url + "/v1/completions", json=ask(0, stream=True))
            victim = stream.headers["x-octavo-engine"]
            entries = [e.endpoint | {"terminating": e.name == victim} for e in two]
            file = tmp_path / "endpoints.json"
            (tmp_path / "new").write_text(json.dumps({"endpoints": entries}))
            (tmp_path / "new").replace(file)
            await site.until(lambda: not site.fleet.engines[victim].takes_work)
            answers = await many(site, 10)
            assert victim not in {headers["x-octavo-engine"] for _, headers, _ in answers}
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")

    asyncio.run(main())


def test_a_broken_endpoints_file_leaves_the_last_good_list_and_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            file = tmp_path / "endpoints.json"
            file.write_text('{"endpoints": [{"name": 5}]}')
            await site.until(lambda: "name" in site.router.membership.problem)
            assert await site.complete("still") == "e0"
            write_endpoints(file, [])
            await site.until(lambda: site.fleet.engines == {})
            status, body = await site.get("/ready")
            assert status == 503 and "no endpoints" in body["error"]
            file.unlink()
            await site.until(lambda: "No such file" in site.router.membership.problem)
            status, body = await site.get("/ready")
            assert "No such file" in body["error"]

    asyncio.run(main())


def test_a_wrong_private_key_is_said_in_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1), wait=False, private_key="wrong") as site:
            await site.until(lambda: "OCTAVO_PRIVATE_KEY" in site.router.not_ready())
            with pytest.raises(aiohttp.ClientResponseError, match="503"):
                await site.client.get(site.url + "/ready", raise_for_status=True)

    asyncio.run(main())
