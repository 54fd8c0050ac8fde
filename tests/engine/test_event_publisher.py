"""KV events on real sockets: what subscribers get and can ask for again, what a drop looks like."""

from __future__ import annotations

import itertools
import threading

import msgspec
import pytest
import zmq

from octavo.config import KVEventsConfig
from octavo.engine.event_publisher import END_OF_REPLAY, EventPublisher, sequence_frame
from octavo.errors import ConfigError

WAIT_MS = 10_000


@pytest.fixture
def publisher():
    opened = []

    def build(host="127.0.0.1", **fields):
        free = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
        opened.append(EventPublisher(KVEventsConfig(**{**free, **fields}), host))
        return opened[-1]

    yield build
    for one in opened:
        one.close()


@pytest.fixture
def connect():
    context = zmq.Context()

    def build(kind, address, *, topic=b"", rcvhwm=0):
        socket = context.socket(kind)
        socket.rcvtimeo, socket.rcvhwm = WAIT_MS, rcvhwm
        socket.connect(address)
        if kind == zmq.SUB:
            socket.subscribe(topic)
        return socket

    yield build
    context.destroy(linger=0)


def number(frame):
    return int.from_bytes(frame, "big", signed=True)


def subscribed(publisher, socket):
    """Publish until the subscription has arrived; returns the number of the first batch that it got."""
    while True:
        publisher.publish(["hello"])
        if socket.poll(20):
            return number(socket.recv_multipart()[1])


def later(socket, last):
    """The next batch whose number is above ``last``: who has just subscribed may get the newest twice."""
    while number((frames := socket.recv_multipart())[1]) <= last:
        pass
    return frames


def replay(socket, first):
    socket.send_multipart([b"", sequence_frame(first)])
    batches = []
    while (frames := socket.recv_multipart())[1] != END_OF_REPLAY:
        batches.append((number(frames[1]), msgspec.msgpack.decode(frames[2])[1]))
    assert frames == [b"", END_OF_REPLAY, b""]
    return batches


def test_a_batch_is_topic_number_and_payload(publisher, connect):
    events = publisher(topic="kv@pod")
    sub = connect(zmq.SUB, events.publish_at)
    last = subscribed(events, sub)
    while last < events.sequence:
        last = number(sub.recv_multipart()[1])
    events.publish([["BlockRemoved", [b"name"]], ["AllBlocksCleared"]])
    topic, frame, payload = later(sub, last)
    assert (topic, number(frame), len(frame)) == (b"kv@pod", last + 1, 8)
    time, batch, rank = msgspec.msgpack.decode(payload)
    assert batch == [["BlockRemoved", [b"name"]], ["AllBlocksCleared"]] and rank == 0 and time > 1e9


def test_a_subscriber_of_another_topic_hears_nothing(publisher, connect):
    events = publisher(topic="kv@a")
    mine, other = connect(zmq.SUB, events.publish_at), connect(zmq.SUB, events.publish_at, topic=b"kv@b")
    subscribed(events, mine)
    assert not other.poll(100)


def test_who_subscribes_is_shown_the_last_batch(publisher, connect):
    events = publisher()
    events.publish(["first"])
    events.publish(["last"])
    dealer = connect(zmq.DEALER, events.replay_at)
    while len(replay(dealer, 0)) < 2:  # both have left the queue
        pass
    for _ in range(2):
        _, frame, payload = connect(zmq.SUB, events.publish_at).recv_multipart()
        assert (number(frame), msgspec.msgpack.decode(payload)[1]) == (1, ["last"])


def test_without_events_there_is_no_batch(publisher):
    events = publisher()
    events.publish([])
    assert events.sequence == -1
    events.publish(["x"])
    assert events.sequence == 0


def test_a_replay_gives_what_is_kept_from_a_number_on_and_its_end(publisher, connect):
    events = publisher(buffer_steps=5)
    for i in range(8):
        events.publish([i])
    dealer = connect(zmq.DEALER, events.replay_at)
    while not (batches := replay(dealer, 0)) or batches[-1][0] < 7:
        pass
    assert batches == [(i, [i]) for i in range(3, 8)], "the oldest are not kept"
    assert replay(dealer, 6) == [(6, [6]), (7, [7])]
    assert replay(dealer, 8) == []


def test_replays_one_after_the_other_are_whole(publisher, connect):
    events = publisher(buffer_steps=50)
    for i in range(50):
        events.publish([i])
    dealer = connect(zmq.DEALER, events.replay_at)
    while len(replay(dealer, 0)) < 50:
        pass
    for _ in range(100):
        assert [number for number, _ in replay(dealer, 0)] == list(range(50))


def test_a_malformed_replay_request_is_ignored(publisher, connect):
    events = publisher()
    dealer = connect(zmq.DEALER, events.replay_at)
    for frames in ([b"x"], [b"", b"short"], [b"", b"a", b"b"]):
        dealer.send_multipart(frames)
    assert replay(dealer, 0) == []


def test_a_full_queue_drops_counts_and_leaves_a_gap_that_shows(publisher, connect):
    """The thread is held up by a lock of its own making: a replay it answers is as long as we like."""
    events = publisher(max_queue_size=4)
    held, release = hold(events)
    sent = 0
    while not events.dropped:
        events.publish([sent])
        sent += 1
    last = events.sequence
    assert last == sent - 1, "a number is spent on what was dropped"
    events.publish([])
    assert events.sequence == last, "no room yet for telling"
    release.set()
    held.wait(10)
    dealer = connect(zmq.DEALER, events.replay_at)
    while events.sequence == last:
        events.publish([])  # what each heartbeat does
    while not (batches := replay(dealer, 0)) or batches[-1][0] < events.sequence:
        pass
    assert batches[-1] == (last + 1, [])
    assert [n for n, _ in batches] == [*range(last), last + 1], "the dropped one is nowhere"
    events.publish([])
    assert events.sequence == last + 1, "it is told once"


def hold(events):
    """Stop the publisher's thread at its next batch until ``release`` is set."""
    held, release, send = threading.Event(), threading.Event(), events._send

    def wait(batch):
        release.wait(10)
        held.set()
        return send(batch)

    events._send = wait
    return held, release


def test_a_subscriber_that_does_not_read_loses_batches_alone_and_is_told(publisher, connect):
    events = publisher(hwm=50, buffer_steps=100_000)
    slow, quick = connect(zmq.SUB, events.publish_at, rcvhwm=1), connect(zmq.SUB, events.publish_at)
    subscribed(events, slow)
    last = subscribed(events, quick)
    filler = "x" * 50_000  # beyond what the sockets of both sides buffer
    while not events.missed:
        events.publish([filler])
        while last < events.sequence:
            last = number(quick.recv_multipart()[1])
    events.publish(["after"])
    while last < events.sequence:
        frames = quick.recv_multipart()
        assert number(frames[1]) == last + 1, "the quick one misses nothing"
        last += 1
    assert events.dropped == 0
    seen = []
    while not seen or seen[-1] < events.sequence:  # the last batch is shown again, for it to see
        seen.append(number(slow.recv_multipart()[1]))
    gaps = {a: b for a, b in itertools.pairwise(seen) if b > a + 1}
    assert gaps, "it sees that it missed some"
    dealer = connect(zmq.DEALER, events.replay_at)
    first = min(gaps) + 1
    assert [n for n, _ in replay(dealer, first)] == list(range(first, events.sequence + 1))


def test_addresses_follow_the_host_unless_told(publisher):
    events = publisher(endpoint=None, replay_endpoint=None)
    assert events.addresses == {"publish": "tcp://127.0.0.1:5557", "replay": "tcp://127.0.0.1:5558"}
    with pytest.raises(ConfigError, match=r"endpoint tcp://127.0.0.1:5557 cannot be used: Address already"):
        publisher(endpoint=None)
    assert publisher(endpoint="tcp://*:0").publish_at.startswith("tcp://*:")


def test_an_endpoint_elsewhere_is_connected_to(publisher, connect):
    context = zmq.Context()
    collector = context.socket(zmq.SUB)
    collector.rcvtimeo = WAIT_MS
    collector.subscribe(b"")
    port = collector.bind_to_random_port("tcp://127.0.0.1")
    events = publisher(endpoint=f"tcp://localhost:{port}")
    subscribed(events, collector)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1]", "is not a JSON object"), ('{"port": 1}', "unknown field 'port'"), ('{"hwm": 0}', "hwm is 0"),
        ('{"publisher": "nats"}', "choose zmq or null"), ('{"topic": 1}', "topic is 1"),
        ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events is 'yes'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=message):
        KVEventsConfig.of(value)
