"""A pod that talks to Octavo as users do: by DNS name, from inside the cluster."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.access import Cluster, Object

POD = "client"
# Over websockets kubectl ends a stream whose pings are late, as they are on a busy machine; SPDY does not.
_ENV = os.environ | {"KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false"}
_LOAD = (Path(__file__).parent / "load.py").read_text()


def pod(image: str) -> Object:
    """A pod that waits for `kubectl exec`; it has Octavo's image for its Python and aiohttp."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": POD,
                    "image": image,
                    "command": ["python", "-c", "import signal; signal.pause()"],
                    "resources": {"requests": {"cpu": "10m"}},
                }
            ],
        },
    }


@dataclass
class Answer:
    """One request of a load. `began`: a first part of the answer came; `whole`: it came to its proper end."""

    index: int
    status: int = 0
    began: bool = False
    whole: bool = False
    text: str = ""
    error: str = ""
    cached_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Load:
    """Requests that a pod sends. As a context manager it runs in the background until the block is left."""

    cluster: Cluster
    namespace: str
    url: str  # ends in /v1
    bodies: list[dict[str, Any]]
    concurrency: int = 1
    repeat: bool = False  # start over with the first body until stopped
    api_key: str = ""
    answers: list[Answer] = field(default_factory=list)

    def run(self) -> list[Answer]:
        """Sends every body once and returns the answers in the order of the bodies."""
        with self:
            self._reader.join()
        return sorted(self.answers, key=lambda a: a.index)

    def __enter__(self) -> "Load":
        plan = {
            "url": self.url,
            "concurrency": self.concurrency,
            "repeat": self.repeat,
            "api_key": self.api_key,
        }
        command = self.cluster.command(
            "kubectl", "exec", "-i", "-n", self.namespace, POD, "--", "python", "-c", _LOAD
        )  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_ENV,
        )
        assert self._process.stdin
        self._process.stdin.write(json.dumps(plan | {"bodies": self.bodies}) + "\n")
        self._process.stdin.flush()
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Lets the requests under way come to their end."""
        assert self._process.stdin and self._process.stderr
        self._process.stdin.close()
        self._reader.join(timeout=180)
        if self._process.wait(timeout=30) != 0:
            raise RuntimeError(f"the load ended with an error: {self._process.stderr.read()[-3000:]}")

    def wait_for(self, count: int, timeout: float = 120) -> None:
        """Waits until `count` answers in all are there."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.answers) >= count, timeout):
                raise TimeoutError(f"{len(self.answers)} of {count} answers after {timeout} s")

    def _read(self) -> None:
        for line in self._process.stdout or ():
            with self._changed:
                self.answers.append(Answer(**json.loads(line)))
                self._changed.notify_all()


def chat(content: str, model: str, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """The body of a streamed chat request, greedy."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | more


def fetch(cluster: Cluster, namespace: str, url: str) -> str:
    """GETs a URL from the client pod. Raises KubectlError for any status but 200."""
    code = (
        "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
    )
    return cluster.kubectl("exec", "-n", namespace, POD, "--", "python", "-c", code, url)


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples over its labels, from Prometheus' text format."""
    return sum(_samples(text, name))


def _samples(text: str, name: str) -> Iterator[float]:
    for line in text.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")):
            yield float(line.rsplit(" ", 1)[1])
