"""The engine's process: ``python -m octavo.engine.process``, told on standard input what to run.

Standard input stays open for as long as the owner lives; its end ends this process, whatever it is doing. A
fault in a step is told to the owner (``Failed``) and ends the process too: a batch that failed as a whole
cannot be trusted.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig, engine_config
from octavo.engine import messages
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor, ExecutorFactory
from octavo.errors import ConfigError, OctavoError

HEARTBEAT_MS = 500  # an idle engine speaks this often
LAST_WORDS_MS = 2000  # how long a dying engine tries to hand over its last message
ORPHANED = 3  # exit status when the owner is gone

_log = logging.getLogger("octavo.engine")


class Port:
    """The engine's two sockets."""

    def __init__(self, launch: messages.Launch) -> None:
        self._context = zmq.Context()
        self._rank = launch.rank
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket in (self._in, self._out):
            socket.set_hwm(0)
            socket.linger = LAST_WORDS_MS
        self._in.bind(launch.to_engine)
        self._out.connect(launch.from_engine)

    def send(self, body: messages.FromEngine) -> None:
        self._out.send(messages.encode(body, self._rank))

    def receive(self, timeout_ms: int) -> list[messages.ToEngine | messages.FromEngine]:
        """All that has arrived, waiting up to ``timeout_ms`` for the first."""
        arrived: list[messages.ToEngine | messages.FromEngine] = []
        while self._in.poll(0 if arrived else timeout_ms):
            arrived.append(messages.decode(self._in.recv()))
        return arrived

    def close(self) -> None:
        """Returns once the last message is handed over, or after ``LAST_WORDS_MS``."""
        self._in.close(linger=0)
        self._out.close()
        self._context.term()


def serve(core: EngineCore, port: Port) -> None:
    """Run until told to stop. Aborts and new requests are taken in between any two steps."""
    while _take_in(core, port, 0 if core.has_work else HEARTBEAT_MS):
        if core.wait() and not _take_in(core, port, 0):
            return
        outputs = core.step()
        for request_ids, error in core.take_rejected():
            _reject(port, request_ids, error)
        port.send(messages.Outputs(outputs, core.stats()))


def _take_in(core: EngineCore, port: Port, timeout_ms: int) -> bool:
    """Do what the owner says, waiting so long for the first message. False when it says to stop."""
    for message in port.receive(timeout_ms):
        match message:
            case messages.AddRequests(requests):
                try:
                    core.add(requests)
                except OctavoError as error:
                    _reject(port, [request.request_id for request in requests], error)
            case messages.AbortRequests(request_ids):
                core.abort(request_ids)
            case messages.AdminCall():
                port.send(_admin(core, message))
            case messages.Shutdown():
                return False
            case _:
                raise OctavoError(f"an engine takes no {type(message).__name__} message")
    return True


def _reject(port: Port, request_ids: list[str], error: OctavoError) -> None:
    port.send(messages.Rejected(request_ids, messages.ErrorInfo.of(error)))


def _admin(core: EngineCore, call: messages.AdminCall) -> messages.AdminReply:
    try:
        return messages.AdminReply(call.call_id, core.admin(call.method, **call.arguments))
    except OctavoError as error:
        return messages.AdminReply(call.call_id, error=messages.ErrorInfo.of(error))


def load(launch: messages.Launch, progress: Callable[[str, str], None]) -> tuple[EngineConfig, Executor]:
    """Fetch the model where that was not done, and build the executor that ``launch`` names."""
    from octavo.fetch import fetch, with_draft_here

    values: dict[str, Any] = dict(launch.config)
    config = engine_config(values.pop("model"), values)
    if launch.model_path is not None:
        path = Path(launch.model_path)
    else:
        progress("fetching", config.model)
        path = fetch(config.model, None, lambda detail: progress("fetching", detail))
    config = with_draft_here(config, lambda detail: progress("fetching", detail))
    return config, _factory(launch.executor)(config, path, progress)


def _factory(name: str) -> ExecutorFactory:
    module, _, function = name.partition(":")
    try:
        factory: ExecutorFactory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no executor {name!r}: {error}") from error
    return factory


def run(launch: messages.Launch) -> int:
    """Load, say so, serve. Returns the process's exit status."""
    port = Port(launch)
    try:
        config, executor = load(launch, lambda stage, detail: port.send(messages.Progress(stage, detail)))
        core = EngineCore(
            config,
            executor,
            foretell=lambda seconds: port.send(messages.LongStep(seconds)),
            rank=launch.rank,
        )
        info = executor.info
        gc.collect()
        gc.freeze()  # what was loaded lives as long as the process: no later collection walks it
        port.send(
            messages.Ready(
                info.max_model_len,
                info.vocab_size,
                core.kv,
                info.num_blocks,
                list(info.eos_token_ids),
                core.limits,
            )
        )
        serve(core, port)
    except OctavoError as error:
        port.send(messages.Failed(messages.ErrorInfo.of(error)))
        return 1
    except Exception as error:  # whatever it is, the owner must hear of it before this process ends
        _log.exception("the engine failed")
        port.send(messages.Failed(messages.ErrorInfo("OctavoError", f"{type(error).__name__}: {error}")))
        return 1
    finally:
        port.close()
    return 0


def _read_launch(stdin: int) -> messages.Launch:
    return messages.decode_launch(_read(stdin, int.from_bytes(_read(stdin, 4), "big")))


def _read(stdin: int, size: int) -> bytes:
    """So many bytes, fewer only at the end. Unbuffered: a buffer's lock would trip the interpreter's exit."""
    data = b""
    while len(data) < size and (part := os.read(stdin, size - len(data))):
        data += part
    return data


def _end_with_owner(stdin: int) -> None:
    while os.read(stdin, 1):
        pass  # the owner says nothing more; only its end counts
    os._exit(ORPHANED)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stdin = sys.stdin.fileno()
    try:
        launch = _read_launch(stdin)
    except (messages.VersionMismatch, msgspec.DecodeError) as error:
        _log.error("the launch message cannot be read: %s", error)
        return 1
    threading.Thread(target=_end_with_owner, args=(stdin,), daemon=True).start()
    logging.getLogger().setLevel(str(launch.config.get("log_level", "info")).upper())
    return run(launch)


if __name__ == "__main__":
    sys.exit(main())
