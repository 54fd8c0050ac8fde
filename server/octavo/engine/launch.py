"""Start an engine's process, and tell it what to serve."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

from octavo.child_process import start_module
from octavo.config import EngineConfig
from octavo.engine import messages
from octavo.engine.child import Child

DEFAULT_EXECUTOR = "octavo.worker.executor:build_executor"


def start_engine(executor: str = DEFAULT_EXECUTOR) -> subprocess.Popen[bytes]:
    """A process that imports ``executor``, ``module:function``, and waits for :func:`launch_engine`.

    Raises ``OSError`` where it cannot be started.
    """
    return start_module("octavo.engine.process", executor)


def launch_engine(
    process: subprocess.Popen[bytes],
    config: EngineConfig,
    place: messages.Attachment,
    model_path: Path | None,
    exited: Callable[[int], None],
) -> Child:
    """Tell it what to serve; it meets its owner at ``place``. It learns no keys of clients."""
    launch = messages.Launch(
        version=messages.VERSION,
        rank=place.rank,
        config={**dataclasses.asdict(config), "api_key": ()},
        model_path=None if model_path is None else str(model_path),
        to_engine=place.to_engine,
        from_engine=place.from_engine,
    )
    return Child(process, messages.encode_launch(launch), exited)
