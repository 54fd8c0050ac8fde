"""The engine's end of its clients: one socket in, one out to each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats
from octavo.engine import messages
from octavo.engine.messages import OWNER
from octavo.errors import OctavoError

LAST_WORDS_MS = 2000  # how long a dying engine tries to hand over its last message


class Port:
    """Hears all clients, and tells each what its own requests came to. There is always the owner."""

    def __init__(self, launch: messages.Launch) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._rank = launch.rank
        self._in = self._context.socket(zmq.PULL)
        self._in.set_hwm(0)
        self._in.bind(launch.to_engine)
        self._out = {OWNER: self._connected(launch.from_engine)}
        self._asked_by: dict[str, int] = {}  # the client of each request that is not the owner's
        self._gone: set[int] = set()

    def send(self, body: messages.FromEngine, client: int = OWNER) -> None:
        """Tell one client, if it is still there."""
        if (socket := self._out.get(client)) is not None:
            socket.send(messages.encode(body, self._rank, client))

    def send_all(self, body: messages.FromEngine) -> None:
        for client in self._out:
            self.send(body, client)

    def send_outputs(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        """To each client those of its requests, and the load."""
        if len(self._out) == 1 and not self._asked_by:
            self.send(messages.Outputs(outputs, stats))
            return
        shares: dict[int, list[EngineOutput]] = {client: [] for client in self._out}
        for output in outputs:
            ended = output.finish_reason is not None
            client = (self._asked_by.pop if ended else self._asked_by.get)(output.request_id, OWNER)
            if client in shares:
                shares[client].append(output)
        for client, share in shares.items():
            self.send(messages.Outputs(share, stats), client)

    def reject(self, request_ids: list[str], error: OctavoError) -> None:
        """Tell who asked that none of these is taken; asked together, they are of one client."""
        for client in {self._asked_by.pop(name, OWNER) for name in request_ids}:
            self.send(messages.Rejected(request_ids, messages.ErrorInfo.of(error)), client)

    def receive(self, timeout_ms: int) -> list[messages.Envelope]:
        """All that has arrived, waiting up to ``timeout_ms`` for the first."""
        arrived: list[messages.Envelope] = []
        while self._in.poll(0 if arrived else timeout_ms):
            arrived.append(messages.decode_envelope(self._in.recv()))
        return arrived

    def attach(self, client: int, address: str) -> bool:
        """False for one that was detached before this came: the messages of two processes may cross."""
        if client in self._gone:
            return False
        self._out[client] = self._connected(address)
        return True

    def detach(self, client: int) -> list[str]:
        """The requests that it leaves behind. Their last outputs are for nobody."""
        self._gone.add(client)
        if (socket := self._out.pop(client, None)) is not None:
            socket.close(linger=0)
        return [name for name, asker in self._asked_by.items() if asker == client]

    def takes(self, client: int, requests: Sequence[EngineRequest]) -> bool:
        """Note who asks. False for a client that is gone: nobody would read what comes of them."""
        if client != OWNER and client in self._out:
            self._asked_by.update((request.request_id, client) for request in requests)
        return client in self._out

    def close(self) -> None:
        """Returns once the last message is handed over, or after ``LAST_WORDS_MS``."""
        self._in.close(linger=0)
        for socket in self._out.values():
            socket.close()
        self._context.term()

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)  # no side ever blocks; the bounded queue bounds what is in flight
        socket.linger = LAST_WORDS_MS
        socket.connect(address)
        return socket
