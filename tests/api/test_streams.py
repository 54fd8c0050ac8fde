"""Streams: their framing, faults after the headers, and clients that leave at any point."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.api import sse
from octavo.api.sse import EventStream
from octavo.engine import stream as engine_stream
from octavo.sampling import grammar_compiler

CHAT = [{"role": "user", "content": "hello"}]
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True}


def events_of(text: str) -> list[Any]:
    """The data of each event; the framing is checked on the way."""
    assert text.endswith("\n\n")
    parts = text[:-2].split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts[:-1]]


def heavy_schema() -> dict[str, Any]:
    """Half a second of compiling."""
    either = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    defs: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": either}}}
    for level in range(1, 8):
        choice = {"anyOf": [{"properties": {f"a{level}{i}": {"type": "string"}}} for i in range(3)]}
        defs[f"d{level}"] = {"allOf": [{"$ref": f"#/$defs/d{level - 1}"}, choice]}
    return {"$ref": "#/$defs/d7", "$defs": defs}


def test_no_character_of_an_event_ends_a_line_for_any_client() -> None:
    said = {"text": "a\x85b\u2028c\u2029d\x1ee\r\nf"}
    lines = sse.event(said).decode().splitlines()
    assert len(lines) == 2 and lines[1] == ""
    assert json.loads(lines[0].removeprefix("data: ")) == said


def test_events_are_framed_and_the_first_chat_delta_has_the_role(fast: Any) -> None:
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 5, "stream": True, "n": 2, "seed": 1}
    answer = fast.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(answer.text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [
        {"role": "assistant", "content": ""}
    ] * 2
    assert {chunk["choices"][0]["index"] for chunk in chunks[:2]} == {0, 1}
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_comes_last_when_asked_for(fast: Any) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "stream": True, "ignore_eos": True}
    chunks = events_of(fast.post("/v1/completions", {**body, "stream_options": {"include_usage": True}}).text)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    body["stream_options"] = {"include_usage": False}
    assert all(chunk["choices"] for chunk in events_of(fast.post("/v1/completions", body).text))


def test_a_router_is_told_the_cached_tokens_in_a_comment_and_nobody_else_is(fast: Any) -> None:
    body = {"model": "tiny", "prompt": [7] * 100, "max_tokens": 2, "stream": True}
    fast.post("/v1/completions", body)
    answer = fast.post("/v1/completions", body, headers={"X-Octavo-Router": "1"}).text
    assert answer.endswith("\n\n: cached_tokens 96\n\ndata: [DONE]\n\n")
    assert ": cached" not in fast.post("/v1/completions", body).text
    client = fast.client(default_headers={"X-Octavo-Router": "1"})
    chunks = list(client.completions.create(model="tiny", prompt="hello", max_tokens=2, stream=True))
    assert chunks[-1].choices[0].finish_reason, "openai-python passes over it"


def test_each_event_is_whole_utf8(fast: Any) -> None:
    body = {**LONG, "stream": True, "temperature": 0, "max_tokens": 300}
    with fast.http.stream("POST", fast.url + "/v1/completions", json=body) as answer:
        for chunk in answer.iter_raw():
            chunk.decode("utf-8")


def test_a_fault_after_the_headers_is_an_event_and_then_done(serve: Any) -> None:
    with serve("late_fault") as running:
        body = {"model": "tiny", "prompt": [302, 5], "max_tokens": 50, "stream": True, "ignore_eos": True}
        answer = running.post("/v1/completions", body)
        assert answer.status_code == 200
        *chunks, last = events_of(answer.text)
        assert chunks
        assert last["error"]["type"] == "server_error"
        with pytest.raises(openai.APIError, match="NaN"):
            fields = {"model": "tiny", "prompt": [302, 5], "max_tokens": 50}
            list(running.client().completions.create(stream=True, extra_body={"ignore_eos": True}, **fields))
        assert running.post("/v1/completions", {"model": "tiny", "prompt": "x"}).status_code == 200


def test_sixteen_streams_cut_together_leave_nothing_behind(paced: Any) -> None:
    aborted = paced.metric("vllm:request_success_total", finished_reason="abort")

    async def cut() -> None:
        client = openai.AsyncOpenAI(base_url=paced.url + "/v1", api_key="none", max_retries=0)
        streams = [
            await client.chat.completions.create(
                model="tiny", messages=CHAT, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
            )
            for _ in range(16)
        ]
        for stream in streams:
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 3:
                    break
        assert paced.get("/load").json()["running"] == 16
        await client.close()

    asyncio.run(cut())
    paced.until(paced.idle, "the streams that were cut still hold something")
    assert paced.metric("vllm:num_requests_running") == 0
    assert paced.metric("vllm:num_requests_waiting") == 0
    assert paced.metric("vllm:kv_cache_usage_perc") == 0
    assert paced.metric("vllm:request_success_total", finished_reason="abort") == aborted + 16
    assert paced.server.service.engine.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_sequences(paced: Any, stream: bool, n: int) -> None:
    body = {**LONG, "stream": stream, "n": n, "seed": 3}

    def leave() -> None:
        with client.stream("POST", paced.url + "/v1/completions", json=body) as answer:
            for _ in answer.iter_raw():
                if paced.get("/load").json()["running"] == n:
                    return

    with httpx.Client(timeout=httpx.Timeout(30, read=0.4)) as client, contextlib.suppress(httpx.ReadTimeout):
        leave()
    paced.until(paced.idle, "the sequences of a client that left still run")


def test_a_client_that_leaves_while_it_waits_frees_its_place(serve: Any) -> None:
    with serve("paced", max_num_seqs=1) as running:
        first = running.client().completions.create(
            model="tiny", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(first))
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(running.url + "/v1/completions", json=LONG, timeout=httpx.Timeout(30, read=0.4))
        running.until(
            lambda: running.get("/load").json()["waiting"] == 0,
            "a request that was left still waits",
        )
        assert running.get("/load").json()["running"] == 1
        first.close()
        running.until(running.idle, "the stream still runs")


def test_a_client_that_leaves_in_mid_body_disturbs_nobody_and_is_counted_as_gone(fast: Any) -> None:
    def answered(status: str) -> float:
        count: float = fast.metric("octavo:http_requests_total", status=status)
        return count

    before, gone, failed = fast.metric("octavo:internal_errors_total"), answered("499"), answered("500")
    with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        connection.sendall(head)
    assert fast.post("/v1/completions", {"model": "tiny", "prompt": "x"}).status_code == 200
    fast.until(lambda: answered("499") == gone + 1, "it was not counted")
    assert (fast.metric("octavo:internal_errors_total"), answered("500")) == (before, failed)


def test_a_waiting_stream_gets_its_headers_and_role_before_its_first_token(serve: Any) -> None:
    with serve("paced", max_num_seqs=1) as running:
        busy = running.client().completions.create(
            model="tiny", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(busy))
        body = {"model": "tiny", "messages": CHAT, "stream": True}
        with running.http.stream("POST", running.url + "/v1/chat/completions", json=body) as answer:
            first = next(answer.iter_text())
            assert json.loads(first[6:].split("\n")[0])["choices"][0]["delta"]["role"] == "assistant"
            running.until(lambda: running.get("/load").json()["waiting"] == 1, "it does not wait")
        busy.close()


def test_a_stop_string_frees_the_sequence_at_once(paced: Any) -> None:
    text = paced.post("/v1/completions", {**LONG, "max_tokens": 20, "temperature": 0}).json()["choices"][0][
        "text"
    ]
    body = {**LONG, "temperature": 0, "stop": text[3:5], "stream": True}
    assert events_of(paced.post("/v1/completions", body).text)[-1]["choices"][0]["finish_reason"] == "stop"
    paced.until(paced.idle, "the sequence goes on after its stop string")


def test_a_stream_that_is_cut_before_its_first_byte_is_closed_all_the_same() -> None:
    """A client that does not read holds up the very headers; the generator has not begun when it leaves."""

    async def main() -> list[str]:
        closed: list[str] = []

        async def events() -> Any:
            yield b"never"

        async def close() -> None:
            closed.append("closed")

        async def send(message: Any) -> None:
            await asyncio.Event().wait()

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        await asyncio.wait_for(EventStream(events(), close)({"type": "http"}, receive, send), 10)
        return closed

    assert asyncio.run(main()) == ["closed"]


def test_a_stream_keeps_its_pace_while_a_heavy_schema_is_compiled(paced: Any) -> None:
    """Case 23: half a second of compiling, in which a stream of 50 chunks a second goes on."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "structured_outputs": {"json": heavy_schema()}}
    answers = []
    poster = threading.Thread(
        target=lambda: answers.append(httpx.post(paced.url + "/v1/completions", json=body))
    )
    meanwhile = 0
    with paced.http.stream("POST", paced.url + "/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        poster.start()
        while poster.is_alive():
            next(lines)
            meanwhile += 1
    assert answers[0].status_code == 200, answers[0].text
    assert meanwhile >= 5


def test_a_stream_that_waits_long_is_kept_alive_by_comments(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.1)
    with serve("paced", max_num_seqs=1) as running:
        busy = running.client().completions.create(
            model="tiny", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(busy))
        body = {"model": "tiny", "messages": CHAT, "stream": True, "max_tokens": 3}
        with running.http.stream("POST", running.url + "/v1/chat/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: {")
            assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
            busy.close()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert any('finish_reason":"' in line for line in rest)
        text = running.post("/v1/chat/completions", {**body, "max_tokens": 40}).text
        assert sse.KEEP_ALIVE.decode() not in text, "a stream that moves needs none"


def test_a_reader_that_stands_still_holds_up_nobody_and_is_ended_at_the_bound(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_stream, "MAX_WAITING", 500)
    body = {
        "model": "tiny", "messages": CHAT, "stream": True, "max_tokens": 1900, "ignore_eos": True,
        "logprobs": True, "top_logprobs": 20, "n": 3, "seed": 1,  # 14 MB: more than sockets hold
    }  # fmt: skip
    data = json.dumps(body).encode()
    with serve("fast") as running, socket.socket() as slow:
        slow.connect(("127.0.0.1", running.server.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        ended = lambda: running.metric("vllm:request_success_total", finished_reason="abort") >= 1  # noqa: E731
        beside = running.post("/v1/completions", {**LONG, "max_tokens": 300}).json()
        assert beside["usage"]["completion_tokens"] == 300
        running.until(running.idle, "the engine still works for a reader that stands still")
        slow.settimeout(30)
        text = slow.recv(2**16)
        begun = not text.startswith(b"HTTP/1.1 408")  # else the bound was met first: the error is the answer
        while (b"[DONE]" if begun else b"slow_reader") not in text:
            text += slow.recv(2**16)
        assert b"slow_reader" in text
        running.until(ended, "the end was not counted")


def test_a_client_that_leaves_after_one_of_its_choices_ended_frees_the_others(paced: Any) -> None:
    with paced.http.stream(
        "POST", paced.url + "/v1/completions",
        json={**LONG, "stream": True, "n": 4, "seed": 4, "ignore_eos": False, "max_tokens": 900},
    ) as answer:  # fmt: skip
        for line in answer.iter_lines():
            if '"finish_reason":"stop"' in line:
                break
        assert 1 <= paced.get("/load").json()["running"] <= 3
    paced.until(paced.idle, "the choices of a client that left still run")


def test_a_client_that_leaves_while_its_schema_is_compiled_leaves_nothing_behind(paced: Any) -> None:
    with contextlib.suppress(httpx.ReadTimeout):
        body = {
            "model": "tiny",
            "prompt": "x",
            "max_tokens": 500,
            "structured_outputs": {"json": heavy_schema()},
        }
        httpx.post(paced.url + "/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.05))
    assert paced.post("/v1/completions", {"model": "tiny", "prompt": "x"}).status_code == 200
    paced.until(paced.idle, "a request that was left in its compilation runs")
    assert paced.server.service.engine.in_flight == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_client_that_leaves_a_hopeless_schema_ends_its_compilation_and_nobody_waits_for_it(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    source = f"""
import os, pathlib, threading, octavo.sampling.grammar_compiler as c
answer = c._answer
def never(request):
    if "hopeless" in str(request):
        pathlib.Path({str(tmp_path / "begun")!r}).write_text(str(os.getpid()))
        threading.Event().wait()
    return answer(request)
c._answer = never
c.main()"""
    monkeypatch.setattr(grammar_compiler, "COMMAND", ("-c", source))
    begun = tmp_path / "begun"
    with serve("fast") as running:

        def body(word: str) -> bytes:
            said = {"prompt": "x", "messages": CHAT, "input": "x", "max_tokens": 5, "max_output_tokens": 5}
            taken = {"completions": ("prompt", "max_tokens"), "responses": ("input", "max_output_tokens")}
            names = taken.get(path.removeprefix("/v1/"), ("messages", "max_tokens"))
            form = {"structured_outputs": {"regex": word}}
            return json.dumps({"model": "tiny", **form, **{name: said[name] for name in names}}).encode()

        hopeless = body("hopeless")
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(hopeless)}\r\n"
        with socket.create_connection(("127.0.0.1", running.server.port)) as leaving:
            leaving.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + hopeless)
            running.until(lambda: begun.exists() and begun.read_text(), "the compilation never begins")
        answer = running.http.post(running.url + path, content=body("yes"))
        assert answer.status_code == 200, answer.text
        process = Path("/proc") / begun.read_text()
        running.until(lambda: not process.exists(), "the compilation goes on")
        running.until(
            lambda: running.metric("octavo:http_requests_total", status="499") == 1, "it was not told"
        )
        assert running.idle() and running.server.service.engine.in_flight == 0
