"""What API processes and engine ranks say to each other: versioned msgpack over ZeroMQ."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats

VERSION = 1  # both sides refuse a message of another version


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Start these; those of one client request come together."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these and free what they hold; unknown ids are ignored (they have just finished)."""

    request_ids: list[str]


class AdminCall(msgspec.Struct, frozen=True, tag="admin"):
    """One of the engine's admin methods, for instance ``reset_prefix_cache``; answered by ``AdminReply``."""

    call_id: int
    method: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process once the current step is done."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A start-up stage began: fetching, loading weights, sizing the cache, warming."""

    stage: str
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests. ``kv`` is the ``kv`` object of ``/server_info``."""

    max_model_len: int
    vocab_size: int
    kv: dict[str, Any]
    num_blocks: int
    eos_token_ids: list[int]


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's new tokens, and the load after it. Also sent, empty, as the heartbeat of an idle engine."""

    outputs: list[EngineOutput]
    stats: EngineStats


class AdminReply(msgspec.Struct, frozen=True, tag="admin_reply"):
    """Answer to ``AdminCall``; ``error`` is None when it worked."""

    call_id: int
    value: Any = None
    error: str | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on (bad model, cache too small, fault in a step); it exits after this."""

    message: str
    code: str


ToEngine = AddRequests | AbortRequests | AdminCall | Shutdown
FromEngine = Progress | Ready | Outputs | AdminReply | Failed


class Envelope(msgspec.Struct, frozen=True):
    """The frame around every message: protocol version, engine rank, body."""

    version: int
    rank: int
    body: ToEngine | FromEngine
