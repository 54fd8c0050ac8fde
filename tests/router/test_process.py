"""``octavo router`` as a process: its flags, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from fake_engines import PRIVATE_KEY, FakeEngine, write_endpoints

ENV = {**os.environ, "OCTAVO_PRIVATE_KEY": PRIVATE_KEY}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "octavo.cli", "router", *flags]


@contextlib.asynccontextmanager
async def router_process(
    tmp_path: Path, engine: FakeEngine, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, aiohttp.ClientSession]]:
    await engine.start()
    file = tmp_path / "endpoints.json"
    write_endpoints(file, [engine])
    port = free_port()
    args = command("--port", str(port), "--endpoints-file", str(file), *flags)
    process = await asyncio.create_subprocess_exec(*args, env=ENV, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as client:
            yield process, f"http://127.0.0.1:{port}", client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await engine.stop()


async def until_status(client: aiohttp.ClientSession, url: str, status: int) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with client.get(url) as response:
                    if response.status == status:
                        return
            await asyncio.sleep(0.02)


def test_sigterm_ends_readiness_at_once_and_fails_no_request(tmp_path: Path) -> None:
    """Case 32: 20 requests a second, and the client hears of the end 3 seconds late."""

    async def main() -> None:
        engine = FakeEngine("e0")
        async with router_process(tmp_path, engine, "--drain-grace-s", "5") as (process, url, client):
            await until_status(client, url + "/ready", 200)
            body = {"model": "fake", "prompt": "hello"}

            async def ask() -> int:
                # Each on a connection of its own: the listening socket must still be there.
                async with aiohttp.ClientSession() as other, other.post(
                    url + "/v1/completions", json=body
                ) as answer:  # fmt: skip
                    await answer.read()
                    return answer.status

            engine.tokens, engine.token_s = 100, 0.06  # 6 s: it ends after the grace
            slow = asyncio.create_task(client.post(url + "/v1/completions", json={**body, "stream": True}))
            await (await slow).content.readany()
            engine.tokens, engine.token_s = 1, 0.0
            process.send_signal(signal.SIGTERM)
            await until_status(client, url + "/ready", 503)
            asks, until = [], time.monotonic() + 3
            while time.monotonic() < until:
                asks.append(asyncio.create_task(ask()))
                await asyncio.sleep(0.05)
            assert set(await asyncio.gather(*asks)) == {200}
            assert process.returncode is None
            assert (await slow.result().read()).endswith(b"data: [DONE]\n\n")
            assert await asyncio.wait_for(process.wait(), 30) == 0

    asyncio.run(main())


def test_its_port_bounds_heads_and_knows_http_1_0(tmp_path: Path) -> None:
    """As an engine's does: it has the same protocol."""

    async def main() -> None:
        async with router_process(tmp_path, FakeEngine("e0")) as (_, url, client):
            await until_status(client, url + "/ready", 200)
            body = b'{"model": "fake", "prompt": "hello", "stream": true}'
            head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
            for sent, status in ((head + body, 200), (b"GET\r\n\r\n", 400), (b"GET /" + b"a" * 2**18, 431)):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(sent)
                answer = await asyncio.wait_for(reader.read(), 30)
                writer.close()
                assert answer.startswith(b"HTTP/1.1 %d " % status)
                assert b"chunked" not in answer
                assert answer.endswith(b"\n\ndata: [DONE]\n\n" if status == 200 else b"}}")

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_with_status_0(tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        engine = FakeEngine("e0")
        engine.state = "loading"
        async with router_process(tmp_path, engine, "--drain-grace-s", "600") as (process, url, client):
            await until_status(client, url + "/ready", 503)
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), 30) == 0

    asyncio.run(main())


def test_running_answers_are_cut_after_the_drain_timeout(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine("e0")
        engine.hold = asyncio.Event()
        flags = ("--drain-grace-s", "0", "--drain-timeout-s", "1")
        async with router_process(tmp_path, engine, *flags) as (process, url, client):
            await until_status(client, url + "/ready", 200)
            body = {"model": "fake", "prompt": "never"}
            post = asyncio.create_task(client.post(url + "/v1/completions", json=body))
            async with asyncio.timeout(30):
                while not engine.running:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
            with contextlib.suppress(aiohttp.ClientError):
                assert (await post).status >= 500

    asyncio.run(main())


@pytest.mark.parametrize(
    "flags, message",
    [
        ((), "one of the arguments --endpoints-file --service is required"),
        (("--endpoints-file", "f", "--policy", "random"), "invalid choice: 'random'"),
        (("--endpoints-file", "f", "--drain-grace-s", "-1"), "drain-grace-s is -1.0"),
        (("--endpoints-file", "f", "--port", "70000"), "port is 70000"),
        (("--endpoints-file", "f", "--namespace", "n"), "--namespace goes with --service"),
        (("--endpoints-file", "f", "--index-memory", "lots"), "'lots' is not a size"),
        (("--endpoints-file", "f", "--api-key", ""), "api-key is empty"),
        (("--endpoints-file", "f", "--api-key-dir", "/nonexistent"), "/nonexistent is not a folder"),
        (("--service", "s"), "--endpoints-file"),
        (("--endpoints-file", "f", "--unknown"), "--unknown"),
    ],
)
def test_a_wrong_flag_gets_one_line_and_status_2(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.cli import main

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["router", *flags]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = command("--port", str(taken.getsockname()[1]), "--endpoints-file", str(tmp_path / "none.json"))
        done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Address already in use" in done.stderr and done.stderr.count("\n") == 1
