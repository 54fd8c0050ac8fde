"""The network namespace that the whole test cluster lives in."""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

NAME = "octavo-test"
PATH = Path("/run/netns") / NAME
SUBNET = "10.244.0"
ADDRESS = f"{SUBNET}.1"  # of the node, of the API server as pods see it, and of the cluster's DNS
INSIDE = ["nsenter", f"--net={PATH}"]  # in front of a command: `ip netns exec` would hide the cgroups

_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")


def create() -> None:
    """Makes the namespace, with the bridge that pods are plugged into and a route for service addresses."""
    subprocess.run(["ip", "netns", "add", NAME], check=True)
    for command in (
        "ip link set lo up",
        "ip link add cni0 type bridge",
        f"ip addr add {ADDRESS}/24 dev cni0",
        "ip link set cni0 up",
        "ip route add default dev cni0",  # service addresses need a route before they are translated
        "sysctl -qw net.ipv4.ip_forward=1",
    ):
        subprocess.run([*INSIDE, *command.split()], check=True)


def delete() -> None:
    if PATH.exists():
        subprocess.run(["ip", "netns", "del", NAME], check=True)


def inside(call: Callable[[], _T]) -> _T:
    """Runs `call` on a thread inside the namespace: the sockets that it opens stay there."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _enter()
            results.append(call())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, name="inside-netns")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with PATH.open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
