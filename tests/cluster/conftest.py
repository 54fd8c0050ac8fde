"""A real Kubernetes for the tests in this folder, with Octavo's images in it.

Without `OCTAVO_TEST_KUBECONFIG` a cluster of our own is brought up (Linux, root; `binaries.py`, `node.py`).
With it, that cluster is used, and `OCTAVO_TEST_IMAGE` and `OCTAVO_TEST_ENGINE_IMAGE` name the images there.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from cluster import binaries, client, images, network
from cluster.access import Cluster
from cluster.chart import CHART, SYSTEM, values
from cluster.node import KUBECONFIG, REGISTRY_PORT, Node
from cluster.registry import Registry

_TEST_TIMEOUT = 300  # seconds for a test itself; the cluster's first build takes longer and is not counted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TEST_TIMEOUT, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Puts the cluster's state into the report of a test that failed."""
    report = yield
    if report.failed and isinstance(running := getattr(item, "funcargs", {}).get("cluster"), Cluster):
        report.sections.append(("the cluster after the failure", running.dump()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, its images pulled, nothing installed."""
    if existing := os.environ.get("OCTAVO_TEST_KUBECONFIG"):
        names = images.Images(os.environ["OCTAVO_TEST_IMAGE"], os.environ["OCTAVO_TEST_ENGINE_IMAGE"])
        yield Cluster(Path(existing), names)
        return
    if reason := binaries.missing():
        if os.environ.get("CI", "") not in ("", "0", "false"):
            pytest.fail(reason)
        pytest.skip(reason)
    binaries.CACHE.mkdir(parents=True, exist_ok=True)
    with (binaries.CACHE / "lock").open("w") as lock:
        _lock(lock)
        took = _Stopwatch()
        programs = binaries.provide()
        took("programs")
        names = images.build_all(programs)
        took("images")
        node = Node(programs)
        registry = None
        try:
            node.start()
            took("node")
            running = Cluster(KUBECONFIG, names, tuple(network.INSIDE), own=True)
            registry = network.inside(lambda: Registry(binaries.CACHE / "registry", REGISTRY_PORT))
            images.ship(running, registry)
            took("pulling")
            print(took, flush=True)
            yield running
        finally:
            if registry:
                registry.close()
            node.stop()


@pytest.fixture(scope="session")
def octavo(cluster: Cluster) -> Iterator[str]:
    """Octavo installed by helm; the namespace of its operator."""
    cluster.helm(
        "install", "octavo", str(CHART), "-n", SYSTEM, "--create-namespace", "--wait", *values(cluster)
    )
    yield SYSTEM
    if not cluster.own:  # ours is thrown away whole
        cluster.kubectl(
            "delete", "inferenceservices.octavo.dev", "--all", "-A", "--timeout=180s", timeout=200
        )
        cluster.helm("uninstall", "octavo", "-n", SYSTEM, "--wait")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for the tests of one file, with the client pod in it."""
    name = request.path.stem.replace("_", "-")
    cluster.kubectl("create", "namespace", name)
    cluster.watch("serviceaccount", lambda found: "default" in found, name)
    cluster.apply(client.pod(cluster.images.octavo), namespace=name)
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{client.POD}", "-n", name, "--timeout=60s")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def _lock(file: TextIO) -> None:
    """Waits until no other run has a test cluster on this machine; a killed run's lock is gone."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for the test cluster of another run to end", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)


class _Stopwatch:
    """Seconds of each part of the bring-up, for the test's output."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._parts: list[str] = []

    def __call__(self, part: str) -> None:
        now = time.monotonic()
        self._parts.append(f"{part} {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return f"the cluster is up: {', '.join(self._parts)}"
