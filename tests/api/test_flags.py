"""What the flags of the HTTP server change, and which of them are refused."""

from __future__ import annotations

import json
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from api.conftest import Running
from scripted_engine import ScriptedEngine

from octavo.api.cli import parse_args
from octavo.api.server import Server
from octavo.config import EngineConfig
from octavo.errors import ConfigError

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def flagged(serve: Any) -> Any:
    settings = {
        "max_logprobs": 40, "return_tokens_as_token_ids": True, "enable_force_include_usage": True,
        "enable_request_id_headers": False, "root_path": "/api", "allowed_origins": (ORIGIN,),
        "allowed_methods": ("GET",), "allowed_headers": ("x-team",), "max_request_body": "4Ki",
        "api_key": ("one",),
    }  # fmt: skip
    with serve("fast", **settings) as running:
        running.http.headers["Authorization"] = "Bearer one"
        yield running


def test_more_log_probabilities_can_be_allowed(flagged: Any, fast: Any) -> None:
    answer = flagged.post("/v1/completions", {**COMPLETION, "logprobs": 40, "prompt_logprobs": 40})
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 2
    for path, fields, name in (
        ("/v1/completions", {**COMPLETION, "logprobs": 41}, "logprobs"),
        ("/v1/completions", {**COMPLETION, "prompt_logprobs": 41}, "prompt_logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 41}, "top_logprobs"),
    ):
        error = flagged.post(path, fields).json()["error"]
        assert error["param"] == name and "0 and 40" in error["message"]
    assert fast.post("/v1/completions", {**COMPLETION, "logprobs": 21}).status_code == 400


def test_every_log_probability_of_the_vocabulary_can_be_allowed(serve: Any) -> None:
    with serve("fast", max_logprobs=-1) as running:
        assert running.post("/v1/completions", {**COMPLETION, "logprobs": 384}).status_code == 200
        assert running.post("/v1/completions", {**COMPLETION, "logprobs": 385}).status_code == 400


def test_tokens_can_be_named_by_their_ids_in_every_answer(flagged: Any) -> None:
    def names(**fields: Any) -> list[str]:
        answer = flagged.post("/v1/completions", {**COMPLETION, "logprobs": 0, **fields})
        return answer.json()["choices"][0]["logprobs"]["tokens"]

    assert all(name.startswith("token_id:") for name in names())
    assert not any(name.startswith("token_id:") for name in names(return_tokens_as_token_ids=False))


def test_usage_can_end_every_stream(flagged: Any) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        text = flagged.post("/v1/completions", {**COMPLETION, "stream": True, **options}).text
        assert json.loads(text.split("\n\n")[-3][6:])["usage"]["completion_tokens"] == 2
    assert flagged.post("/v1/completions", COMPLETION).json()["usage"]["completion_tokens"] == 2


def test_request_ids_can_be_left_out_of_answers(flagged: Any, fast: Any) -> None:
    assert "x-request-id" not in flagged.get("/version").headers
    assert "x-request-id" in fast.get("/version").headers


def test_a_prefix_is_taken_off_and_does_not_go_around_the_keys(flagged: Any) -> None:
    assert flagged.get("/api/v1/models").status_code == 200
    assert flagged.get("/v1/models").status_code == 200
    assert flagged.get("/apiv1/models").status_code == 404
    with httpx.Client(base_url=flagged.url) as stranger:
        assert stranger.get("/api/health").status_code == 200
        for path in ("/api/v1/models", "/api/health/../v1/models", "/api/api/health", "/api/nothing"):
            assert stranger.get(path).status_code == 401, path


def test_pages_of_other_origins_may_call_only_where_they_are_allowed(flagged: Any, fast: Any) -> None:
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "GET"}
    allowed = httpx.options(
        flagged.url + "/v1/models", headers={**ask, "Access-Control-Request-Headers": "x-team"}
    )
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    for changed in (
        {"Origin": "https://evil.example"},
        {"Access-Control-Request-Method": "DELETE"},
        {"Access-Control-Request-Headers": "x-other"},
    ):
        assert httpx.options(flagged.url + "/v1/models", headers={**ask, **changed}).status_code == 400
    simple = httpx.get(flagged.url + "/v1/models", headers={"Origin": ORIGIN})
    assert (simple.status_code, simple.headers["access-control-allow-origin"]) == (401, ORIGIN)
    for answer in (
        fast.get("/v1/models", headers=ask),
        fast.http.options(fast.url + "/v1/models", headers=ask),
    ):
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_body_over_the_limit_is_refused(flagged: Any) -> None:
    for size in (5000, 50_000):
        answer = flagged.post("/v1/completions", {**COMPLETION, "prompt": "x" * size})
        assert answer.status_code == 413
        assert "4096" in answer.json()["error"]["message"]


def test_keys_come_from_a_file_and_the_environment_too(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("two\n\n  three \n")
    monkeypatch.setenv("OCTAVO_API_KEY", "four")
    with serve("fast", api_key=("one",), api_key_file=str(tmp_path / "keys")) as running:
        for key, status in {"one": 200, "two": 200, "three": 200, "four": 200, "five": 401}.items():
            assert running.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


@pytest.mark.parametrize("text", ["", "\n \n", None])
def test_a_file_without_keys_opens_the_server_to_nobody(serve: Any, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="api-key-file"), serve("fast", api_key_file=str(tmp_path / "keys")):
        pass


def test_an_empty_key_in_the_environment_is_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    with pytest.raises(ConfigError, match="OCTAVO_API_KEY"), serve("fast"):
        pass


def test_the_public_port_speaks_https_with_a_certificate(
    serve: Any, model_folder: Path, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    own, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("someone@example.org")
    own.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    own.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    client.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    files = {"ssl_keyfile": "key.pem", "ssl_certfile": "cert.pem", "ssl_ca_certs": "ca.pem"}
    settings = {name: str(tmp_path / file) for name, file in files.items()}
    config = EngineConfig(model=str(model_folder), port=0, private_port=0, ssl_cert_reqs=2, **settings)
    running = Running(Server(config, ScriptedEngine("never")))
    try:
        url = running.url.replace("http:", "https:") + "/live"
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=trust)
        trust.load_cert_chain(str(tmp_path / "client.pem"))
        assert httpx.get(url, verify=trust).status_code == 200
        assert running.http.get(running.private_url + "/load").status_code == 200
    finally:
        running.stop()
        running.join()
    with (
        pytest.raises(ConfigError, match="ssl-certfile"),
        serve("fast", ssl_certfile=str(tmp_path / "none.pem")),
    ):
        pass


def test_a_certificate_that_is_renewed_on_the_disk_is_that_of_new_connections(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, file = trustme.CA(), tmp_path / "cert.pem"
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    pems = [authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes() for _ in range(2)]
    file.write_bytes(pems[0])
    config = EngineConfig(model=str(model_folder), port=0, private_port=0, ssl_certfile=str(file))
    running = Running(Server(config, ScriptedEngine("never")))

    def shown() -> str:
        with (
            socket.create_connection(("127.0.0.1", running.server.port), timeout=30) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            return connection.getpeercert()["serialNumber"]

    try:
        first = shown()
        with httpx.Client(verify=trust, base_url=running.url.replace("http:", "https:")) as kept:
            assert kept.get("/live").status_code == 200
            file.write_bytes(pems[1][:100])
            assert shown() == first and f"{file} cannot be used" in caplog.text
            file.write_bytes(pems[1])
            assert shown() != first and shown() == shown()
            assert kept.get("/live").status_code == 200
    finally:
        running.stop()
        running.join()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-server-count=0"], "api-server-count is '0': it must be at least 1"),
        (["--api-server-count=-1"], "api-server-count is '-1': it must be at least 1"),
        (["--api-server-count=1.5"], "api-server-count is '1.5': it must be a number"),
        (["--api-server-count=two"], "api-server-count is 'two': it must be a number"),
        (["--max-logprobs=-2"], "max-logprobs is '-2'"),
        (["--max-request-body=much"], "max-request-body: 'much' is not a size"),
        (["--root-path=api"], "root-path: 'api' is not a path"),
        (["--allowed-origins=[1]"], "allowed-origins: .* is not a list of texts"),
        (["--allowed-origins=[x"], "allowed-origins: .* is not JSON"),
        (["--allow-credentials"], "allow-credentials needs allowed-origins"),
        (["--allowed-methods=GET"], "allowed-methods needs allowed-origins"),
        (["--ssl-keyfile=k"], "ssl-keyfile needs ssl-certfile"),
        (["--ssl-certfile=c", "--ssl-cert-reqs=2"], "ssl-cert-reqs needs ssl-ca-certs"),
        (["--ssl-cert-reqs=3"], "ssl-cert-reqs is '3'"),
        (["--uvicorn-log-level=loud"], "uvicorn-log-level is 'loud'"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(["m", *flags])


def test_lists_are_json_or_one_text() -> None:
    assert parse_args(["m", '--allowed-origins=["a", "b"]']).allowed_origins == ("a", "b")
    assert parse_args(["m", "--allowed-origins=*"]).allowed_origins == ("*",)
    assert parse_args(["m", "--root-path=/api/"]).root_path == "/api"


def test_the_http_servers_own_log_has_its_level(serve: Any) -> None:
    import logging

    with serve("fast", uvicorn_log_level="error"):
        assert logging.getLogger("uvicorn.error").level == logging.ERROR


def access_lines(caplog: pytest.LogCaptureFixture, count: int) -> list[Any]:
    """The lines so far, once there are ``count``: each is written a moment after its answer has gone out."""
    give_up = time.monotonic() + 30
    while True:
        lines = [json.loads(one.message) for one in caplog.records if one.name == "octavo.access"]
        if len(lines) >= count or time.monotonic() > give_up:
            return lines
        time.sleep(0.01)


def test_each_request_is_a_line_of_json(fast: Any, serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {**COMPLETION, "prompt": list(range(100, 140)), "n": 2, "temperature": 1, "seed": 1}
    with caplog.at_level("INFO", logger="octavo"):
        fast.post("/v1/completions", body)
        access_lines(caplog, 1)
        caplog.clear()
        for stream in (False, True):
            fast.post("/v1/completions", {**body, "stream": stream}, headers={"X-Request-Id": "mine"})
        fast.post("/v1/completions", {"model": "other"})
        fast.get("/health")
        lines = access_lines(caplog, 3)
        assert len(lines) == 3
        lines.sort(key=lambda line: line["status"])  # one's line may come after that of the next request
        for line in lines[:2]:
            assert (line["request_id"], line["path"], line["status"]) == ("mine", "/v1/completions", 200)
            assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (40, 4, 32)
            assert (line["method"], line["finish_reasons"]) == ("POST", ["length"])
            assert 0 <= line["queue_s"] <= line["seconds"] < 60
        assert lines[2]["status"] == 404 and "prompt_tokens" not in lines[2]
        caplog.clear()
        with serve("fast", access_log=False, enable_log_requests=True) as running:
            for path, field in (
                ("completions", "prompt"), ("responses", "input"), ("messages/count_tokens", "system"),
            ):  # fmt: skip
                running.post(f"/v1/{path}", {**COMPLETION, field: f"a sentence seen by {path}"})
                assert f"a sentence seen by {path}" in caplog.text
    assert not [one for one in caplog.records if one.name == "octavo.access"]
