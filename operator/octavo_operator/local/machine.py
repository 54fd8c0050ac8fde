"""What this machine offers: cores, ports, a folder for logs."""

from __future__ import annotations

import errno
import math
import os
import socket
from pathlib import Path

from octavo.errors import ConfigError
from octavo_operator.local.plan import HOST


def cores() -> int:
    """The cores that this process may use: its affinity, and a container's CPU quota (cgroup version 2)."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return max(1, min(allowed, math.ceil(int(quota) / int(period)))) if quota.isdigit() else allowed


def refuse_taken(port: int) -> None:
    """Raise ``ConfigError`` when nothing could listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections just closed do not count
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = "is in use (is another `octavo up` running?): stop what uses it"
            else:
                reason = f"cannot be opened: {error.strerror}"
            raise ConfigError(f"port {port} {reason}, or choose another with --port") from error


def state_folder(port: int) -> Path:
    """Where logs go: one folder a port, so two runs side by side do not mix; each run empties it first."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "octavo" / f"up-{port}"


def emptied(folder: Path) -> Path:
    """``folder``, made if need be, without what an earlier run wrote there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in (*folder.glob("*.log"), *folder.glob("endpoints.json*")):
            old.unlink()
    except OSError as error:
        raise ConfigError(f"{folder}, the folder for logs, cannot be written: {error.strerror}") from error
    return folder
