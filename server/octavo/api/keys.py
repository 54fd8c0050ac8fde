"""API keys: from flags and from a folder of files (a mounted Secret), read again when they change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from octavo.errors import ConfigError

LOOK_AGAIN_S = 1.0  # how long a key that was taken away may still work
_log = logging.getLogger("octavo.api")


class KeySet:
    """The keys that open the API. With none configured, ``required`` is false."""

    def __init__(self, keys: tuple[str, ...] = (), folder: str | None = None) -> None:
        """Raises ``ConfigError`` when the folder does not exist."""
        self._fixed = [_digest(key) for key in keys if key]
        self._folder = Path(folder) if folder is not None else None
        self._from_folder: list[bytes] = []
        self._looked = 0.0
        if self._folder is not None:
            if not self._folder.is_dir():
                raise ConfigError(f"api-key-dir is {folder!r}: there is no such folder")
            self._look()

    @property
    def required(self) -> bool:
        """Whether a key must be sent. An empty folder lets nobody in."""
        return bool(self._fixed) or self._folder is not None

    def allows(self, authorization: str | None) -> bool:
        """Whether this ``Authorization`` header holds a key. Takes the same time for each wrong key."""
        scheme, _, key = (authorization or "").partition(" ")
        if self._folder is not None and time.monotonic() - self._looked > LOOK_AGAIN_S:
            self._look()
        digest, found = _digest(key.strip()), False
        for known in (*self._fixed, *self._from_folder):
            found |= hmac.compare_digest(digest, known)
        return found and scheme.lower() == "bearer"

    def _look(self) -> None:
        assert self._folder is not None
        self._looked = time.monotonic()
        try:
            files = [
                file for file in sorted(self._folder.iterdir()) if file.is_file() and file.name[0] != "."
            ]
            keys = [file.read_text(encoding="utf-8").strip() for file in files]
        except (OSError, UnicodeDecodeError) as error:
            _log.error("api-key-dir cannot be read, the keys stay as they were: %s", error)
            return
        self._from_folder = [_digest(key) for key in keys if key]


def _digest(key: str) -> bytes:
    """Keys are compared by digest, so that their lengths do not show either."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
