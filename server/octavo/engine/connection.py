"""The two sockets of a client of an engine."""

from __future__ import annotations

from typing import Any

import zmq
import zmq.asyncio

from octavo.engine import messages


class Connection:
    """From a client to its engine and back. Belongs to the running event loop."""

    def __init__(self, place: messages.Attachment) -> None:
        self._place = place
        self._context: zmq.Context[Any] = zmq.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._in = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket in (self._out, self._in):
            socket.set_hwm(0)  # no side ever blocks; the engine's bounded queue bounds what is in flight
            socket.linger = 0
        self._in.bind(place.from_engine)
        self._out.connect(place.to_engine)

    def send(self, body: messages.ToEngine) -> None:
        """Nothing after ``close``."""
        frame = messages.encode(body, self._place.rank, self._place.client)
        if not self._out.closed:
            self._out.send(frame)

    async def receive(self) -> messages.ToEngine | messages.FromEngine:
        """Raises ``VersionMismatch`` or ``msgspec.DecodeError`` for what cannot be read."""
        return messages.decode(await self._in.recv())

    def close(self) -> None:
        self._in.close()
        self._out.close()
        self._context.term()
