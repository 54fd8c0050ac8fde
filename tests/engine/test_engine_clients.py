"""Several clients of one engine: each hears of its own requests; one that is gone leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from octavo.engine import messages
from octavo.engine.client import EngineClient
from octavo.engine.port import Port
from octavo.errors import InvalidRequest, QueueFull, Unavailable

FAIL_STEP = 91


async def collect(stream):
    tokens, reasons = {}, {}
    async for output in stream:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason:
            reasons[output.request_id] = output.finish_reason
    return tokens, reasons


async def until(client, condition):
    """Wait for outputs of the engine until its stats satisfy ``condition``."""
    reached = asyncio.Event()
    client.listeners.append(lambda message: condition(message.stats) and reached.set())
    await reached.wait()


@contextlib.asynccontextmanager
async def attached(owner):
    """One more client, and its place at the engine."""
    client, place = EngineClient(), owner.admit()
    await client.attach(place)
    try:
        await client.wait_ready()
        yield client, place
    finally:
        await client.close()


def test_each_client_gets_the_outputs_of_its_own_requests_and_the_load_of_all(engine, run, request_of):
    async def scenario():
        async with engine("paced") as owner, attached(owner) as (one, _), attached(owner) as (two, _):
            assert one.info == two.info == owner.info
            loads, seen = {}, {}
            clients = {"owner": owner, "one": one, "two": two}
            for name, client in clients.items():
                client.listeners.append(
                    lambda message, name=name: (
                        loads.setdefault(name, []).append(message.stats.running),
                        seen.setdefault(name, set()).update(o.request_id for o in message.outputs),
                    )
                )
            answers = await asyncio.gather(
                *(
                    collect(client.submit([request_of(f"{name}-{i}", max_tokens=30) for i in range(2)]))
                    for name, client in clients.items()
                )
            )
            for name, (tokens, reasons) in zip(clients, answers, strict=True):
                assert set(seen[name]) == {f"{name}-0", f"{name}-1"}
                assert set(reasons.values()) == {"length"}
                assert [len(one) for one in tokens.values()] == [30, 30]
                assert max(loads[name]) == 6

    run(scenario())


def test_a_client_that_comes_before_the_engine_is_ready_is_told_when_it_is(engine, run, request_of):
    async def scenario():
        async with engine("fast", wait=False) as owner, attached(owner) as (client, _):
            assert client.state == "ready"
            assert (await collect(client.submit([request_of("a")])))[1] == {"a": "length"}

    run(scenario())


def test_a_client_that_is_dismissed_leaves_no_request_and_no_block(engine, run, request_of):
    async def scenario():
        async with engine("paced") as owner, attached(owner) as (gone, place), attached(owner) as (stays, _):
            lost = gone.submit([request_of("lost", max_tokens=1900)])
            kept = [client.submit([request_of(name, max_tokens=60)]) for name, client in
                    (("owner", owner), ("stays", stays))]  # fmt: skip
            for stream in (lost, *kept):
                await anext(stream)
            await until(owner, lambda stats: stats.running == 3)
            alone = asyncio.create_task(until(owner, lambda stats: stats.running == 2))
            owner.dismiss(place)
            await alone
            assert [(await collect(stream))[1] for stream in kept] == [
                {"owner": "length"},
                {"stays": "length"},
            ]
            await until(owner, lambda stats: stats.running == 0 == stats.kv_usage)

    run(scenario())


def test_an_admin_call_is_answered_to_who_made_it(engine, run):
    async def scenario():
        async with engine() as owner, attached(owner) as (client, _):
            answers = await asyncio.gather(
                owner.admin("reset_prefix_cache"), client.admin("explode"), return_exceptions=True
            )
            assert answers[0] is None and isinstance(answers[1], InvalidRequest)

    run(scenario())


def test_only_the_owner_ends_the_engine(engine, run, request_of):
    async def scenario():
        async with engine() as owner, attached(owner) as (client, _):
            client._send(messages.Shutdown())
            assert (await collect(client.submit([request_of("theirs")])))[1] == {"theirs": "length"}
            assert (await collect(owner.submit([request_of("owners")])))[1] == {"owners": "length"}

    run(scenario())


def test_the_queue_has_one_bound_for_all_clients(engine, run, request_of):
    async def scenario():
        limits = {"max_queue": 1, "max_num_seqs": 1}
        async with engine("paced", **limits) as owner, attached(owner) as (client, _):
            running = owner.submit([request_of("runs", max_tokens=1900)])
            await anext(running)
            waiting = client.submit([request_of("waits", max_tokens=2)])
            for asker in (owner, client):
                await until(asker, lambda stats: stats.waiting == 1)
                assert asker.in_flight_everywhere == 2
            for number, asker in enumerate((owner, client)):
                with pytest.raises(QueueFull, match="max-queue 1"):
                    await collect(asker.submit([request_of(f"late-{number}")]))
            await running.aclose()
            assert (await collect(waiting))[1] == {"waits": "length"}

    run(scenario())


def test_an_engine_that_fails_tells_all_its_clients_why(engine, run, request_of):
    async def scenario():
        async with engine("paced") as owner, attached(owner) as (client, _):
            bystander = client.submit([request_of("bystander", max_tokens=1000)])
            await anext(bystander)
            with pytest.raises(Unavailable, match="the step is broken"):
                await collect(owner.submit([request_of("bad", prompt=[FAIL_STEP])]))
            with pytest.raises(Unavailable, match="the step is broken"):
                await collect(bystander)
            assert client.state == "dead"

    run(scenario())


def test_a_client_sees_a_stall_but_leaves_the_end_to_the_owner(engine, run, request_of):
    async def scenario():
        async with engine("paced", stall_s=60) as owner:
            client = EngineClient(stall_s=0.8, end_stalled_s=0.1)
            await client.attach(owner.admit())
            await client.wait_ready()
            os.kill(owner.pid, signal.SIGSTOP)
            while client.state != "stalled":
                await client.changed()
            os.kill(owner.pid, signal.SIGCONT)
            while client.state != "ready":
                await client.changed()
            assert (await collect(client.submit([request_of("a")])))[1] == {"a": "length"}
            await client.close()

    run(scenario())


def test_what_a_client_said_before_it_was_dismissed_may_come_after(tmp_path, request_of):
    launch = messages.Launch(messages.VERSION, 0, {}, None, f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    port = Port(launch)
    assert port.attach(1, f"ipc://{tmp_path}/out-1") and port.takes(1, [request_of("a")])
    assert port.detach(1) == ["a"]
    assert not port.takes(1, [request_of("b")]), "nobody would read what comes of it"
    assert not port.attach(1, f"ipc://{tmp_path}/out-1")
    assert port.detach(2) == [] and not port.attach(2, f"ipc://{tmp_path}/out-2")
    port.close()
