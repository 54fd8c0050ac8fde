"""The test cluster's image registry: what is pushed can be pulled, and what was pulled takes no space."""

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    running = Registry(tmp_path, port=0)
    yield running
    running.close()


def _ask(registry: Registry, method: str, path: str, body: bytes | None = None) -> tuple[int, dict, bytes]:
    url = path if path.startswith("http") else f"http://127.0.0.1:{registry.port}{path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data=body, method=method), timeout=5
        ) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def _push(registry: Registry, blob: bytes) -> str:
    digest = "sha256:" + hashlib.sha256(blob).hexdigest()
    _, headers, _ = _ask(registry, "POST", "/v2/image/blobs/uploads/", b"")
    _, headers, _ = _ask(registry, "PATCH", headers["Location"], blob)
    status, _, _ = _ask(registry, "PUT", f"{headers['Location']}?digest={digest}", b"")
    assert status == 201
    return digest


def test_a_pushed_layer_is_pulled_whole(registry: Registry) -> None:
    blob = b"layer" * 50_000
    digest = _push(registry, blob)
    assert _ask(registry, "GET", f"/v2/image/blobs/{digest}")[2] == blob
    assert _ask(registry, "GET", "/v2/image/blobs/sha256:00")[0] == 404


def test_a_layer_whose_digest_is_wrong_is_refused(registry: Registry) -> None:
    _, headers, _ = _ask(registry, "POST", "/v2/image/blobs/uploads/", b"")
    assert _ask(registry, "PUT", f"{headers['Location']}?digest=sha256:{'0' * 64}", b"layer")[0] == 400


def test_a_forgotten_layer_is_known_but_takes_no_space(registry: Registry) -> None:
    digest = _push(registry, b"layer" * 50_000)
    registry.forget()
    status, headers, _ = _ask(registry, "HEAD", f"/v2/image/blobs/{digest}")
    assert (status, headers["Content-Length"]) == (200, "250000")
    assert sum(f.stat().st_size for f in registry.folder.rglob("*") if f.is_file()) < 100
    registry.distrust()
    assert _ask(registry, "HEAD", f"/v2/image/blobs/{digest}")[0] == 404


def test_a_manifest_is_found_by_tag_and_by_digest(registry: Registry) -> None:
    manifest = b'{"mediaType": "application/vnd.oci.image.manifest.v1+json"}'
    digest = "sha256:" + hashlib.sha256(manifest).hexdigest()
    assert _ask(registry, "PUT", "/v2/some/image/manifests/latest", manifest)[0] == 201
    assert _ask(registry, "GET", "/v2/some/image/manifests/latest")[2] == manifest
    status, headers, body = _ask(registry, "GET", f"/v2/some/image/manifests/{digest}?ns=host")
    assert (status, headers["Content-Type"], body) == (
        200,
        "application/vnd.oci.image.manifest.v1+json",
        manifest,
    )
