"""What the operator is told by its own environment: the images it runs and how pods reach them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from octavo.errors import ConfigError

PULL_POLICIES = ("Always", "IfNotPresent", "Never")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    image: str  # router
    engine_image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()  # Secrets that must exist in the namespace of the service
    gpu_resource: str = "nvidia.com/gpu"


def from_env(env: Mapping[str, str]) -> Platform:
    """Read OCTAVO_IMAGE, OCTAVO_ENGINE_IMAGE and so on, as the chart sets them. Raises ``ConfigError``."""
    for name in ("OCTAVO_IMAGE", "OCTAVO_ENGINE_IMAGE"):
        if not env.get(name):
            raise ConfigError(f"{name} is not set: it names the image that pods run; the chart sets it")
    policy = env.get("OCTAVO_IMAGE_PULL_POLICY") or Platform.pull_policy
    if policy not in PULL_POLICIES:
        raise ConfigError(f"OCTAVO_IMAGE_PULL_POLICY is {policy!r}: give one of {', '.join(PULL_POLICIES)}")
    return Platform(
        image=env["OCTAVO_IMAGE"],
        engine_image=env["OCTAVO_ENGINE_IMAGE"],
        pull_policy=policy,
        pull_secrets=tuple(filter(None, env.get("OCTAVO_IMAGE_PULL_SECRETS", "").split(","))),
        gpu_resource=env.get("OCTAVO_GPU_RESOURCE") or Platform.gpu_resource,
    )
