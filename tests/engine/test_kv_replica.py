"""A replica fed by an engine's KV events, over real sockets, holds what the engine's own snapshot tells."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
import zmq

from octavo.core.kv_events import digest

ANY_PORT = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}


class Replica:
    """What docs/kv-events.md says a subscriber does."""

    def __init__(self, events):
        self.names, self.sequence, self._context = set(), -1, zmq.Context()
        self.sub, self.dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self.sub.connect(events["publish"])
        self.sub.subscribe(b"")
        self.dealer.connect(events["replay"])

    def close(self):
        self._context.destroy(linger=0)

    def take_snapshot(self, snapshot):
        self.names = {(block["medium"], block["group_idx"], block["name"]) for block in snapshot["blocks"]}
        self.sequence = snapshot["sequence"]

    async def read_until(self, sequence):
        while self.sequence < sequence:
            while not self.sub.poll(0):
                await asyncio.sleep(0.01)
            _, number, payload = self.sub.recv_multipart()
            if (number := int.from_bytes(number, "big")) > self.sequence + 1:
                await self.replay()
            self.apply(number, payload)

    async def replay(self):
        self.dealer.send_multipart([b"", (self.sequence + 1).to_bytes(8, "big")])
        while True:
            while not self.dealer.poll(0):
                await asyncio.sleep(0.01)
            _, number, payload = self.dealer.recv_multipart()
            if not payload:
                return
            self.apply(int.from_bytes(number, "big"), payload)

    def apply(self, number, payload):
        if number <= self.sequence:
            return
        assert number == self.sequence + 1
        self.sequence = number
        for event in msgspec.msgpack.decode(payload)[1]:
            match event:
                case ["BlockStored", names, _, tokens, 16, None, medium, None, keys, group]:
                    assert len(tokens) == 16 * len(names) and len(keys) == len(names)
                    self.names |= {(medium, group, name) for name in names}
                case ["BlockRemoved", names, medium, group]:
                    self.names -= {(medium, group, name) for name in names}
                case ["AllBlocksCleared"]:
                    self.names.clear()
                case _:
                    raise AssertionError(event)

    @property
    def digest(self):
        return digest(self.names)


async def serve_some(client, request_of, turn):
    """Prompts that share prefixes, in a pool that must evict; every sixth turn the cache is cleared."""
    number = random.Random(turn)
    streams = [
        client.submit(
            [
                request_of(
                    f"{turn}-{i}", prompt=[number.randrange(5)] * 16 * number.randint(1, 30), max_tokens=40
                )
            ]
        )
        for i in range(4)
    ]
    for stream in streams:
        async for _ in stream:
            pass
    if turn % 6 == 5:
        await client.admin("reset_prefix_cache")


@pytest.mark.parametrize("join_at", [0, 3])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_snapshot_and_events_make_a_replica_equal_to_the_cache(
    engine, run, request_of, join_at, async_scheduling
):
    async def scenario():
        settings = {"kv_events_config": ANY_PORT, "async_scheduling": async_scheduling}
        async with engine("fast", **settings) as client:
            replica = None
            for turn in range(12):
                await serve_some(client, request_of, turn)
                if turn < join_at:
                    continue
                snapshot = await client.admin("kv_snapshot")
                if replica is None:
                    replica = Replica(client.info.kv["events"])
                    replica.take_snapshot(snapshot)
                    continue
                await replica.read_until(snapshot["sequence"])
                assert replica.digest == snapshot["digest"], turn
                assert len(replica.names) == len(snapshot["blocks"])
            assert client.stats.kv_event_batches == replica.sequence + 1 > 12
            replica.close()

    run(scenario())


def test_without_events_a_snapshot_has_no_number(engine, run, request_of):
    async def scenario():
        async with engine("fast") as client:
            assert client.info.kv["events"] is None
            await serve_some(client, request_of, 0)
            snapshot = await client.admin("kv_snapshot")
            assert snapshot["sequence"] is None and snapshot["block_size"] == 16

    run(scenario())
