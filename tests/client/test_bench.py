"""`octavo bench serve`: figures of streams whose timing is exact, load, failures, traffic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from client import virtual_time
from client.fake_endpoint import DONE, ROLE, STOP, Answer, Body, Fake, event, refused, text, usage

from octavo.client.bench import summary
from octavo.client.bench.cli import main
from octavo.client.bench.load import CHAT, COMPLETIONS, Outcome, Target, choose_fields, offer
from octavo.client.bench.traffic import WORDS, Conversation, Shape, Turn, draw
from octavo.client.endpoint import Endpoint
from octavo.errors import ConfigError


async def paced(body: Body, number: int, *, first_s: float = 0.5, chunks: int = 10) -> AsyncIterator[bytes]:
    """A role at once; the first token late; then three tokens every 30 ms."""
    yield ROLE
    await asyncio.sleep(first_s)
    yield event(text("a"))
    for _ in range(chunks):
        await asyncio.sleep(0.03)
        yield event(text("abc"))
    await asyncio.sleep(0.2)  # an endpoint that ends its stream late
    yield STOP
    yield event(usage=usage(20, 1 + 3 * chunks, cached=16))
    yield DONE


def offered(
    answer: Answer, traffic: list[Conversation], path: str = CHAT, **load: Any
) -> tuple[list[Outcome], Fake]:
    """What became of ``traffic``, in virtual time."""

    async def go() -> tuple[list[Outcome], Fake]:
        async with Fake(answer).served() as fake, Endpoint(fake.url) as endpoint:
            return await offer(Target(endpoint, path, {"model": "m"}), traffic, **load), fake

    return virtual_time.run(go())


def questions(count: int) -> list[Conversation]:
    return [Conversation([Turn(f"question {i}", 31)]) for i in range(count)]


def test_times_are_those_of_tokens_not_of_chunks() -> None:
    outcomes, _ = offered(paced, questions(1))
    found = summary.figures(outcomes)
    assert found["output_tokens"] == 31
    for share in ("mean", "p50", "p99"):
        assert found["itl_ms"][share] == pytest.approx(10)
        assert found["ttft_ms"][share] == pytest.approx(500)
        assert found["tpot_ms"][share] == pytest.approx(10)
        assert found["e2e_ms"][share] == pytest.approx(800)
    assert found["cached_share"] == pytest.approx(0.8)
    assert found["seconds"] == pytest.approx(1.0)
    assert found["output_tokens_per_s"] == pytest.approx(31)
    assert found["total_tokens_per_s"] == pytest.approx(51)


def test_three_tokens_in_each_chunk_from_the_first_on() -> None:
    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        yield ROLE
        for _ in range(10):
            await asyncio.sleep(0.03)
            yield event(text("abc"))
        yield STOP + event(usage=usage(5, 30)) + DONE

    found = summary.figures(offered(answer, questions(2), concurrency=1)[0])
    assert found["itl_ms"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), 10))
    assert (found["ttft_ms"]["p50"], found["output_tokens"]) == (pytest.approx(30), 60)


def test_failures_are_counted_apart_and_stay_out_of_latencies() -> None:
    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        if number % 10 == 9:
            yield (
                ROLE
                + event(text("some"))
                + b'data: {"error": {"message": "broke", "code": "broken"}}\n\n'
                + DONE
            )
        elif number % 2:
            yield DONE if number % 4 == 1 else b""
        else:
            async for part in paced(body, number):
                yield part

    outcomes, _ = offered(answer, questions(20), concurrency=4)
    found = summary.figures(outcomes)
    assert (found["succeeded"], found["failed"]) == (10, 10)
    assert found["errors"] == {"empty": 4, "stream_cut": 4, "broken": 2}
    assert found["ttft_ms"]["p50"] == found["ttft_ms"]["mean"] == pytest.approx(500)
    assert found["output_tokens"] == 310


@pytest.mark.parametrize(("broken", "status"), [(False, 0), (True, 1)])
def test_the_exit_code_says_whether_requests_failed(
    broken: bool, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        if number == 3 and broken:
            return
        yield event(text("a")) + event(text("b")) + STOP + event(usage=usage(5, 2)) + DONE

    with Fake(answer).on_a_thread() as fake:
        flags = [
            "--requests=4",
            f"--json={tmp_path / 'run.json'}",
            f"--plot={tmp_path / 'run.png'}",
            "--api-key=k",
        ]
        assert main(["serve", "random", f"--url={fake.url}", *flags, "--goodput", "ttft:60000"]) == status
    found = json.loads((tmp_path / "run.json").read_text())
    assert (found["succeeded"], found["failed"], found["model"]) == (4 - status, status, "first")
    assert found["goodput"]["share"] == 1 - status / 4
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "time to first token" in shown and ("stream_cut" in shown) == broken
    assert fake.keys == {"Bearer k"}


def test_a_rate_is_poisson_and_does_not_wait_for_answers() -> None:
    outcomes, _ = offered(partial(paced, chunks=1, first_s=1.5), questions(400), rate=10.0, seed=3)
    sent = sorted(one.sent for one in outcomes)
    assert sent[-1] == pytest.approx(40, rel=0.15)
    waits = [b - a for a, b in pairwise(sent)]
    assert sum(wait > 0.1 for wait in waits) / len(waits) == pytest.approx(0.37, abs=0.06)  # exp(-1)
    assert summary.figures(outcomes)["peak_in_flight"] > 10


def test_concurrency_bounds_what_is_under_way() -> None:
    outcomes, _ = offered(paced, questions(12), concurrency=3)
    found = summary.figures(outcomes)
    assert (found["peak_in_flight"], found["seconds"]) == (3, pytest.approx(4.0))


def test_a_turn_carries_the_answers_before_it_and_a_failure_ends_its_conversation() -> None:
    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        if number < 2:
            yield event(text(f"answer {number}")) + STOP + DONE

    outcomes, fake = offered(answer, [Conversation([Turn(f"q{i}", 8) for i in range(5)], "be brief")])
    assert [one.error for one in outcomes] == [None, None, "stream_cut"]
    said = [(m["role"], m["content"]) for m in fake.bodies[-1][1]["messages"]]
    assert said == [
        ("system", "be brief"),
        ("user", "q0"),
        ("assistant", "answer 0"),
        ("user", "q1"),
        ("assistant", "answer 1"),
        ("user", "q2"),
    ]


def test_a_request_that_takes_too_long_is_a_failure() -> None:
    async def go() -> Outcome:
        async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
            yield event(text("a"))
            await asyncio.sleep(100)

        async with Fake(answer).served() as fake, Endpoint(fake.url, timeout_s=2) as endpoint:
            return await Target(endpoint, CHAT, {}).ask({"messages": []})

    outcome = virtual_time.run(go())
    assert (outcome.error, outcome.ended) == ("timeout", pytest.approx(2))


def chosen(refusals: dict[str, Any], with_ids: bool = False) -> dict[str, Any]:
    """The fields that are used with an endpoint that refuses some."""

    def answer(body: Body, number: int) -> Any:
        for name, param in refusals.items():
            if name in json.dumps(body):
                return refused(400, "unknown field", param)
        return stream()

    async def stream() -> AsyncIterator[bytes]:
        yield event(text("a", token_ids=[1] if with_ids else None)) + STOP + DONE

    async def go() -> dict[str, Any]:
        async with Fake(answer).served() as fake, Endpoint(fake.url) as endpoint:
            return await choose_fields(endpoint, CHAT, "m")

    return {
        name: value for name, value in virtual_time.run(go()).items() if name not in ("model", "temperature")
    }


def test_fields_that_make_figures_exact_are_used_as_far_as_the_endpoint_takes_them() -> None:
    usage_only, counting = {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}
    base = {"ignore_eos": True, "return_token_ids": True}
    assert chosen({}, with_ids=True) == {**base, "stream_options": usage_only}
    assert chosen({}) == {**base, "stream_options": counting}
    assert chosen({"continuous_usage_stats": None}) == {**base, "stream_options": usage_only}
    assert chosen({"return_token_ids": "return_token_ids"}) == {
        "ignore_eos": True,
        "stream_options": counting,
    }
    assert chosen(dict.fromkeys((*base, "stream_options"))) == {}


def test_drawn_traffic_has_the_sizes_asked_for_and_repeats_with_its_seed() -> None:
    shape = Shape(
        requests=50, input_tokens=40, output_tokens=10, spread=0.5, turns=3, groups=4, prefix_tokens=30
    )
    assert (
        draw("random", shape) == draw("random", shape) != draw("random", Shape(**{**vars(shape), "seed": 2}))
    )
    lengths = [len(str(one.turns[0].prompt).split()) for one in draw("random", shape)]
    assert 20 <= min(lengths) < 30 and 50 < max(lengths) <= 60
    assert {len(one.turns) for one in draw("multi-turn", shape)} == {3}
    prefixes = [one.system for one in draw("shared-prefix", shape)]
    assert len(set(prefixes)) == 4 and {len(one.split()) for one in prefixes} == {30}
    assert len(set(WORDS)) == len(WORDS)


def test_a_file_of_token_ids_goes_to_completions(tmp_path: Path) -> None:
    work = tmp_path / "work.json"
    work.write_text(json.dumps({"scenarios": {"A": [{"prompt_ids": [5, 6], "max_tokens": 2}], "B": []}}))

    async def answer(body: Body, number: int) -> AsyncIterator[bytes]:
        yield event({"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "length"}) + DONE

    with Fake(answer).on_a_thread() as fake:
        assert main(["serve", str(work), "--scenario=A", f"--url={fake.url}/v1/", "--model=m"]) == 0
        path, body = fake.bodies[-1]
        assert path == "/v1" + COMPLETIONS
        assert (body["prompt"], body["max_tokens"], body["stream"]) == ([5, 6], 2, True)
        with pytest.raises(ConfigError, match=r"scenario is None: .* has A, B"):
            main(["serve", str(work), f"--url={fake.url}"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere.json"], "no file of workloads"),
        (["random", "--rate=0"], "rate is 0"),
        (["random", "--goodput", "ttfb:3"], "goodput is 'ttfb:3'"),
        (["random", "--spread=2"], "spread is 2"),
        (["random", "--url=ftp://x"], "url is 'ftp://x'"),
    ],
)
def test_mistakes_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["serve", *flags])
