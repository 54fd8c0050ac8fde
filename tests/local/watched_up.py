"""`octavo up` in a process of its own, watched line by line."""

import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_IN = Path(__file__).with_name("stand_in.py")
WAIT_S = 60  # for a line that must come; a failed wait shows all lines so far


class Up:
    """A running `octavo up`. ``cores``: how many it may use; None: all of the machine's."""

    def __init__(self, command: list[str], state: Path, port: int, cores: int | None = None) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(state), "XDG_CACHE_HOME": str(state / "cache")}
        self.port, self.folder = port, state / "octavo" / f"up-{port}"
        all_cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, all_cores[:cores])
        try:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        finally:
            os.sched_setaffinity(0, all_cores)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def line(self, pattern: str, wait_s: float = WAIT_S) -> str:
        """The next line that matches; those before it are passed over."""
        end = time.monotonic() + wait_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line matches {pattern!r} within {wait_s} s:\n" + "\n".join(self.lines))
            if line is None:
                pytest.fail(f"`octavo up` ended before a line matched {pattern!r}:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if re.search(pattern, line):
                return line

    def rest(self, wait_s: float = WAIT_S) -> list[str]:
        """Wait for the end; the lines that were not looked at."""
        self.process.wait(wait_s)
        self._reader.join(wait_s)
        rest = []
        while (line := self._queue.get()) is not None:
            rest.append(line)
        self.lines += rest
        return rest

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.rest()
        return self.process.returncode

    def children(self) -> list[int]:
        """Every process below it."""
        return descendants(self.process.pid)

    def pid_of(self, name: str) -> int:
        """The process of an engine, by its port."""
        port = next(each["url"].rsplit(":", 1)[1] for each in self.endpoints() if each["name"] == name)
        for pid in self.children():
            if f"--port={port}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                return pid
        pytest.fail(f"{name} has no process")

    def endpoints(self) -> list[dict[str, str]]:
        return json.loads((self.folder / "endpoints.json").read_text())["endpoints"]

    def names(self) -> list[str]:
        return [each["name"] for each in self.endpoints()]


def descendants(pid: int) -> list[int]:
    try:
        below = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [each for child in below for each in (child, *descendants(child))]


def alive(pids: list[int]) -> list[int]:
    """Those that still run (a zombie that its parent has not collected does not)."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            running.append(pid)
    return running


def until(condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


class File:
    """A manifest of a model that light processes pretend to serve."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self._model = path, model
        model.write_bytes(b"GGUF")

    def write(self, replicas: int | None = 1, args: tuple[str, ...] = (), **spec: object) -> None:
        body = {
            "apiVersion": "octavo.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "tiny"},
            "spec": {
                "model": {"uri": f"file://{self._model}"},
                "engine": {"device": "cpu", "kvCacheMemory": "64Mi", "args": list(args)},
                **({} if replicas is None else {"replicas": replicas}),
                **spec,
            },
        }
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        fresh.replace(self.path)
