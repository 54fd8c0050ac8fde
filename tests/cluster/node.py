"""One node of Kubernetes: etcd, control plane, kubelet, kube-proxy, CoreDNS and containerd as processes of
ours, all inside one network namespace (`network.py`), all their state in one folder.

What must outlive a run is in the cache: containerd's image store, so that only changed layers are pulled.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import kube_tools
from cluster import binaries, network

RUN = Path("/var/tmp/octavo-test-cluster")
KUBECONFIG = RUN / "kubeconfig"
CONTAINERD_ROOT = binaries.CACHE / "containerd"
PAUSE_IMAGE = "octavo.test/pause:1"
REGISTRY_PORT = 5000

_API = "https://127.0.0.1:6443"
_SOCKET = RUN / "containerd.sock"
_START_TIMEOUT = 120.0  # seconds for one part to come up on a busy machine
_STOP_TIMEOUT = 10.0  # seconds for the kernel to end a killed process
_STOP_ORDER = [  # the store last: an API server without etcd hangs for minutes
    ["dns", "proxy", "kubelet", "scheduler", "controllers"],
    ["apiserver", "containerd"],
    ["etcd"],
]


class Node:
    """Starts and stops the cluster. `start` also clears away what a killed run left behind."""

    def __init__(self, programs: dict[str, Path]) -> None:
        self._programs = programs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Brings the node up until it is Ready. Raises RuntimeError with the log of what did not come up."""
        clean()
        for folder in ("pki", "cni", "etcd", "logs", "pids", "ipam"):
            (RUN / folder).mkdir(parents=True)
        CONTAINERD_ROOT.mkdir(parents=True, exist_ok=True)
        network.create()
        _write_configs()
        self._start_containerd()
        self._start_control_plane()
        self._start_node()

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _kubectl("delete", "pods", "--all", "-A", "--grace-period=0", "--force", timeout=30)
        for group in _STOP_ORDER:
            for name in group:
                if process := self._processes.get(name):
                    process.kill()
                    process.wait()
            if "kubelet" in group:
                _kill_containers()
        clean()

    def _spawn(self, name: str, *command: object) -> None:
        with (RUN / "logs" / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*network.INSIDE, *map(str, command)], cwd=RUN, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        (RUN / "pids" / name).write_text(str(process.pid))
        self._processes[name] = process

    def _wait(self, name: str, *probe: object) -> None:
        """Waits until the command `probe` succeeds, or the process `name` ends."""
        deadline = time.monotonic() + _START_TIMEOUT
        while subprocess.run([*map(str, probe)], capture_output=True).returncode != 0:
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                log = (RUN / "logs" / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} did not come up:\n{log[-4000:]}")
            time.sleep(0.1)

    def _start_containerd(self) -> None:
        self._spawn("containerd", "containerd", "-c", RUN / "containerd.toml")
        self._wait("containerd", *ctr("version"))
        for container in _lines(ctr("containers", "ls", "-q")):  # of a run that was killed
            subprocess.run(ctr("containers", "rm", container), check=True)

    def _start_control_plane(self) -> None:
        p = self._programs
        self._spawn(
            "etcd", p["etcd"], f"--data-dir={RUN}/etcd", "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        )  # fmt: skip
        self._spawn(
            "apiserver", p["kube-apiserver"], "--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443",
            f"--advertise-address={network.ADDRESS}", f"--cert-dir={RUN}/pki",
            f"--token-auth-file={RUN}/pki/tokens.csv", f"--service-account-key-file={RUN}/pki/sa.pub",
            f"--service-account-signing-key-file={RUN}/pki/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.96.0.0/16",
            "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        self._wait("apiserver", *network.INSIDE, *_kubectl_command("get", "--raw", "/readyz"))
        self._spawn(
            "controllers", p["kube-controller-manager"], f"--kubeconfig={KUBECONFIG}",
            "--use-service-account-credentials=true", f"--service-account-private-key-file={RUN}/pki/sa.key",
            f"--root-ca-file={RUN}/pki/apiserver.crt", "--bind-address=127.0.0.1", "--leader-elect=false",
        )  # fmt: skip
        self._spawn(
            "scheduler", p["kube-scheduler"], f"--kubeconfig={KUBECONFIG}", "--bind-address=127.0.0.1",
            "--leader-elect=false",
        )  # fmt: skip

    def _start_node(self) -> None:
        p = self._programs
        self._spawn(
            "kubelet", p["kubelet"], f"--config={RUN}/kubelet.yaml", f"--kubeconfig={KUBECONFIG}",
            "--hostname-override=node0", f"--node-ip={network.ADDRESS}", f"--root-dir={RUN}/kubelet",
        )  # fmt: skip
        self._spawn(
            "proxy", p["kube-proxy"], f"--kubeconfig={KUBECONFIG}", "--hostname-override=node0",
            f"--cluster-cidr={network.SUBNET}.0/24", "--proxy-mode=nftables", "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
        )  # fmt: skip
        self._spawn("dns", p["coredns"], "-conf", RUN / "Corefile")
        probe = _kubectl_command("wait", "--for=condition=Ready", "node/node0", "--timeout=60s")
        self._wait("kubelet", *network.INSIDE, *probe)


def ctr(*args: str) -> list[str]:
    """The command that talks to our containerd."""
    return ["ctr", "-a", str(_SOCKET), "-n", "k8s.io", *args]


def clean() -> None:
    """Ends the processes of an earlier run that was killed, and removes its mounts, files and namespace."""
    for pid_file in (RUN / "pids").glob("*"):
        pid = int(pid_file.read_text())
        if str(RUN) in _command_line(pid) or str(binaries.CACHE) in _command_line(pid):
            _kill(pid)
    _kill_containers()
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(f"{RUN}/")), reverse=True):
        subprocess.run(["umount", "-l", mount], check=True)
    shutil.rmtree(RUN, ignore_errors=True)
    network.delete()
    # what containerd remembers of pods; images are elsewhere in its root
    for folder in ("sandboxes", "containers"):
        shutil.rmtree(CONTAINERD_ROOT / "io.containerd.grpc.v1.cri" / folder, ignore_errors=True)
    shutil.rmtree(CONTAINERD_ROOT / "io.containerd.runtime.v2.task", ignore_errors=True)


def _kill_containers() -> None:
    """Kills every container shim of our containerd and all that runs below it."""
    parents: dict[int, list[int]] = {}
    shims = []
    for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            parents.setdefault(int(stat[1]), []).append(pid)
            line = _command_line(pid)
            if "containerd-shim" in line and str(_SOCKET) in line:
                shims.append(pid)

    def below(pid: int) -> list[int]:
        return [p for child in parents.get(pid, []) for p in (*below(child), child)]

    for shim in shims:
        for pid in (*below(shim), shim):
            _kill(pid)


def _kill(pid: int) -> None:
    """Kills a process and waits until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            select.select([watch], [], [], _STOP_TIMEOUT)
        finally:
            os.close(watch)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _kubectl_command(*args: str) -> list[str]:
    return [str(kube_tools.kubectl()), f"--kubeconfig={KUBECONFIG}", *args]


def _kubectl(*args: str, timeout: float) -> None:
    subprocess.run([*network.INSIDE, *_kubectl_command(*args)], capture_output=True, timeout=timeout)


def _lines(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def _write_configs() -> None:
    for command in ("genrsa -out sa.key 2048", "rsa -in sa.key -pubout -out sa.pub"):
        subprocess.run(["openssl", *command.split()], cwd=RUN / "pki", check=True, capture_output=True)
    token = secrets.token_hex(16)
    (RUN / "pki/tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    KUBECONFIG.write_text(_kubeconfig(token))
    (RUN / "containerd.toml").write_text(_CONTAINERD)
    (RUN / "cni/10-bridge.conflist").write_text(json.dumps(_CNI))
    (RUN / "kubelet.yaml").write_text(_KUBELET)
    (RUN / "Corefile").write_text(_COREFILE)


def _kubeconfig(token: str) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "octavo", "cluster": {"server": _API, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "octavo", "context": {"cluster": "octavo", "user": "admin"}}],
        "current-context": "octavo",
    }
    return json.dumps(config)


_CONTAINERD = f"""\
version = 2
root = "{CONTAINERD_ROOT}"
state = "{RUN}/containerd"
[grpc]
  address = "{_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  sandbox_image = "{PAUSE_IMAGE}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{RUN}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    discard_unpacked_layers = true
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."octavo.test"]
    endpoint = ["http://127.0.0.1:{REGISTRY_PORT}"]
"""

_CNI = {
    "cniVersion": "0.4.0",
    "name": network.NAME,
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": f"{RUN}/ipam",
                "ranges": [[{"subnet": f"{network.SUBNET}.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}

_KUBELET = f"""\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
featureGates: {{KubeletInUserNamespace: true}}
containerRuntimeEndpoint: unix://{_SOCKET}
podLogsDir: {RUN}/podlogs
clusterDomain: cluster.local
clusterDNS: [{network.ADDRESS}]
resolvConf: ""
serializeImagePulls: false
imageGCHighThresholdPercent: 100
evictionHard:
  {{memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}}
"""

_COREFILE = f"""\
.:53 {{
  bind {network.ADDRESS}
  kubernetes cluster.local {{
    endpoint {_API}
    kubeconfig {KUBECONFIG} octavo
  }}
}}
"""
