"""Responses and Anthropic's messages through the router: routed by what they say, kept ones by their id."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fake_engines import FakeEngine, Site, serving

LONG = "The shared prefix of many requests, word after word. " * 12


def engines(count: int) -> list[FakeEngine]:
    return [FakeEngine(f"e{i}") for i in range(count)]


@pytest.mark.parametrize("exact", [True, False])
def test_one_prefix_stays_with_one_engine_whichever_api_says_it(tmp_path: Path, exact: bool) -> None:
    async def main() -> None:
        three = engines(3)
        if not exact:
            three[2].block_size = 32
        async with serving(tmp_path, three) as site:
            await site.until(lambda: exact == (site.fleet.exact("fake") is not None))
            chosen = set()
            for number in range(4):
                message = {"role": "user", "content": f"{LONG} {number}"}
                for path, name in (
                    ("/v1/chat/completions", "messages"),
                    ("/v1/responses", "input"),
                    ("/v1/messages", "messages"),
                ):
                    status, headers, body = await site.post(path, {"model": "fake", name: [message]})
                    assert status == 200, body
                    chosen.add(headers["x-octavo-engine"])
            assert len(chosen) == 1
            name = chosen.pop()
            if exact:
                assert all(seen["cached"] >= 624 for e in site.engines for seen in e.seen[1:])
                assert await site.metric("predicted_cached_tokens_total", endpoint=name) > 11 * 600
                assert await site.metric("overpredicted_cached_tokens_total") == 0

    asyncio.run(main())


async def responded(site: Site, **fields: Any) -> tuple[str, str]:
    """The engine that answered, and the id of its response."""
    status, headers, body = await site.post("/v1/responses", {"model": "fake", "input": "hello", **fields})
    assert status == 200, body
    return headers["x-octavo-engine"], body["id"]


def test_a_response_is_followed_read_cancelled_and_deleted_where_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(4)) as site:
            for number in range(6):
                engine, name = await responded(site, input=f"{number} " + LONG)
                for _ in range(3):
                    assert (await responded(site, previous_response_id=name, input=f"{number}"))[0] == engine
                for method, path in (
                    ("GET", f"/v1/responses/{name}?include=x"),
                    ("DELETE", f"/v1/responses/{name}"),
                    ("POST", f"/v1/responses/{name}/cancel"),
                ):
                    async with site.client.request(method, site.url + path) as answer:
                        seen = await answer.json()
                    assert answer.status == 200
                    assert seen == {"method": method, "path": path, "from": engine}
            assert set(site.inflight().values()) == {0}
            async with site.client.get(site.url + f"/v1/responses/resp_{'0' * 64}") as answer:
                assert answer.status == 404, "some engine says that it has no such response"

    asyncio.run(main())


def test_a_response_whose_engine_takes_no_work_is_not_followed_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            name, response = await responded(site)
            holder = next(engine for engine in site.engines if engine.name == name)
            holder.mode = "refusing"
            body = {"model": "fake", "input": "x", "previous_response_id": response}
            status, _, _ = await site.post("/v1/responses", body)
            assert status == 503
            other = next(engine for engine in site.engines if engine is not holder)
            assert not any("previous_response_id" in seen["body"] for seen in other.seen)
            await holder.restart()  # what it kept is gone, and any engine says so
            await site.until(lambda: site.fleet.holder(response) is None)
            async with site.client.get(site.url + f"/v1/responses/{response}") as answer:
                assert answer.status == 404

    asyncio.run(main())


def test_errors_of_the_router_have_the_form_of_the_route(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1), api_keys=("key",)) as site:
            body = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            for headers, changes, status, kind in (
                ({}, {}, 401, "authentication_error"),
                ({"x-api-key": "other"}, {}, 401, "authentication_error"),
                ({"x-api-key": "key"}, {"model": "other"}, 404, "not_found_error"),
                ({"x-api-key": "key"}, {"model": 3}, 400, "invalid_request_error"),
            ):
                got, _, answer = await site.post("/v1/messages", {**body, **changes}, headers=headers)
                assert got == status
                assert (answer["type"], answer["error"]["type"]) == ("error", kind)
            for model in ("fake", None):  # None: there is but one
                got, _, _ = await site.post(
                    "/v1/messages", {**body, "model": model}, headers={"x-api-key": "key"}
                )
                assert got == 200
            client = anthropic.AsyncAnthropic(base_url=site.url, api_key="none", max_retries=0)
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**body)
            await client.close()

    asyncio.run(main())


def test_a_stream_that_breaks_is_told_in_the_form_of_its_route(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            site.engines[0].mode = "breaking"
            theirs = anthropic.AsyncAnthropic(base_url=site.url, api_key="any", max_retries=0)
            with pytest.raises(anthropic.APIStatusError, match="broke off"):
                message: Any = {"role": "user", "content": "x"}
                async for _ in await theirs.messages.create(
                    model="fake", max_tokens=5, messages=[message], stream=True
                ):
                    pass
            await theirs.close()
            ours = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="any", max_retries=0)
            with pytest.raises(openai.APIError, match="broke off"):
                async for _ in await ours.responses.create(model="fake", input="x", stream=True):
                    pass
            await ours.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "nothing"),
    [
        (b'event: response.created\ndata: {"a": 1}\n\nevent: response.in_progress\ndata: {}\n\n', True),
        (b'event: message_start\ndata: {"role": 1}\n\nevent: ping\ndata: {}\n\n', True),
        (b"event: response.created\ndata: {}\n\nevent: response.output_item.added\ndata: {}\n\n", False),
        (b"event: message_start\ndata: {}\n\nevent: error\ndata: {}\n\n", False),
        (b"event: message_start\ndata: {}\n", False),
    ],
)
def test_events_that_only_begin_an_answer_are_held_back(data: bytes, nothing: bool) -> None:
    from octavo_router.relay import says_nothing_yet

    assert says_nothing_yet(data) is nothing
