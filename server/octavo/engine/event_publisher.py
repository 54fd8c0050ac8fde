"""KV events over ZeroMQ, in vLLM's wire form: what changed in the prefix cache, in batches with numbers.

A batch is three frames on the PUB socket: topic, sequence number (8 bytes, big-endian, from 0 at each
start), msgpack ``[timestamp, events, dp_rank]``. A subscriber that finds a number missing asks for it on the
ROUTER socket, with the number as one frame after an empty one: it gets the batches from there on that are
still kept, each as (empty, number, payload), then (empty, -1, empty). What is not kept any more it makes up
for with ``GET /kv/snapshot``, which names the number of the last batch that it holds.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from octavo.config import KVEventsConfig
from octavo.errors import ConfigError

PUBLISH_PORT, REPLAY_PORT = 5557, 5558
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPEAT_MS = 500  # once a subscriber was too slow: an idle publisher shows its last number this often,
REPEATS = 120  # and so many times, for one that missed the end to see that it did

_log = logging.getLogger("octavo.engine")


def sequence_frame(number: int) -> bytes:
    """A batch's number as it goes over the wire."""
    return number.to_bytes(8, "big")


class EventPublisher:
    """Publishes from a thread of its own. ``publish`` never waits: what finds no room is dropped.

    A drop is never silent: ``dropped`` counts it, its number stays missing from the sequence, and a batch
    with a higher number (an empty one if nothing else happens) shows subscribers that it does. A subscriber
    too slow for its own queue loses batches alone, sees it by the numbers, and asks for a replay: ``missed``
    counts how often one ran full.
    """

    def __init__(self, config: KVEventsConfig, host: str, rank: int = 0) -> None:
        """Opens the sockets. Raises ``ConfigError`` when one cannot be had."""
        self.sequence = -1  # of the last batch handed over
        self.dropped = 0
        self.missed = 0
        self._rank = rank
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._gap = False
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.XPUB)  # a PUB that hears of subscriptions
            self._pub.sndhwm = config.hwm
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)
            self.publish_at = _open(self._pub, "endpoint", config.endpoint or _here(host, PUBLISH_PORT))
            self._replay = self._context.socket(zmq.ROUTER)
            # A whole replay fits (ZeroMQ hears only by halves what was read); a reader too slow loses more.
            self._replay.sndhwm = 2 * (config.buffer_steps + 2)
            replay_at = config.replay_endpoint or _here(host, REPLAY_PORT)
            self.replay_at = _open(self._replay, "replay_endpoint", replay_at)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._queue, self._taken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._queue.sndhwm, self._taken.rcvhwm = config.max_queue_size, 1
        self._queue.linger = 0
        self._taken.bind("inproc://batches")
        self._queue.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> dict[str, str]:
        """The ``kv.events`` object of ``/server_info``."""
        return {"publish": self.publish_at, "replay": self.replay_at}

    def publish(self, events: Sequence[Any]) -> None:
        """Hand over one batch; without events nothing, unless subscribers must still hear of a drop."""
        if not events and not self._gap:
            return
        frames = [sequence_frame(self.sequence + 1), self._encoder.encode((time.time(), events, self._rank))]
        try:
            self._queue.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if not events:
                return
            if not self.dropped:
                _log.warning(
                    "KV events are made faster than they are sent: batch %d was dropped, more may follow "
                    "(octavo:kv_event_batches_dropped_total). Raise max_queue_size in --kv-events-config",
                    self.sequence + 1,
                )
            self.dropped += 1
            self._gap = True
        else:
            self._gap = False
        self.sequence += 1

    def close(self) -> None:
        """Send what was handed over, then end."""
        self._queue.linger = -1
        self._queue.send(b"")
        self._thread.join()
        self._queue.close()
        self._context.term()

    # On the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._taken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        repeats = 0
        while True:
            ready = dict(poller.poll(REPEAT_MS if repeats else None))
            if self._taken in ready:
                frames = self._taken.recv_multipart()
                if len(frames) == 1:
                    break
                self._kept.append((frames[0], frames[1]))
                self._send(self._kept[-1])
                repeats = REPEATS if self.missed else 0
            elif repeats:
                self._send(self._kept[-1])  # subscribers tell by its number that they have it
                repeats -= 1
            if self._pub in ready and self._pub.recv()[:1] == b"\1" and self._kept:
                self._send(self._kept[-1])  # who has just subscribed sees how far it is
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
        self._taken.close()
        self._pub.close(linger=1000)
        self._replay.close(linger=0)

    def _send(self, batch: tuple[bytes, bytes]) -> None:
        """Send to all subscribers that have room."""
        frames = [self._topic, *batch]
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:  # one is full just now; from here on it is passed over until it has read
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)
            if not self.missed:
                _log.warning(
                    "a subscriber of the KV events is too slow and missed batch %d; it can ask for a replay. "
                    "Raise hwm in --kv-events-config, or make it faster",
                    int.from_bytes(batch[0], "big"),
                )
            self.missed += 1

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning(
                "a replay was asked for in %d frames: it takes an empty one and 8 bytes", len(frames)
            )
            return
        client, empty, first = frames
        for number, payload in self._kept:
            if number >= first:  # big-endian: bytes compare as their numbers do
                self._replay.send_multipart([client, empty, number, payload], zmq.NOBLOCK)
        self._replay.send_multipart([client, empty, END_OF_REPLAY, b""], zmq.NOBLOCK)


def _here(host: str, port: int) -> str:
    host = "127.0.0.1" if host == "localhost" else host  # sockets bind to no names
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _open(socket: zmq.Socket[Any], field: str, endpoint: str) -> str:
    """Bind to an address of this machine (``*``, loopback, ipc), connect to another; returns it."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        if not _is_here(endpoint):
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
        where = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv-events-config: {field} {endpoint} cannot be used: {error.strerror}. Choose another"
        ) from error
    return where.replace("://0.0.0.0:", "://*:")


def _is_here(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "*"
    return address.is_loopback or address.is_unspecified
