"""What passes through, what the router answers itself, and that streams are not held back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from fake_engines import FakeEngine, serving

from octavo_router import proxy


def test_the_openai_client_works_through_the_router(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            client = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="any")
            async with client:
                assert [m.id async for m in client.models.list()] == ["fake"]
                answer = await client.completions.create(model="fake", prompt="hello")
                assert answer.choices[0].text == "e0e0e0e0"
                stream = await client.completions.create(model="fake", prompt="hello", stream=True)
                assert len([chunk async for chunk in stream]) == 4
                with pytest.raises(openai.NotFoundError) as error:
                    await client.completions.create(model="other", prompt="hello")
                assert error.value.code == "model_not_found"

    asyncio.run(main())


def test_each_model_has_its_own_engines_and_a_body_must_name_one(tmp_path: Path) -> None:
    """Case 28."""

    async def main() -> None:
        two = [FakeEngine("a", model="first"), FakeEngine("b", model="second")]
        async with serving(tmp_path, two) as site:
            for model, name in (("first", "a"), ("second", "b")):
                for prompt in ("one", "two", "three"):
                    _, headers, _ = await site.post("/v1/completions", {"model": model, "prompt": prompt})
                    assert headers["x-octavo-engine"] == name
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                for body in ({"prompt": "p"}, {"prompt": "p", "model": ""}, {"prompt": "p", "model": 5}):
                    status, _, answer = await site.post(path, body)
                    assert (status, answer["error"]["param"]) == (400, "model")
                    assert "first, second" in answer["error"]["message"]
                status, _, answer = await site.post(path, {"model": "third", "prompt": "p"})
                assert (status, answer["error"]["code"]) == (404, "model_not_found")
            assert sum(len(e.seen) for e in two) == 6
            _, body = await site.get("/v1/models")
            assert [m["id"] for m in body["data"]] == ["first", "second"]
            assert (await site.get("/v1/models/second"))[1]["max_model_len"] == 4096
            assert (await site.get("/v1/models/third"))[0] == 404

    asyncio.run(main())


def test_a_body_may_leave_out_the_only_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            status, _, body = await site.post("/tokenize", {"prompt": "abc"})
            assert (status, body["count"]) == (200, 3)

    asyncio.run(main())


def test_the_page_of_any_engine_is_the_page_of_the_endpoint(tmp_path: Path) -> None:
    async def main() -> None:
        engines = [FakeEngine("a", model="first"), FakeEngine("b", model="second")]
        async with serving(tmp_path, engines) as site:
            for method in ("GET", "HEAD"):
                asked = {"Accept": "text/html", "Content-Type": "text/plain"}
                async with site.client.request(method, site.url + "/", headers=asked) as answer:
                    assert (answer.status, answer.content_type) == (200, "text/html")
                    assert answer.headers["Content-Security-Policy"] == "default-src 'none'"
                    assert await answer.text() == ("<title>a chat</title>" if method == "GET" else "")
            for engine in site.engines:
                engine.state = "loading"
            await site.until(lambda: not any(one.takes_work for one in site.fleet.engines.values()))
            assert (await site.get("/"))[0] == 503
            assert (await site.post("/", {}))[0] == 405

    asyncio.run(main())


def test_a_stream_is_passed_on_chunk_by_chunk(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            (engine,) = site.engines
            engine.tokens, engine.token_s = 3, 3600
            body = {"model": "fake", "prompt": "p", "stream": True}
            async with (
                asyncio.timeout(30),
                site.client.post(site.url + "/v1/completions", json=body) as response,
            ):
                # The engine writes no other byte in this test: what is here was not held back for more.
                assert await response.content.readany() == b'data: {"n": 0, "from": "e0"}\n\n'

    asyncio.run(main())


def test_headers_of_one_connection_stay_there_and_the_others_pass(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            sent = {
                "Authorization": "Bearer theirs", "X-Request-Id": "abc-123", "X-Private": "1",
                "Connection": "keep-alive, x-private", "TE": "trailers", "X-Other": "kept",
            }  # fmt: skip
            status, headers, _ = await site.post(
                "/v1/completions", {"model": "fake", "prompt": "p"}, headers=sent
            )
            assert (status, headers["x-request-id"]) == (200, "abc-123")
            seen = site.engines[0].seen[0]["headers"]
            assert (seen["authorization"], seen["x-request-id"]) == ("Bearer theirs", "abc-123")
            assert seen["x-other"] == "kept" and "x-private" not in seen and "te" not in seen
            assert seen["host"] == site.engines[0].endpoint["url"].removeprefix("http://")
            assert headers.getall("X-Octavo-Load") and len(headers.getall("Server")) == 1
            _, headers, _ = await site.post("/v1/completions", {"model": "fake", "prompt": "p"})
            assert len(headers["x-request-id"]) == 32
            assert site.engines[0].seen[1]["headers"]["x-request-id"] == headers["x-request-id"]

    asyncio.run(main())


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_bound_is_refused_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    monkeypatch.setattr(proxy, "LINGER_BYTES", 500)

    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")], max_body_bytes=1000) as site:
            host, port = site.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            length = "Content-Length: 1000000000" if declared else "Transfer-Encoding: chunked"
            lines = (
                "POST /v1/completions HTTP/1.1",
                "Host: x",
                "Content-Type: application/json",
                length,
                "",
                "",
            )
            writer.write("\r\n".join(lines).encode())
            if not declared:
                writer.write(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
            async with asyncio.timeout(30):
                answer = await reader.read()  # to the end: the connection is closed
            writer.close()
            assert answer.startswith(b"HTTP/1.1 413") and b"1000 bytes" in answer
            assert await site.complete("short") == "e0"

    asyncio.run(main())


def test_who_writes_a_body_above_the_bound_to_its_end_reads_the_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")], max_body_bytes=1000) as site:
            got, _, answer = await site.post("/v1/completions", {"model": "fake", "prompt": "x" * 2**23})
            assert (got, answer["error"]["code"]) == (413, "request_too_large")

    asyncio.run(main())


def test_bodies_that_are_no_json_objects_get_the_envelope(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            json_type = {"Content-Type": "application/json"}
            url = site.url + "/v1/completions"
            for data, headers, status, code in (
                (b"{", json_type, 400, "invalid_json"),
                (b"[1]", json_type, 400, "invalid_json"),
                (b"", json_type, 400, "invalid_json"),
                (
                    b"a=b",
                    {"Content-Type": "application/x-www-form-urlencoded"},
                    415,
                    "unsupported_media_type",
                ),
                (b"{}", {**json_type, "Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
            ):
                async with site.client.post(url, data=data, headers=headers) as response:
                    assert response.status == status
                    assert (await response.json())["error"]["code"] == code
                    assert response.headers["x-request-id"]

    asyncio.run(main())


def test_unknown_paths_and_methods_get_the_envelope(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            for path, status, code in (
                ("/v1/nothing", 404, "not_found"), ("/v1/completions", 405, "method_not_allowed"),
                ("/server_info", 404, "not_found"),
            ):  # fmt: skip
                got, body = await site.get(path)
                assert (got, body["error"]["code"]) == (status, code)

    asyncio.run(main())


def test_keys_are_wanted_everywhere_but_for_probes_and_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "keys"
        folder.mkdir()
        (folder / "team").write_text("from-file\n")
        (folder / "..data").write_text("not-a-key")
        settings = {"api_keys": ("from-flag",), "api_key_dir": folder}
        async with serving(tmp_path, [FakeEngine("e0")], **settings) as site:
            body = {"model": "fake", "prompt": "p"}
            for key, status in (
                (None, 401), ("Bearer wrong", 401), ("Bearer ", 401), ("Basic from-flag", 401),
                ("Bearer not-a-key", 401), ("Bearer from-flag", 200), ("bearer from-file", 200),
            ):  # fmt: skip
                headers = {"Authorization": key} if key else {}
                got, _, answer = await site.post("/v1/completions", body, headers=headers)
                assert got == status, key
                assert (await site.get("/v1/models", headers=headers))[0] == status
                if status == 401:
                    assert answer["error"]["code"] == "invalid_api_key"
            assert (await site.get("/anything"))[0] == 401
            for path in ("/", "/health", "/live", "/ready", "/metrics"):
                assert (await site.get(path))[0] == 200
            (folder / "team").write_text("rotated")

            async def rotated() -> bool:
                return (await site.get("/v1/models", headers={"Authorization": "Bearer rotated"}))[0] == 200

            async with asyncio.timeout(30):
                while not await rotated():
                    await asyncio.sleep(0.05)
            assert (await site.get("/v1/models", headers={"Authorization": "Bearer from-file"}))[0] == 401

    asyncio.run(main())


def test_ready_waits_for_the_engines_and_their_assets_and_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine("e0")
        engine.state = "loading"
        async with serving(tmp_path, [engine], wait=False) as site:
            await site.until(lambda: "e0 is loading" in site.router.not_ready())
            status, body = await site.get("/ready")
            assert status == 503 and body["endpoints"]["e0"]["state"] == "loading"
            assert (await site.get("/live"))[0] == 200
            engine.state = "ready"
            await site.until(lambda: not site.router.not_ready())
            status, body = await site.get("/ready")
            assert (status, body["state"], body["routed_by_text"]) == (200, "ready", {})

    asyncio.run(main())


def test_answers_of_the_engine_pass_unchanged(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, [FakeEngine("e0")]) as site:
            body = {"model": "fake", "prompt": "the same", "stream": True}
            _, _, through = await site.post("/v1/completions", body)
            url = site.engines[0].endpoint["url"] + "/v1/completions"
            told = {"X-Octavo-Router": "1"}  # engines then end streams with what their cache held
            async with site.client.post(url, json=body, headers=told) as response:
                assert await response.read() == through
            status, _, answer = await site.post("/v1/completions", {"model": "fake", "prompt": []})
            assert status == 400 and "empty list" in json.dumps(answer)

    asyncio.run(main())
