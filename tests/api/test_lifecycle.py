"""From the first probe to the exit: starting, draining at SIGTERM, a dead engine, and what the exit status
says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import octavo
from octavo.api.cli import parse_args
from octavo.errors import ConfigError

HERE = Path(__file__).parent
PATIENCE_S = 120  # on a machine that does much else, a start takes long
SHORT = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
FLAGS = ["--served-model-name=tiny", "--port=0", "--private-port=0"]


class Process:
    """A server as a process of its own."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, str(HERE / "serve_scripted.py"), *args, *FLAGS]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        address = self.wait_log(r"listening on (http://127.0.0.1:\d+) \(private port (\d+)\)")
        self.url, self.private_url = address[1], f"http://127.0.0.1:{address[2]}"
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=False, trust_env=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._told:
                self.log.append(line)
                self._told.notify_all()

    def wait_log(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next((match for line in self.log if (match := re.search(pattern, line))), None)

        with self._told:
            assert self._told.wait_for(lambda: found() or self.process.poll() is not None, PATIENCE_S)
        match = found()
        assert match is not None, self.log
        return match

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def exit_status(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join(5)
        return status


@pytest.fixture
def start(model_folder: Path) -> Iterator[Any]:
    started: list[Process] = []

    def begin(executor: str, *flags: str, ready: bool = True) -> Process:
        process = Process(executor, str(model_folder), *flags)
        started.append(process)
        if ready:
            process.wait_log("ready: tiny")
        return process

    yield begin
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


def test_probes_answer_while_the_engine_starts(start: Any) -> None:
    server = start("never", ready=False)
    server.wait_log("loading weights")
    assert {path: server.status(path) for path in ("/live", "/ready", "/startup", "/health", "/ping")} == {
        "/live": 200, "/ready": 503, "/startup": 503, "/health": 503, "/ping": 503,
    }  # fmt: skip
    answer = server.http.get("/startup")
    told = answer.json()
    assert (told["state"], told["stage"], told["detail"]) == ("loading", "loading weights", "for ever")
    assert told["stages"] == [["loading weights", "for ever"]]
    assert told["error"] is None
    assert int(answer.headers["retry-after"]) >= 1
    refused = server.http.post("/v1/completions", json=SHORT)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "service_unavailable"
    assert int(refused.headers["retry-after"]) >= 1
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert "octavo:engine_state" in server.http.get("/metrics").text


def test_sigterm_during_the_start_ends_it_with_status_0(start: Any) -> None:
    server = start("never", ready=False)
    server.wait_log("loading weights")
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_the_probes_of_a_ready_server(start: Any) -> None:
    server = start("fast")
    for path in ("/live", "/ready", "/startup", "/health", "/ping"):
        assert server.http.get(path).json()["state"] == "ready"
    assert server.http.post("/ping").status_code == 200
    assert server.http.get("/version").json() == {"version": octavo.__version__}
    server.wait_log(r"KV cache  400 blocks of 16: 6400 tokens of bfloat16, prefix caching on")
    server.wait_log(r"keys      none")


def test_sigterm_drains_and_no_request_of_the_grace_fails(start: Any) -> None:
    """20 requests a second; the client learns of the end only when the grace is nearly over."""
    server = start("paced", "--drain-grace-s=3", "--drain-timeout-s=30")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGTERM)
    server.wait_log("draining")
    began = time.monotonic()
    assert server.status("/ready") == 503
    assert server.status("/live") == 200

    async def keep_asking() -> list[int]:
        async with httpx.AsyncClient(timeout=30, verify=False) as asking:
            waits = []
            while time.monotonic() - began < 2.5:
                waits.append(asyncio.create_task(asking.post(server.url + "/v1/completions", json=SHORT)))
                await asyncio.sleep(0.05)
            return [answer.status_code for answer in await asyncio.gather(*waits)]

    statuses = asyncio.run(keep_asking())
    assert len(statuses) > 10
    assert set(statuses) == {200}
    refused = httpx.Response(200)
    while refused.status_code == 200:
        refused = server.http.post("/v1/completions", json=SHORT)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    assert finish == "length"
    assert server.exit_status() == 0


def test_the_limit_of_a_drain_ends_what_still_runs(start: Any) -> None:
    server = start("paced", "--drain-grace-s=0", "--drain-timeout-s=0.5")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-2]
    assert server.exit_status() == 0


def test_a_second_signal_ends_at_once(start: Any) -> None:
    server = start("paced", "--drain-timeout-s=600")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGINT)
        server.wait_log("draining")
        server.process.send_signal(signal.SIGINT)
        assert server.exit_status() == 0


def test_drain_on_the_private_port_ends_new_work_but_not_the_process(start: Any) -> None:
    server = start("fast", "--drain-grace-s=0.1")
    answer = server.http.post(server.private_url + "/drain")
    assert answer.status_code == 202
    assert answer.json()["state"] == "draining"
    assert server.status("/ready") == 503
    while server.http.post("/v1/completions", json=SHORT).status_code == 200:
        pass
    assert server.http.get("/health").json()["state"] == "draining"
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_status() == 0


def test_a_dead_engine_is_told_to_all_and_ends_the_process(serve: Any) -> None:
    with serve("paced") as running:
        client = running.client()
        streams = [
            client.completions.create(
                model="tiny", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(3)
        ]
        for stream in streams:
            next(iter(stream))
        os.kill(running.server.service.engine.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError, match="SIGKILL"):
                list(stream)
        with contextlib.suppress(httpx.TransportError):  # it may be over already
            assert running.get("/ready").status_code == 503
            assert running.get("/live").status_code == 503
        running.join()
        assert "SIGKILL" in str(running.error)


def test_a_request_that_kills_the_engine_gets_an_error_and_the_process_ends(start: Any) -> None:
    server = start("fast")
    answer = server.http.post("/v1/completions", json={"model": "tiny", "prompt": [301], "max_tokens": 3})
    assert answer.status_code == 503
    assert server.status("/ready") == 503
    assert server.exit_status() == 1
    assert "the engine process ended" in "".join(server.log)


def test_an_engine_that_cannot_start_says_why(start: Any) -> None:
    server = start("refused", ready=False)
    assert server.exit_status() == 1
    assert server.log[-1] == "octavo: max-model-len 9999 does not fit: the longest that fits is 42\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "MODEL"),
        (["m", "--no-such-flag"], "--no-such-flag"),
        (["m", "--port=x"], "port is 'x'"),
        (["m", "--max-num-seqs=0"], "max-num-seqs is '0'"),
        (["m", "--quantization=awq"], "quantization is 'awq': not supported yet"),
        (["m", "extra"], "extra"),
    ],
)
def test_wrong_arguments_are_named(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(args)


def test_a_port_in_use_and_a_missing_model_get_one_line_each(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = run_octavo("serve", str(model_folder), f"--port={port}")
    assert in_use.returncode == 2
    assert in_use.stderr.count("\n") == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in in_use.stderr
    missing = run_octavo("serve", "/no/such/model", *FLAGS)
    assert missing.returncode in (1, 2)
    assert "/no/such/model" in missing.stderr.splitlines()[-1]


def run_octavo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", *args], capture_output=True, text=True, timeout=60
    )
