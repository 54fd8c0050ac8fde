"""HTTP on one connection, where uvicorn leaves things open: heads, bodies, versions and other protocols."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from typing import Any

import httpx
import pytest

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True}


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /health HTTP/1.1\r\nX: ",
        b"GET /",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: ",
    ],
    ids=["header", "path", "trailer"],
)
def test_a_head_without_end_is_not_kept(fast: Any, endless: bytes) -> None:
    with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
        connection.settimeout(30)
        connection.sendall(endless)
        sent = 0
        with contextlib.suppress(ConnectionError):  # closed while we write
            while sent < 64 << 20:
                sent += connection.send(b"a" * 65536)
    assert sent < 64 << 20
    assert fast.get("/health").status_code == 200


def received(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of all that comes until the connection is closed."""
    connection.settimeout(30)
    answer = b""
    while part := connection.recv(4096):
        answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def test_a_head_that_comes_too_slowly_is_not_waited_for(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.http_protocol.LONGEST_HEAD_S", 0.5)
    whole = b"GET /health HTTP/1.1\r\n\r\n"
    for sent in (b"GET /health HTTP/1.1\r\nX: ", b"\r\n", whole + b"GET /"):
        with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
            connection.sendall(sent)
            answers = b"\r\n\r\n".join(received(connection)).partition(b"HTTP/1.1 408 ")
            assert answers[0].startswith(b"HTTP/1.1 200 ") == sent.startswith(whole)
            assert b"head_too_slow" in answers[2]
    with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
        assert received(connection) == (b"", b"")  # nothing was asked
    idle = http.client.HTTPConnection("127.0.0.1", fast.server.port, timeout=30)
    for _ in range(2):
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        time.sleep(1)  # to be idle is not to be slow
    idle.request("GET", "/health")  # on the same connection, or it fails
    assert idle.getresponse().read()
    idle.close()


def test_a_body_that_comes_too_slowly_is_not_waited_for(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.http_protocol.LEAST_BODY_S", 0.5)
    body = json.dumps({**LONG, "max_tokens": 5}).encode()

    def ask(path: str, length: int) -> bytes:
        return f"POST {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()

    for path, sent in (("/v1/completions", 0), ("/v1/completions", 1), ("/nowhere", 1)):
        with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
            connection.sendall(ask(path, len(body)))
            answer = b""
            connection.settimeout(0.1)
            for _ in range(300):  # a byte now and then is too little
                with contextlib.suppress(TimeoutError):
                    if not (part := connection.recv(4096)):
                        break
                    answer += part
                connection.sendall(body[:sent])
        assert part == b"", "it is waited for"
        assert answer.startswith(b"HTTP/1.1 404 " if path == "/nowhere" else b"HTTP/1.1 408 ")
        assert (b"body_too_slow" in answer) == (path != "/nowhere")
    with socket.create_connection(("127.0.0.1", fast.server.port), timeout=30) as connection:
        pieces = [b" " * 1500] * 8 + [body]  # slow, but not too slow
        connection.sendall(ask("/v1/completions", sum(map(len, pieces))))
        for piece in pieces:
            time.sleep(0.25)
            connection.sendall(piece)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_waits_for_the_answer_before_it_is_not_late(
    paced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.http_protocol.LEAST_BODY_S", 0.2)
    streamed = json.dumps({**LONG, "max_tokens": 100, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", paced.server.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(streamed))
        connection.sendall(streamed)
        begun = connection.recv(4096)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{")
        while b"[DONE]" not in begun:
            begun += (part := connection.recv(65536))
            assert part, "the answer before is cut"
        connection.sendall(b"}")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_an_answer_to_http_1_0_has_no_chunks(fast: Any) -> None:
    body = json.dumps({**LONG, "max_tokens": 5}).encode()
    streamed = json.dumps({**LONG, "max_tokens": 5, "stream": True}).encode()
    for sent in (body, streamed):
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(sent)
        with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
            connection.sendall(head + sent)
            head, answer = received(connection)
        assert head.startswith(b"HTTP/1.1 200 ") and b"chunked" not in head
        if sent == body:
            assert json.loads(answer)["usage"]["completion_tokens"] == 5
        else:
            assert answer.startswith(b"data: {") and answer.endswith(b"data: [DONE]\n\n")
    with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
        connection.sendall(b"HEAD /health HTTP/1.0\r\n\r\n")
        head, answer = received(connection)
    assert head.startswith(b"HTTP/1.1 200 ") and answer == b""


def test_what_is_not_http_is_told_so_in_the_envelope(fast: Any) -> None:
    for sent in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", fast.server.port)) as connection:
            connection.sendall(sent)
            head, body = received(connection)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_request_to_speak_another_protocol_is_answered_as_if_it_were_none(serve: Any) -> None:
    upgrade = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    with serve("fast", api_key=("one",)) as running, httpx.Client() as kept:
        for path in ("/v1/models", "/health", "/v1/realtime"):
            for key in ({}, {"Authorization": "Bearer one"}):
                expected = kept.get(running.url + path, headers=key).status_code
                assert kept.get(running.url + path, headers={**upgrade, **key}).status_code == expected
        body, headers = json.dumps(COMPLETION).encode(), {**upgrade, "Authorization": "Bearer one"}
        assert kept.post(running.url + "/v1/completions", content=body, headers=headers).status_code == 200
        for version in (b"1.0", b"1.1"):
            with socket.create_connection(("127.0.0.1", running.server.port), timeout=30) as connection:
                ask = b"GET /live HTTP/%s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" % version
                connection.sendall(ask)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 "), version
