"""API processes beside the first: their start, a drain of all, the end of one, and the end of everything."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api.conftest import Running
from api_processes import (
    BODY,
    COUNT,
    ONE_RESPONSE,
    PATIENCE_S,
    by_all,
    connected,
    fresh,
    one_in_each,
    pid_of,
    stored_in_each,
    until,
)
from scripted_engine import ScriptedEngine

from octavo.api.responses_routes import keeper
from octavo.api.server import Server
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def test_a_process_that_dies_loses_its_own_streams_alone_and_another_takes_its_place(serve: Any) -> None:
    with serve("paced", api_server_count=COUNT) as running, connected(running) as running.clients:
        kept = stored_in_each(running)
        names = ("vllm:request_success_total", "octavo:http_requests_total")
        with one_in_each(running) as held:
            before = [running.metric(name) for name in names]
            pid = pid_of(running, 1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(held[1].lines)
            until(lambda: running.get("/load").json()["running"] == COUNT - 1)
            assert [running.metric(name) for name in names] >= before, "what it had counted stays"
            for number in (0, 2):
                assert json.loads(next(held[number].lines)[6:])["choices"][0]["finish_reason"] is None
            until(lambda: 1 in running.server.service.peers.others)
            assert pid_of(running, 1) != pid
        until(lambda: running.get("/load").json()["kv_usage"] == 0)
        with connected(running) as running.clients:
            assert {a.status_code for a in by_all(running, "GET", "/ready", "/ready")} == {200}
            for number, name in enumerate(kept):
                found = by_all(running, "GET", f"/v1/responses/{name}", ONE_RESPONSE)
                assert {answer.status_code for answer in found} == {404 if number == 1 else 200}


def test_a_drain_loses_no_stream_of_any_process(serve: Any) -> None:
    with serve("paced", api_server_count=COUNT, drain_grace_s=0.2) as running:
        folder = running.server.service.peers.folder
        pids = [pid_of(running, number) for number in range(1, COUNT)]
        with one_in_each(running, max_tokens=150) as held:
            running.stop(hurry=False)
            assert [one.finish_reason() for one in held] == ["length"] * COUNT
        assert running.join() == 0
        assert not folder.exists()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_draining_server_is_not_ready_and_then_takes_nothing_in_any_process(serve: Any) -> None:
    with (
        serve("paced", api_server_count=COUNT, drain_grace_s=0) as running,
        connected(running) as running.clients,
        one_in_each(running) as held,
    ):
        running.http.post(running.private_url + "/drain")
        for client, stream in zip(running.clients, held, strict=True):  # the first answer closes a connection
            answer = client.get("/ready")
            assert (answer.status_code, answer.json()["state"]) == (503, "draining")
            assert answer.headers["connection"] == "close"
            assert json.loads(next(stream.lines)[6:])["choices"][0]["finish_reason"] is None
        assert {fresh(running, "POST", "/v1/completions", json=BODY).status_code for _ in range(9)} == {503}


def test_the_limit_of_a_drain_cuts_what_still_runs_in_every_process(serve: Any) -> None:
    with (
        serve("paced", api_server_count=COUNT, drain_grace_s=0, drain_timeout_s=0.3) as running,
        one_in_each(running) as held,
    ):
        running.stop(hurry=False)
        assert [one.finish_reason() for one in held] == ["abort"] * COUNT
        assert running.join() == 0


def test_the_death_of_the_engine_is_told_by_all(serve: Any) -> None:
    with serve("paced", api_server_count=COUNT) as running, one_in_each(running) as held:
        os.kill(running.server.service.engine.pid, signal.SIGKILL)
        for one in held:
            assert "SIGKILL" in json.loads(list(one.lines)[-1][6:])["error"]["message"]
        running.join()
        assert "SIGKILL" in str(running.error)


def test_a_process_that_cannot_start_ends_the_server_with_its_reason(model_folder: Path) -> None:
    config = EngineConfig(model=str(model_folder), port=0, private_port=0, api_server_count=2)
    running = Running(Server(config, ScriptedEngine("never")))
    try:
        until(lambda: 1 in running.server._processes._running)
        assert running.get("/ready").status_code == 503
        os.kill(pid_of(running, 1), signal.SIGKILL)
        running.join()
        assert "API process 1 ended before it took requests: killed by SIGKILL" in str(running.error)
    finally:
        running.stop()
        running.join()


def test_a_port_that_another_server_shares_among_its_processes_is_taken() -> None:
    settings = {"model": "m", "private_port": 0, "api_server_count": 2}
    first = Server(EngineConfig(port=0, **settings))
    with pytest.raises(ConfigError, match=f"port {first.port} on .* cannot be used"):
        Server(EngineConfig(port=first.port, **settings))
    for one in first._sockets:
        one.close()


class Tree:
    """A server as a process of its own, and the processes that it starts."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "serve_scripted.py"), "fast", str(model)]
        flags = (*flags, "--served-model-name=tiny", "--port=0", "--private-port=0", "--drain-grace-s=0")
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if "keys      none" in line:  # the last line of what a start tells
                break
        assert self.process.poll() is None, self.log
        found = re.search(r"listening on (\S+)", "".join(self.log))
        assert found is not None
        self.url = found[1]
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.names = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2] for pid in listed}


@pytest.fixture
def tree(model_folder: Path) -> Iterator[Callable[..., Tree]]:
    started: list[Tree] = []

    def begin(*flags: str) -> Tree:
        started.append(Tree(model_folder, *flags))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def test_there_are_as_many_processes_as_were_asked_for_and_they_need_no_torch(tree: Any) -> None:
    assert list(tree().names.values()) == ["octavo.engine.process"]
    two = tree("--api-server-count=2")
    assert sorted(two.names.values()) == ["octavo.api.process", "octavo.engine.process"]
    pid = next(pid for pid, name in two.names.items() if name == "octavo.api.process")
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_all_processes_get_connections_and_log_into_one_log(tree: Any) -> None:
    server = tree("--api-server-count=2")
    assert sum("requests of up to" in line for line in server.log) == 1
    assert any("API       2 processes" in line for line in server.log)
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 1}
    asked: list[str] = []
    served: set[int] = set()

    def all_have_served() -> bool:
        asked.append(f"logged-{len(asked)}")
        headers = {"X-Request-Id": asked[-1]}
        made = httpx.post(server.url + "/v1/responses", json=body, headers=headers, trust_env=False)
        served.add(keeper(made.json()["id"], 2))
        return len(served) == 2

    until(all_have_served)
    server.process.terminate()
    _, rest = server.process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    assert sorted(line["request_id"] for line in lines) == sorted(asked)
    assert server.process.returncode == 0


def test_no_process_outlives_the_first(tree: Any) -> None:
    server = tree("--api-server-count=2")
    ends = [os.pidfd_open(pid) for pid in server.names]
    server.process.kill()
    for end in ends:
        ended, _, _ = select.select([end], [], [], PATIENCE_S)
        assert ended, "a pidfd is readable once its process has ended"
        os.close(end)
