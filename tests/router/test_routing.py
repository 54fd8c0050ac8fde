"""A router before fake engines: affinity, spreading, bursts, correction, engines that come back different."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engines import FakeEngine, Site, byte_assets, serving

from octavo_router.cost import Policy

LONG = "The shared prefix of many requests, word after word. " * 12  # 636 bytes = tokens


def engines(count: int, **settings: object) -> list[FakeEngine]:
    return [FakeEngine(f"e{i}", **settings) for i in range(count)]  # type: ignore[arg-type]


async def named_exactly(site: Site) -> None:
    """The router has loaded the engines' assets and hashes as they do."""
    await site.until(lambda: site.fleet.exact("fake") is not None)


def chat(content: str, **more: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **more}


def test_a_long_shared_prefix_stays_with_one_engine_which_finds_it_cached(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(3)) as site:
            await named_exactly(site)
            chosen = {await site.complete(LONG + f" question {i}") for i in range(20)}
            assert len(chosen) == 1
            hits = [r["cached"] for e in site.engines for r in e.seen]
            assert hits[0] == 0 and all(h >= 624 for h in hits[1:])
            name = chosen.pop()
            assert await site.metric("predicted_cached_tokens_total", endpoint=name) == sum(hits)
            assert await site.metric("overpredicted_cached_tokens_total") == 0
            assert await site.metric("picks_total", why="prefix") == 19

    asyncio.run(main())


def test_distinct_prefixes_spread_also_when_a_template_makes_them_begin_alike(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(3)) as site:
            await named_exactly(site)
            counts: Counter[str] = Counter()
            for number in range(60):
                body = chat(f"You are helpful. {number} is where these differ: " + str(number) * 200)
                _, headers, _ = await site.post("/v1/chat/completions", body)
                counts[headers["x-octavo-engine"]] += 1
            assert set(counts) == {"e0", "e1", "e2"}
            assert max(counts.values()) <= 35

    asyncio.run(main())


def test_two_routers_that_know_nothing_of_each_other_agree(tmp_path: Path) -> None:
    async def main() -> None:
        three = engines(3)
        (tmp_path / "second").mkdir()
        async with serving(tmp_path, three) as one, serving(tmp_path / "second", three, start=False) as two:
            for site in (one, two):
                await named_exactly(site)
            for number in range(10):
                prompt = f"{number} " + LONG
                assert await one.complete(prompt) == await two.complete(prompt)

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
def test_a_burst_with_one_shared_prefix_spreads_and_leaves_nothing_in_flight(
    tmp_path: Path, path: str
) -> None:
    """Case 26."""

    async def main() -> None:
        async with serving(tmp_path, engines(8)) as site:
            await named_exactly(site)
            gate = asyncio.Event()
            for engine in site.engines:
                engine.hold = gate

            def body(number: int) -> dict[str, object]:
                text = LONG + str(number)
                if "chat" in path or "messages" in path:
                    return chat(text)
                return {"model": "fake", "input" if "responses" in path else "prompt": text}

            posts = [asyncio.create_task(site.post(path, body(i))) for i in range(40)]
            await site.until(lambda: sum(e.running for e in site.engines) == 40)
            assert site.inflight() == {e.name: e.running for e in site.engines}
            assert max(site.inflight().values()) <= 15
            gate.set()
            assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}
            assert set(site.inflight().values()) == {0}
            assert await site.metric("inflight") == 0

    asyncio.run(main())


def test_an_engine_back_with_another_block_size_gets_its_affinity_back(tmp_path: Path) -> None:
    """Case 31."""

    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            await named_exactly(site)
            await site.complete(LONG)
            assert site.router.index.blocks_of("e0") == 39
            (engine,) = site.engines
            await engine.restart(block_size=32)
            await site.until(lambda: (x := site.fleet.exact("fake")) is not None and x.block_size == 32)
            assert site.router.index.blocks_of("e0") == 0  # another epoch: its cache is empty
            before = await site.metric("predicted_cached_tokens_total")
            await site.complete(LONG)
            await site.complete(LONG)
            assert (
                await site.metric("predicted_cached_tokens_total") - before
                == 19 * 32
                == engine.seen[-1]["cached"]
            )

    asyncio.run(main())


def test_engines_that_differ_are_said_loudly_and_routed_by_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        two = [FakeEngine("e0"), FakeEngine("e1", block_size=32)]
        async with serving(tmp_path, two) as site:
            await site.until(lambda: "differ" in site.fleet.degraded().get("fake", ""))
            assert await site.metric("scheme_mismatch", model="fake") == 1
            for number in range(8):
                prompt = f"{number}" + LONG
                assert len({await site.complete(prompt + str(i)) for i in range(3)}) == 1
            assert await site.metric("prompts_total", named_by="text") == 24
            await two[1].restart(block_size=16)
            await named_exactly(site)
            assert await site.metric("scheme_mismatch", model="fake") == 0

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    loud = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert any("block_size: e0 has 16, e1 has 32" in message for message in loud)


def test_an_engine_that_hashes_unlike_this_router_is_said_loudly_and_routed_by_text(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine("e0")
        engine.root = "00" * 32
        async with serving(tmp_path, [engine]) as site:
            await site.until(lambda: "hash root" in site.fleet.degraded().get("fake", ""))
            assert await site.metric("scheme_mismatch", model="fake") == 1
            assert await site.complete(LONG) == "e0"
            status, body = await site.get("/ready")
            assert status == 200 and "hash root" in body["routed_by_text"]["fake"]

    asyncio.run(main())


def test_a_rolling_change_of_the_chat_template_fetches_the_new_one_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            await named_exactly(site)
            first = site.fleet.exact("fake")
            for engine in site.engines:
                await engine.restart(assets=byte_assets("{{ messages[0].content }} and more"))
            await site.until(lambda: site.fleet.exact("fake") not in (None, first))
            body = chat(LONG)
            await site.post("/v1/chat/completions", body)
            await site.post("/v1/chat/completions", body)
            assert await site.metric("overpredicted_cached_tokens_total") == 0
            assert await site.metric("underpredicted_cached_tokens_total") == 0

    asyncio.run(main())


def test_a_cache_that_was_emptied_behind_the_router_shows_as_overprediction(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            await named_exactly(site)
            (engine,) = site.engines
            await site.complete(LONG)
            engine.cache.clear()
            engine.caching = False
            for _ in range(2):
                await site.complete(LONG)
            assert await site.metric("overpredicted_cached_tokens_total", endpoint="e0") == 2 * 624
            assert site.router.index.blocks_of("e0") == 0  # missed twice: not believed any more

    asyncio.run(main())


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
def test_cached_tokens_are_learnt_from_whole_answers_and_from_streams(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            await named_exactly(site)
            for _ in range(2):
                await site.complete(LONG, **more)
            assert await site.metric("actual_cached_tokens_total") == 624

    asyncio.run(main())


def test_a_cache_salt_keeps_prefixes_apart(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            await named_exactly(site)
            for salt in ("one", "two", "two"):
                await site.complete(LONG, cache_salt=salt)
            assert await site.metric("predicted_cached_tokens_total") == 624
            assert await site.metric("actual_cached_tokens_total") == 624

    asyncio.run(main())


@pytest.mark.parametrize("policy", ["round-robin", "least-work"])
def test_the_other_policies_spread_one_prefix(tmp_path: Path, policy: Policy) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(3), policy=policy) as site:
            counts = Counter([await site.complete(LONG) for _ in range(9)])
            assert counts == {"e0": 3, "e1": 3, "e2": 3}
            assert await site.metric("picks_total", why=policy) == 9

    asyncio.run(main())


def test_load_that_other_routers_cause_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(2)) as site:
            await named_exactly(site)
            holder = await site.complete(LONG)
            busy = next(e for e in site.engines if e.name == holder)
            busy.running = 30  # not ours
            await site.until(lambda: site.fleet.engines[holder].load.running == 30)
            assert await site.complete(LONG) != holder
            busy.running = 0
            await site.until(lambda: site.fleet.engines[holder].load.running == 0)
            assert site.fleet.engines[holder].candidate(0).running == 0

    asyncio.run(main())


def test_a_very_long_prompt_is_named_off_the_event_loop(tmp_path: Path) -> None:
    async def main() -> None:
        (engine,) = engines(1)
        engine.max_model_len = 2**20
        async with serving(tmp_path, [engine]) as site:
            await named_exactly(site)
            site.engines[0].tokenises = False  # it would do so on the event loop that this test shares
            longest = asyncio.create_task(site.complete("word " * 200_000))
            answered = 0
            while not longest.done():
                assert (await site.get("/live"))[0] == 200
                answered += 1
            assert (
                answered > 2
            )  # a router that names prompts on its event loop answers one before and one after
            assert await longest == "e0"
            assert await site.complete("x" * 5_000_000) == "e0"  # above the bound: by its text
            assert await site.metric("prompts_total", named_by="text") == 1

    asyncio.run(main())


def test_a_prompt_that_no_engine_takes_is_not_tokenised_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            await named_exactly(site)
            site.engines[0].tokenises = False
            assert await site.complete("word " * 200_000) == "e0"  # who says what is wrong with it
            assert await site.metric("prompts_total", named_by="text") == 1

    asyncio.run(main())


def test_what_cannot_be_rendered_is_left_to_the_engine_to_refuse(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, engines(1)) as site:
            await named_exactly(site)
            for path, body in (
                ("/v1/completions", {"model": "fake", "prompt": ""}),
                ("/v1/completions", {"model": "fake", "prompt": [[-1]]}),
                ("/v1/chat/completions", {"model": "fake", "messages": []}),
                ("/v1/chat/completions", {"model": "fake", "messages": [{"role": 7}, 5]}),
            ):
                status, headers, answer = await site.post(path, body)
                assert status == 400 and headers["x-octavo-engine"] == "e0", answer

    asyncio.run(main())
