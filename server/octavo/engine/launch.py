"""Start an engine's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from octavo.config import EngineConfig
from octavo.engine import messages
from octavo.engine.child import Child

DEFAULT_EXECUTOR = "octavo.worker.executor:build_executor"


def launch_engine(
    config: EngineConfig,
    place: messages.Attachment,
    model_path: Path | None,
    executor: str,
    exited: Callable[[int], None],
) -> Child:
    """The process, which meets its owner at ``place``. It learns no keys of clients."""
    launch = messages.Launch(
        version=messages.VERSION,
        rank=place.rank,
        config={**dataclasses.asdict(config), "api_key": ()},
        model_path=None if model_path is None else str(model_path),
        executor=executor,
        to_engine=place.to_engine,
        from_engine=place.from_engine,
    )
    return Child("octavo.engine.process", messages.encode_launch(launch), exited)
