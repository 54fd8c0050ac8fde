"""The engine's real client and process; only the executor is a scripted one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.launch import start_engine

HERE = Path(__file__).parent


class ScriptedEngine(EngineClient):
    """``executor`` is a name of ``scripted_executor``."""

    def __init__(self, executor: str) -> None:
        super().__init__()
        self.executor = f"scripted_executor:{executor}"

    async def start(self, config: EngineConfig, **settings: Any) -> None:
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(HERE) not in paths:  # the engine's process finds the executor there
            os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *paths])
        self.waiting = start_engine(self.executor)
        await super().start(config, **settings)
