"""Sleep and wake-up: memory goes back to the system, requests are refused meanwhile, and nothing is different
after.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "seed": 3, "stream": True}
SHORT = {"model": "tiny", "prompt": [9] * 40, "max_tokens": 12, "temperature": 0}


def admin(running: Any, path: str) -> Any:
    return running.http.post(running.private_url + path)


def asleep(running: Any) -> bool:
    answer: bool = running.http.get(running.private_url + "/is_sleeping").json()["is_sleeping"]
    return answer


def depth(running: Any) -> dict[str, float]:
    """The gauges of vLLM's name for how deep an engine sleeps."""
    samples = [one for one in running.samples() if one.name == "vllm:engine_sleep_state"]
    return {one.labels["sleep_state"]: one.value for one in samples}


def test_a_sleeping_engine_refuses_requests_and_says_so(fast: Any) -> None:
    before = fast.post("/v1/completions", SHORT).json()
    assert fast.post("/v1/completions", SHORT).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert not asleep(fast)
    assert admin(fast, "/sleep").json()["state"] == "sleeping"
    assert asleep(fast) and fast.metric("octavo:engine_state", state="sleeping") == 1
    assert depth(fast) == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    assert fast.http.get(fast.private_url + "/server_info").json()["state"] == "sleeping"
    assert [fast.get(path).status_code for path in ("/ready", "/health", "/live")] == [503, 503, 200]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        refused = fast.post(path, SHORT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "woken up" in refused.json()["error"]["message"]
    assert admin(fast, "/pause").status_code == 503
    assert admin(fast, "/wake_up").json()["state"] == "ready"
    assert depth(fast) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    after = fast.post("/v1/completions", SHORT).json()
    assert not asleep(fast) and after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "no prefix was kept"


def test_sleep_ends_the_requests_that_run_and_those_of_a_paused_engine(paced: Any) -> None:
    for paused in (False, True):
        with paced.http.stream("POST", paced.url + "/v1/completions", json=LONG) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            next(lines)
            if paused:
                admin(paced, "/pause")
            assert admin(paced, "/sleep").json()["state"] == "sleeping"
            assert json.loads(list(lines)[-1][6:])["choices"][0]["finish_reason"] == "abort"
        assert paced.get("/load").json() | {"prefill_tokens_per_s": 0} == {
            "running": 0, "waiting": 0, "waiting_tokens": 0, "kv_usage": 0, "prefill_tokens_per_s": 0,
            "server_load": 0,
        }  # fmt: skip
        assert admin(paced, "/wake_up").json()["state"] == "ready"


def test_sleep_can_wait_for_the_requests_that_run(paced: Any) -> None:
    body = {**LONG, "max_tokens": 20}
    with paced.http.stream("POST", paced.url + "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        answers: list[Any] = []
        sleeper = threading.Thread(target=lambda: answers.append(admin(paced, "/sleep?mode=wait")))
        sleeper.start()
        assert json.loads(list(lines)[-1][6:])["choices"][0]["finish_reason"] == "length"
    sleeper.join(30)
    assert answers[0].json()["state"] == "sleeping" and asleep(paced)
    assert admin(paced, "/wake_up").json()["state"] == "ready"


def test_orders_that_cross_leave_one_state(fast: Any) -> None:
    orders = ["/sleep", "/wake_up", "/sleep?level=2", "/pause", "/wake_up", "/resume", "/sleep?mode=wait"]
    for _ in range(8):
        with ThreadPoolExecutor(len(orders)) as threads:
            statuses = {one.status_code for one in threads.map(lambda path: admin(fast, path), orders)}
        assert statuses <= {200, 503}
        state = fast.http.get(fast.private_url + "/server_info").json()["state"]
        assert asleep(fast) == (state == "sleeping")
        admin(fast, "/wake_up")
        assert admin(fast, "/resume").json()["state"] == "ready"
        assert fast.post("/v1/completions", SHORT).status_code == 200


def test_the_parts_of_the_memory_can_be_woken_one_by_one(fast: Any) -> None:
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        admin(fast, "/sleep?level=2")
        assert admin(fast, f"/wake_up?tags={first}").json()["state"] == "sleeping" and asleep(fast)
        assert fast.post("/v1/completions", SHORT).status_code == 503
        assert admin(fast, f"/wake_up?tags={second}").json()["state"] == "ready"
        assert fast.post("/v1/completions", SHORT).status_code == 200
    admin(fast, "/sleep")
    admin(fast, "/sleep?level=2")
    assert admin(fast, "/wake_up?tags=weights&tags=kv_cache").json()["state"] == "ready"
    assert admin(fast, "/wake_up").json()["state"] == "ready", "who is awake stays awake"


@pytest.mark.parametrize(
    ("path", "param"),
    [("/sleep?level=0", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=keep", "mode")],
)
def test_a_wrong_way_to_sleep_is_refused(fast: Any, path: str, param: str) -> None:
    answer = admin(fast, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert fast.post("/v1/completions", SHORT).status_code == 200


def test_an_unknown_part_is_refused_and_the_engine_sleeps_on(fast: Any) -> None:
    admin(fast, "/sleep")
    answer = admin(fast, "/wake_up?tags=weight")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tags")
    assert asleep(fast) and admin(fast, "/wake_up").json()["state"] == "ready"


@pytest.fixture(scope="module")
def smollm2(serve: Any, smollm2_address: str) -> Iterator[Any]:
    settings = {"dtype": "bfloat16", "device": "cpu", "kv_cache_memory_bytes": "96Mi", "max_model_len": 4096}
    with serve(None, smollm2_address, **settings) as running:
        yield running


def memory_of(pid: int) -> int:
    """Bytes of its own that a process holds, packed weights included: no file's pages."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    held = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return 1024 * sum(map(int, held))


@pytest.mark.parametrize(("level", "weights"), [(1, 0), (2, 250 << 20)])
def test_memory_goes_back_and_the_same_tokens_come_after(smollm2: Any, level: int, weights: int) -> None:
    words = " ".join(f"number {i}," for i in range(500))
    body = {"model": "tiny", "prompt": words, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    before = smollm2.post("/v1/completions", body).json()
    cache = 23_040 * before["usage"]["prompt_tokens"]  # bytes: K and V of 30 layers, 3 heads of 64, bfloat16
    full = memory_of(smollm2.server.service.engine.pid)
    admin(smollm2, f"/sleep?level={level}")
    freed = full - memory_of(smollm2.server.service.engine.pid)
    print(f"level {level}: {full >> 20} MiB, {freed >> 20} MiB of it given back")
    assert freed >= 0.9 * (cache + weights)
    assert weights or freed < cache + (100 << 20), "level 1 keeps the weights"
    assert admin(smollm2, "/wake_up").json()["state"] == "ready"
    after = smollm2.post("/v1/completions", body).json()
    assert after["choices"] == before["choices"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert memory_of(smollm2.server.service.engine.pid) < full + (32 << 20), "nothing is kept twice"
