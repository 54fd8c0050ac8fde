"""What a test does to a cluster: kubectl, helm, watching objects until they are as they should be."""

import codecs
import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import kube_tools
import yaml
from cluster.images import Images

T = TypeVar("T")
Object = dict[str, Any]
_LOG_LINES = "60"
_RELIST = 10.0  # seconds


class KubectlError(RuntimeError):
    """kubectl or helm ended with an error; the message is what it said."""


@dataclass(frozen=True)
class Cluster:
    kubeconfig: Path
    images: Images
    prefix: tuple[str, ...] = ()  # in front of each command: into the cluster's network namespace
    own: bool = False  # it is ours alone: tests may change the node

    def command(self, tool: str, *args: str) -> list[str]:
        """The command line that runs `tool` (kubectl, helm) against this cluster."""
        path = kube_tools.kubectl() if tool == "kubectl" else kube_tools.helm()
        return [*self.prefix, str(path), f"--kubeconfig={self.kubeconfig}", *args]

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 120) -> str:
        """Runs kubectl; returns its output. Raises KubectlError."""
        return self._run(self.command("kubectl", *args), input, timeout)

    def helm(self, *args: str, timeout: float = 180) -> str:
        """Runs helm; returns its output. Raises KubectlError."""
        return self._run(self.command("helm", *args), None, timeout)

    def apply(self, *objects: Object, namespace: str = "default") -> None:
        """Applies objects as a user does, by the strict client-side `kubectl apply`."""
        self.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump_all(objects))

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        found: Object = json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> "list[Object]":
        return self._listed([kind, "-l", selector], namespace)

    def watch(
        self,
        kind: str,
        until: Callable[[dict[str, Object]], T],
        namespace: str = "default",
        name: str = "",
        selector: str = "",
        timeout: float = 120,
    ) -> T:
        """Watches objects until `until` (given them by name, deleted ones left out) returns something true,
        and returns that. Raises TimeoutError after `timeout` seconds with the objects' last state."""
        what = [kind, f"--field-selector=metadata.name={name}"] if name else [kind, "-l", selector]
        command = self.command(
            "kubectl", "get", *what, "-n", namespace, "-o", "json", "-w", "--output-watch-events"
        )
        deadline = time.monotonic() + timeout
        while True:
            objects = {o["metadata"]["name"]: o for o in self._listed(what, namespace)}
            if result := until(objects):
                return result
            # Between the list and the watch an object may go unseen, so both begin anew after a while.
            for event in _events(command, min(deadline, time.monotonic() + _RELIST)):
                found = event["object"]
                objects.pop(found["metadata"]["name"], None)
                if event["type"] != "DELETED":
                    objects[found["metadata"]["name"]] = found
                if result := until(objects):
                    return result
            if time.monotonic() > deadline:
                break
        raise TimeoutError(f"after {timeout} s {' '.join(what)} in {namespace} is still\n{_brief(objects)}")

    def dump(self) -> str:
        """The cluster's state as a person wants it after a failed test."""
        parts = []
        for args in (
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "inferenceservices.octavo.dev", "-A", "-o", "yaml"),
            ("get", "events", "-A", "--sort-by=.metadata.creationTimestamp"),
        ):
            parts.append(self._try(*args))
        for pod in self._octavo_pods():
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            parts.append(
                self._try(
                    "logs", "-n", namespace, name, "--all-containers", f"--tail={_LOG_LINES}", "--prefix"
                )
            )
        return "\n\n".join(parts)

    def _listed(self, what: "list[str]", namespace: str) -> "list[Object]":
        items: list[Object] = json.loads(self.kubectl("get", *what, "-n", namespace, "-o", "json"))["items"]
        return items

    def _octavo_pods(self) -> "list[Object]":
        try:
            text = self.kubectl("get", "pods", "-A", "-o", "json", "-l", "app.kubernetes.io/part-of=octavo")
            pods: list[Object] = json.loads(text)["items"]
        except KubectlError:
            return []
        return pods

    def _try(self, *args: str) -> str:
        try:
            out = self.kubectl(*args, timeout=30)
        except (KubectlError, subprocess.TimeoutExpired) as e:
            out = str(e)
        return f"$ kubectl {' '.join(args)}\n{out[-12000:]}"

    def _run(self, command: "list[str]", input: str | None, timeout: float) -> str:
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout)
        if done.returncode != 0:
            raise KubectlError(f"{' '.join(command[len(self.prefix) :])}:\n{done.stdout}{done.stderr}")
        return done.stdout


def _events(command: list[str], deadline: float) -> Any:
    """Yields the watch events of a kubectl command until it ends or the deadline passes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    decoder, utf8, text = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")(), ""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                piece = os.read(process.stdout.fileno(), 1 << 20)
                if not piece:
                    return
                text += utf8.decode(piece)
                while text := text.lstrip():
                    try:
                        event, end = decoder.raw_decode(text)
                    except json.JSONDecodeError:
                        break  # the rest of it comes with the next piece
                    text = text[end:]
                    yield event
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _brief(objects: dict[str, Object]) -> str:
    return yaml.safe_dump({n: o.get("status", {}) for n, o in objects.items()})[:6000]
