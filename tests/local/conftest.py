"""Fixtures that start `octavo up` in a process of its own."""

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local.watched_up import STAND_IN, File, Up, alive, until


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def started(tmp_path: Path, port: int) -> Iterator[Callable[..., Up]]:
    """Start `octavo up` with flags; ``real``: with real engines and router. All ends after the test."""
    runs: list[Up] = []

    def start(*flags: str, real: bool = False, cores: int | None = None) -> Up:
        command = [sys.executable, *(["-m", "octavo.cli"] if real else [str(STAND_IN)]), "up"]
        runs.append(Up([*command, f"--port={port}", *flags], tmp_path / "state", port, cores))
        return runs[-1]

    yield start
    for run in runs:
        below = run.children()
        run.process.kill()
        run.process.wait()
        until(lambda below=below: not alive(below), 10)


@pytest.fixture
def manifest(tmp_path: Path) -> File:
    return File(tmp_path / "service.yaml", tmp_path / "tiny.gguf")
