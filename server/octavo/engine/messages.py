"""What API processes and engine ranks say to each other: versioned msgpack over ZeroMQ."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from octavo import errors
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats
from octavo.core.request import Limits

VERSION = 3  # both sides refuse a message of another version
OWNER = 0  # number of the client that started the engine; it alone ends it
ASLEEP = "the engine sleeps: it takes no requests until it is woken up"  # said on both sides


class ErrorInfo(msgspec.Struct, frozen=True):
    """An ``OctavoError`` on its way to another process; ``kind`` is the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int = 1

    @classmethod
    def of(cls, error: errors.OctavoError) -> ErrorInfo:
        retry = getattr(error, "retry_after_s", 1)
        return cls(type(error).__name__, error.message, error.param, error.code, retry)

    def error(self) -> errors.OctavoError:
        """The error again, of its own class where this side knows it."""
        kind: type[errors.OctavoError] = getattr(errors, self.kind, errors.OctavoError)
        if issubclass(kind, (errors.QueueFull, errors.Unavailable)):
            return kind(self.message, retry_after_s=self.retry_after_s)
        return kind(self.message, param=self.param, code=self.code)


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Start these; those of one client request come together. No other client has requests of these ids."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these and free what they hold; unknown ids are ignored (they have just finished)."""

    request_ids: list[str]


class AdminCall(msgspec.Struct, frozen=True, tag="admin"):
    """One of the engine's admin methods, for instance ``reset_prefix_cache``; answered by ``AdminReply``."""

    call_id: int
    method: str
    arguments: dict[str, Any] = {}


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """One more client: what it asks for is answered at ``address``, ``Ready`` first."""

    address: str


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """This client is gone for good: its requests end, and it is told nothing more."""

    client: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process once the current step is done."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A start-up stage began: fetching, loading weights, sizing the cache, warming."""

    stage: str
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests within ``limits``. ``kv`` is the ``kv`` object of ``/server_info``."""

    max_model_len: int
    vocab_size: int
    kv: dict[str, Any]
    num_blocks: int
    eos_token_ids: list[int]
    limits: Limits


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's new tokens, and the load after it. Also sent, empty, as the heartbeat of an idle engine."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """None of these requests was taken; ``error`` says why."""

    request_ids: list[str]
    error: ErrorInfo


class LongStep(msgspec.Struct, frozen=True, tag="long_step"):
    """A step began that may take ``expected_s`` seconds; the engine is silent until it is over."""

    expected_s: float


class AdminReply(msgspec.Struct, frozen=True, tag="admin_reply"):
    """Answer to ``AdminCall``; ``error`` is None when it worked."""

    call_id: int
    value: Any = None
    error: ErrorInfo | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on (bad model, cache too small, fault in a step); it exits after this."""

    error: ErrorInfo


ToEngine = AddRequests | AbortRequests | AdminCall | Attach | Detach | Shutdown
FromEngine = Progress | Ready | Outputs | Rejected | LongStep | AdminReply | Failed


class Launch(msgspec.Struct, frozen=True):
    """What a new engine process is told on its standard input, before any socket exists.

    ``config`` holds the fields of ``EngineConfig``; ``model_path`` the fetched model, or None to fetch it;
    the sockets are ZeroMQ ipc addresses.
    """

    version: int
    rank: int
    config: dict[str, Any]
    model_path: str | None
    to_engine: str
    from_engine: str


class Attachment(msgspec.Struct, frozen=True):
    """Where a client meets its engine: ZeroMQ ipc addresses, the engine's rank, and the client's number,
    which no other has or had.
    """

    to_engine: str
    from_engine: str
    rank: int = 0
    client: int = OWNER


class Envelope(msgspec.Struct, frozen=True):
    """The frame around every message: protocol version, rank of the engine at one end of it, body, number of
    the client at the other.
    """

    version: int
    rank: int
    body: ToEngine | FromEngine
    client: int = OWNER


class _Header(msgspec.Struct, frozen=True):
    """The part of an envelope that no version changes."""

    version: int


class VersionMismatch(errors.OctavoError):
    """The other side speaks another version of this protocol: parts of two releases run together."""

    code = "version_mismatch"


_Message = TypeVar("_Message", Envelope, Launch)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_header_decoder = msgspec.msgpack.Decoder(_Header)
_launch_decoder = msgspec.msgpack.Decoder(Launch)


def encode(body: ToEngine | FromEngine, rank: int = 0, client: int = OWNER) -> bytes:
    return _encoder.encode(Envelope(VERSION, rank, body, client))


def encode_launch(launch: Launch) -> bytes:
    return _encoder.encode(launch)


def decode(data: bytes) -> ToEngine | FromEngine:
    """The body of a message. Raises ``VersionMismatch``, or ``msgspec.DecodeError`` for anything else."""
    return decode_envelope(data).body


def decode_envelope(data: bytes) -> Envelope:
    """As ``decode``, with who sent it."""
    return _checked(data, _decoder)


def decode_launch(data: bytes) -> Launch:
    """As ``decode``, for the launch message."""
    return _checked(data, _launch_decoder)


def _checked(data: bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    try:
        message = decoder.decode(data)
        version = message.version
    except msgspec.DecodeError:  # perhaps another version's shape: its version says so
        version = _header_decoder.decode(data).version
        if version == VERSION:
            raise
    if version != VERSION:
        raise VersionMismatch(f"the other side speaks protocol version {version}, this side {VERSION}")
    return message
