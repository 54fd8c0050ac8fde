"""What the chart tells the operator by its environment, and how a wrong start is told."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo_operator import cli, platform

IMAGES = {"OCTAVO_IMAGE": "o:1", "OCTAVO_ENGINE_IMAGE": "e:1"}


def test_the_environment_is_read() -> None:
    assert platform.from_env(IMAGES) == platform.Platform(image="o:1", engine_image="e:1")
    full = IMAGES | {
        "OCTAVO_IMAGE_PULL_POLICY": "Always",
        "OCTAVO_IMAGE_PULL_SECRETS": "a,b",
        "OCTAVO_GPU_RESOURCE": "amd.com/gpu",
    }
    read = platform.from_env(full)
    assert (read.pull_policy, read.pull_secrets, read.gpu_resource) == ("Always", ("a", "b"), "amd.com/gpu")


@pytest.mark.parametrize("missing", IMAGES)
def test_a_missing_image_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        platform.from_env({key: value for key, value in IMAGES.items() if key != missing})


def test_a_wrong_pull_policy_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"Sometimes.*Always, IfNotPresent, Never"):
        platform.from_env(IMAGES | {"OCTAVO_IMAGE_PULL_POLICY": "Sometimes"})


def test_without_a_cluster_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/kubeconfig")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for name, value in IMAGES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no Kubernetes API is configured"):
        cli.main(["--port", "0"])
