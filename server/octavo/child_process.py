"""Children of ours: how an ``octavo`` command is started on this machine, and ends with us."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal a child gets when its parent dies


def octavo_command(args: Sequence[str]) -> list[str]:
    """The command line of ``octavo ARGS`` in this very installation."""
    return [sys.executable, "-m", "octavo.cli", *args]


def die_with_parent() -> Callable[[], None]:
    """A hook for the child, between fork and exec: the kernel kills it when we die, however we die."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def hook() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # we died before the call
            os._exit(1)

    return hook


def free_ports(count: int) -> list[int]:
    """Ports on ``LOOPBACK`` that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [int(one.getsockname()[1]) for one in sockets]
