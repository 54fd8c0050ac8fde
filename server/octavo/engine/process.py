"""The engine's process: ``python -m octavo.engine.process EXECUTOR``, told on standard input what to run.

It imports the executor until it is told. Standard input stays open for as long as the owner lives; its end
ends this process, whatever it is doing. A fault in a step is told to the owner (``Failed``) and ends the
process too: a batch that failed as a whole cannot be trusted.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from octavo.child_process import end_with_owner, read_frame
from octavo.config import EngineConfig, engine_config
from octavo.core.outputs import EngineRequest
from octavo.engine import messages
from octavo.engine.core import EngineCore
from octavo.engine.executor import Executor, ExecutorFactory
from octavo.engine.port import Port
from octavo.errors import ConfigError, OctavoError
from octavo.importing import imported

HEARTBEAT_MS = 500  # an idle engine speaks this often

_log = logging.getLogger("octavo.engine")


def serve(core: EngineCore, port: Port, ready: messages.Ready) -> None:
    """Run until told to stop. Aborts and new requests are taken in between any two steps. ``ready`` is told
    to clients that come later.
    """
    while _take_in(core, port, ready, 0 if core.has_work else HEARTBEAT_MS):
        if core.wait() and not _take_in(core, port, ready, 0):
            return
        outputs = core.step()
        for request_ids, error in core.take_rejected():
            port.reject(request_ids, error)
        port.send_outputs(outputs, core.stats())


def _take_in(core: EngineCore, port: Port, ready: messages.Ready, timeout_ms: int) -> bool:
    """Do what the clients say, waiting so long for the first message. False when the owner says to stop."""
    for envelope in port.receive(timeout_ms):
        client = envelope.client
        match envelope.body:
            case messages.AddRequests(requests):
                _add(core, port, client, requests)
            case messages.AbortRequests(request_ids):
                core.abort(request_ids)
            case messages.AdminCall() as call:
                port.send(_admin(core, call), client)
            case messages.Attach(address):
                if port.attach(client, address):
                    port.send(ready, client)
            case messages.Detach(gone):
                core.abort(port.detach(gone))
            case messages.Shutdown() if client == messages.OWNER:
                return False
            case messages.Shutdown():
                _log.warning("client %d asked the engine to end; only its owner may", client)
            case message:
                raise OctavoError(f"an engine takes no {type(message).__name__} message")
    return True


def _add(core: EngineCore, port: Port, client: int, requests: list[EngineRequest]) -> None:
    if port.takes(client, requests):
        try:
            core.add(requests)
        except OctavoError as error:
            port.reject([request.request_id for request in requests], error)


def _admin(core: EngineCore, call: messages.AdminCall) -> messages.AdminReply:
    try:
        return messages.AdminReply(call.call_id, core.admin(call.method, **call.arguments))
    except OctavoError as error:
        return messages.AdminReply(call.call_id, error=messages.ErrorInfo.of(error))


def load(
    launch: messages.Launch, factory: Future[ExecutorFactory], progress: Callable[[str, str], None]
) -> tuple[EngineConfig, Executor]:
    """Fetch the model where that was not done, and build the executor."""
    from octavo.fetch import fetch, with_draft_here

    values: dict[str, Any] = dict(launch.config)
    config = engine_config(values.pop("model"), values)
    if launch.model_path is not None:
        path = Path(launch.model_path)
    else:
        progress("fetching", config.model)
        path = fetch(config.model, None, lambda detail: progress("fetching", detail))
    config = with_draft_here(config, lambda detail: progress("fetching", detail))
    return config, factory.result()(config, path, progress)


def _factory(name: str) -> ExecutorFactory:
    try:
        factory: ExecutorFactory = imported(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no executor {name!r}: {error}") from error
    return factory


def run(launch: messages.Launch, factory: Future[ExecutorFactory]) -> int:
    """Load, say so, serve. Returns the process's exit status."""
    port = Port(launch)
    try:
        config, executor = load(
            launch, factory, lambda stage, detail: port.send(messages.Progress(stage, detail))
        )
        core = EngineCore(
            config,
            executor,
            foretell=lambda seconds: port.send_all(messages.LongStep(seconds)),
            rank=launch.rank,
        )
        info = executor.info
        gc.collect()
        gc.freeze()  # what was loaded lives as long as the process: no later collection walks it
        ready = messages.Ready(
            info.max_model_len,
            info.vocab_size,
            core.kv,
            info.num_blocks,
            list(info.eos_token_ids),
            core.limits,
        )
        port.send(ready)
        serve(core, port, ready)
    except OctavoError as error:
        port.send_all(messages.Failed(messages.ErrorInfo.of(error)))
        return 1
    except Exception as error:  # whatever it is, the owner must hear of it before this process ends
        _log.exception("the engine failed")
        port.send_all(messages.Failed(messages.ErrorInfo("OctavoError", f"{type(error).__name__}: {error}")))
        return 1
    finally:
        port.close()
    return 0


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stdin, (executor,) = sys.stdin.fileno(), sys.argv[1:]
    factory = ThreadPoolExecutor(1).submit(_factory, executor)
    try:
        launch = messages.decode_launch(read_frame(stdin))
    except (messages.VersionMismatch, msgspec.DecodeError) as error:
        _log.error("the launch message cannot be read: %s", error)
        return 1
    end_with_owner(stdin)
    logging.getLogger().setLevel(str(launch.config.get("log_level", "info")).upper())
    return run(launch, factory)


if __name__ == "__main__":
    sys.exit(main())
