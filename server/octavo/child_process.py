"""Children of ours: how they are started on this machine, told what to do, and end with us."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

LOOPBACK = "127.0.0.1"
ORPHANED = 3  # exit status of a child whose owner is gone
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


def start_module(module: str, *args: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """``python -m module args``, which waits on its standard input for what to do: see :func:`tell`.

    The input stays open; its end tells the child that we are gone. It is a new interpreter: a fork of a
    process with threads could hang on a lock that one of them held. It has a session of its own: Ctrl-C and
    signals to the group reach the owner, which drains first. Raises ``OSError`` where it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def tell(child: subprocess.Popen[bytes], frame: bytes) -> None:
    """Tell a child of :func:`start_module` what to do, for its :func:`read_frame`."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: its exit status says why
        child.stdin.write(len(frame).to_bytes(4, "big") + frame)
        child.stdin.flush()


def cause_of(status: int) -> str:
    """What an exit status tells of a process's end."""
    if status >= 0:
        return f"exit status {status}"
    hint = " (out of memory?)" if status == -signal.SIGKILL else ""
    named = -status in set(signal.Signals)  # of the real-time ones only the first and the last are
    return f"killed by {signal.Signals(-status).name if named else f'signal {-status}'}{hint}"


def read_frame(stdin: int) -> bytes:
    """In the child: what it is told to do. It ends where its owner does before that."""
    if not (size := _read(stdin, 4)):
        os._exit(ORPHANED)
    return _read(stdin, int.from_bytes(size, "big"))


def end_with_owner(stdin: int) -> None:
    """In the child, from now on: end when the owner does, whatever else goes on here."""
    threading.Thread(target=_wait_for_end, args=(stdin,), daemon=True).start()


def _read(stdin: int, size: int) -> bytes:
    """So many bytes, fewer only at the end. Unbuffered: a buffer's lock would trip the interpreter's exit."""
    data = b""
    while len(data) < size and (part := os.read(stdin, size - len(data))):
        data += part
    return data


def _wait_for_end(stdin: int) -> NoReturn:
    while os.read(stdin, 1):
        pass  # the owner says nothing more; only its end counts
    os._exit(ORPHANED)
