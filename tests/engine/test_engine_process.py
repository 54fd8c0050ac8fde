"""An engine in its own process: what it does is seen, and so is its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from octavo.child_process import ORPHANED
from octavo.config import EngineConfig
from octavo.engine import messages
from octavo.engine.client import EngineClient
from octavo.engine.launch import start_engine
from octavo.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    OctavoError,
    QueueFull,
    Unavailable,
)

FAIL_ROW, FAIL_STEP, HANG, DIE = 90, 91, 92, 93


async def collect(stream):
    tokens, reasons = {}, {}
    async for output in stream:
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason:
            reasons[output.request_id] = output.finish_reason
    return tokens, reasons


def test_outputs_of_requests_submitted_together_come_merged(engine, run, request_of):
    async def scenario():
        async with engine() as client:
            info = client.info
            assert client.state == "ready" and info.kv["block_size"] == 16 and info.kv["hash"] == "sha256"
            assert len(bytes.fromhex(info.kv["root"])) == 32 and info.kv["groups"] == [{"kind": "full"}]
            seen = []
            client.listeners.append(seen.append)
            tokens, reasons = await collect(
                client.submit([request_of("a"), request_of("b", prompt=[7], max_tokens=3)])
            )
            assert tokens == {"a": [3, 4, 5, 6, 7], "b": [1, 2, 3]}
            assert reasons == {"a": "length", "b": "length"}
            assert sum(len(o.token_ids) for message in seen for o in message.outputs) == 8
            assert client.in_flight == 0 and client.stats.running == 0 and client.stats.kv_usage == 0
            last = [o for message in seen for o in message.outputs if o.finish_reason][-1]
            assert (
                0
                < last.times.arrival
                <= last.times.scheduled
                <= last.times.first_token
                <= last.times.finished
            )

    run(scenario())


def test_start_up_stages_are_told_before_ready(engine, run):
    async def scenario():
        async with engine("never", wait=False) as client:
            assert client.state == "loading"
            while client.stage != "loading weights":
                await client.changed()
            assert client.detail == "for ever"
            with pytest.raises(Unavailable, match="loading weights"):
                client.submit([])

    run(scenario())


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("refused", ConfigError, "the longest that fits is 42"),
        ("broken", OctavoError, "ValueError: no such tensor"),
        ("missing", ConfigError, "no executor 'fake_executor:missing'"),
    ],
)
def test_a_start_that_fails_says_why(engine, run, name, kind, text):
    async def scenario():
        async with engine(name, wait=False) as client:
            with pytest.raises(kind, match=text):
                await client.wait_ready()
            assert client.state == "dead" and text in client.error

    run(scenario())


def test_kill_of_the_engine_ends_every_stream_within_two_seconds(engine, run, request_of):
    async def scenario():
        async with engine("paced") as client:
            streams = [client.submit([request_of(f"r{i}", max_tokens=1000)]) for i in range(16)]
            await anext(streams[0])
            killed = time.monotonic()
            os.kill(client.pid, signal.SIGKILL)
            results = await asyncio.gather(*(collect(s) for s in streams), return_exceptions=True)
            assert time.monotonic() - killed < 2
            assert all(isinstance(result, Unavailable) for result in results)
            assert "SIGKILL" in client.error and client.state == "dead" and client.in_flight == 0
            with pytest.raises(Unavailable, match="SIGKILL"):
                client.submit([request_of("late")])

    run(scenario())


def test_a_fault_in_a_step_is_told_and_ends_the_process(engine, run, request_of):
    async def scenario():
        async with engine("paced") as client:
            bystander = client.submit([request_of("bystander", max_tokens=1000)])
            await anext(bystander)
            process = client._process
            with pytest.raises(Unavailable, match="ValueError: the step is broken"):
                await collect(client.submit([request_of("bad", prompt=[FAIL_STEP])]))
            with pytest.raises(Unavailable, match="the step is broken"):
                await collect(bystander)
            assert await asyncio.to_thread(process._process.wait, 10) == 1

    run(scenario())


def test_a_fault_of_one_row_ends_that_request_alone(engine, run, request_of):
    async def scenario():
        async with engine("paced") as client:
            good = asyncio.create_task(collect(client.submit([request_of("good", max_tokens=20)])))
            outputs = [o async for o in client.submit([request_of("bad", prompt=[FAIL_ROW])])]
            assert [o.finish_reason for o in outputs] == ["error"] and outputs[0].error == "logits are NaN"
            assert (await good)[1] == {"good": "length"}

    run(scenario())


async def until(client, condition):
    """Wait for outputs of the engine until its stats satisfy ``condition``."""
    reached = asyncio.Event()
    client.listeners.append(lambda message: condition(message.stats) and reached.set())
    await reached.wait()


@pytest.mark.parametrize("how", ["close", "cancel", "drop", "abort"])
def test_a_reader_that_leaves_frees_its_blocks(engine, run, request_of, how):
    async def scenario():
        async with engine("paced") as client:
            stream = client.submit([request_of("a", max_tokens=1000), request_of("b", max_tokens=1000)])
            await anext(stream)
            assert client.stats.kv_usage > 0
            idle = asyncio.create_task(until(client, lambda stats: stats.running == 0 == stats.kv_usage))
            if how == "close":
                await stream.aclose()
                assert [o async for o in stream if o.finish_reason] == []
            elif how == "cancel":
                task = asyncio.create_task(collect(stream))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif how == "drop":
                del stream
            else:
                client.abort(["a", "b"])
                assert (await collect(stream))[1] == {"a": "abort", "b": "abort"}
            await idle
            assert client.in_flight == 0

    run(scenario())


def test_what_cannot_be_served_is_refused_at_once(engine, run, request_of):
    async def scenario():
        async with engine("paced", max_queue=1, max_num_seqs=1) as client:
            with pytest.raises(ContextLengthExceeded, match=r"needs 2001 tokens.*length is 2000"):
                client.submit([request_of("long", prompt=[1] * 2000, max_tokens=1)])
            with pytest.raises(InvalidRequest, match="token id 100"):
                client.submit([request_of("id", prompt=[100])])
            running = client.submit([request_of("r", max_tokens=1000)])
            await anext(running)
            with pytest.raises(InvalidRequest, match="in use"):
                client.submit([request_of("r")])
            waiting = client.submit([request_of("w", max_tokens=2)])
            with pytest.raises(QueueFull, match="max-queue 1") as caught:
                await collect(client.submit([request_of("x")]))
            assert caught.value.retry_after_s >= 1
            await running.aclose()
            assert (await collect(waiting))[1] == {"w": "length"}

    run(scenario())


def test_an_admin_method_is_called_and_an_unknown_one_named(engine, run, request_of):
    async def scenario():
        async with engine() as client:
            await collect(client.submit([request_of("a", prompt=[1] * 40)]))
            assert client.stats.cached_blocks == 2
            assert await client.admin("reset_prefix_cache") is None
            await until(client, lambda stats: stats.cached_blocks == 0)
            with pytest.raises(InvalidRequest, match=r"'explode'.*reset_prefix_cache"):
                await client.admin("explode")

    run(scenario())


def test_draining_lets_streams_end_and_then_takes_no_more(engine, run, request_of):
    async def scenario():
        async with engine("paced") as client:
            stream = client.submit([request_of("a", max_tokens=60)])
            await anext(stream)
            drained = asyncio.create_task(client.drain(grace_s=0.2, timeout_s=10))
            await asyncio.sleep(0)
            assert client.state == "draining"
            late = client.submit([request_of("b", max_tokens=2)])  # still in the grace time
            assert (await collect(late))[1] == {"b": "length"}
            assert (await collect(stream))[1] == {"a": "length"}
            assert await drained is True
            with pytest.raises(Unavailable, match="draining"):
                client.submit([request_of("c")])

    run(scenario())


def test_draining_cuts_what_is_left_at_its_limit(engine, run, request_of):
    async def scenario():
        async with engine("paced") as client:
            stream = client.submit([request_of("a", max_tokens=1900)])
            await anext(stream)
            assert await client.drain(grace_s=0, timeout_s=0.1) is False
            assert (await collect(stream))[1] == {"a": "abort"}

    run(scenario())


def test_an_engine_that_hangs_is_stalled_and_one_that_goes_on_is_ready(engine, run, request_of):
    async def scenario():
        async with engine("paced", stall_s=1.5) as client:
            os.kill(client.pid, signal.SIGSTOP)
            while client.state != "stalled":
                await client.changed()
            with pytest.raises(Unavailable, match="stalled"):
                client.submit([request_of("a")])
            os.kill(client.pid, signal.SIGCONT)
            while client.state != "ready":
                await client.changed()
            assert (await collect(client.submit([request_of("a")])))[1] == {"a": "length"}

    run(scenario())


def test_an_engine_that_stays_stalled_is_ended_and_those_who_wait_are_told(engine, run, request_of):
    async def scenario():
        async with engine("paced", stall_s=1.0, end_stalled_s=0.5) as client:
            waiting = client.submit([request_of("a", max_tokens=1000)])
            os.kill(client.pid, signal.SIGSTOP)
            with pytest.raises(Unavailable, match="did not answer"):
                await collect(waiting)
            assert client.state == "dead"

    run(scenario())


def test_a_long_step_that_was_foretold_is_no_stall_and_a_silent_one_is(engine, run, request_of):
    async def scenario():
        async with engine("slow", stall_s=0.8) as client:
            states = set()

            async def watch():
                while True:
                    await client.changed()
                    states.add(client.state)

            watching = asyncio.create_task(watch())
            stream = client.submit([request_of("prompt", prompt=[1] * 20, max_tokens=1)])
            assert (await collect(stream))[1] == {"prompt": "length"}
            assert "stalled" not in states
            watching.cancel()
            hanging = client.submit([request_of("hang", prompt=[HANG])])
            while client.state != "stalled":
                await client.changed()
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(Unavailable, match="SIGKILL"):
                await collect(hanging)

    run(scenario())


def test_the_engine_ends_when_its_owner_is_killed():
    code = """
import asyncio, pathlib
from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.launch import start_engine
async def main():
    client = EngineClient(start_engine("fake_executor:never"))
    await client.start(EngineConfig(model="x"), model_path=pathlib.Path("x"))
    while client.stage != "loading weights":
        await client.changed()
    print(client.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.path.dirname(__file__) + ":" + os.environ.get("PYTHONPATH", "")}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    engine = os.pidfd_open(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    poller = zmq.Poller()
    poller.register(engine, zmq.POLLIN)
    assert poller.poll(5000), "a pidfd is readable once its process has ended"
    os.close(engine)
    owner.stdout.close()


def test_an_engine_that_was_told_nothing_ends_with_its_owner(engine):
    process = start_engine("fake_executor:never")
    process.stdin.close()
    assert process.wait(30) == ORPHANED


def test_a_message_of_another_version_is_refused_by_both_sides(engine, run, monkeypatch):
    async def scenario():
        async with engine() as client:
            other = messages.VERSION + 1
            frame = messages._encoder.encode(messages.Envelope(other, 0, messages.Shutdown()))
            client._connection._out.send(frame)
            while client.state != "dead":
                await client.changed()
            assert f"protocol version {other}, this side {messages.VERSION}" in client.error
        monkeypatch.setattr(messages, "VERSION", other)
        async with engine(wait=False) as client:
            with pytest.raises(Unavailable, match="exit status 1"):
                await client.wait_ready()

    run(scenario())


def test_a_message_of_another_version_and_shape_names_the_version():
    frame = messages._encoder.encode({"version": 9, "rank": 0, "body": {"type": "from the future"}})
    with pytest.raises(messages.VersionMismatch, match="version 9"):
        messages.decode(frame)


def test_errors_cross_the_border_whole():
    for error in (
        ContextLengthExceeded("too long", param="prompt"),
        QueueFull("full", retry_after_s=7),
        ConfigError("no"),
        InvalidRequest("bad", param="x", code="y"),
    ):
        again = messages.ErrorInfo.of(error).error()
        assert type(again) is type(error)
        for name in ("message", "param", "code", "retry_after_s"):
            assert getattr(again, name, None) == getattr(error, name, None)


def test_an_engine_that_ends_before_it_is_told_what_to_do_is_reported_and_closed(run, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    more_than_a_pipe_holds = b"launch" * 2**20
    monkeypatch.setattr(messages, "encode_launch", lambda launch: more_than_a_pipe_holds)

    async def main():
        client = EngineClient()
        await client.start(EngineConfig(model="file:///nowhere"), model_path=Path("/nowhere"))
        with pytest.raises(Unavailable, match="exit status 1"):
            await client.wait_ready()
        await client.close()

    run(main())
