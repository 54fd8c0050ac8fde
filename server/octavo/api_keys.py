"""API keys of clients, for engine and router: given as flags, or files of a mounted Secret that are read
again when they change.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import ConfigError

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0  # how often the folder is looked at, at most


class ApiKeys:
    """The keys clients may send. Without any, every request is let in."""

    def __init__(self, keys: Sequence[str] = (), folder: str | Path | None = None) -> None:
        """Raises ``ConfigError`` for an empty key, or a folder that cannot be read."""
        if any(not key.strip() for key in keys):
            raise ConfigError("api-key is empty: give the key, or leave the flag out")
        self._fixed = [_digest(key.strip()) for key in keys]
        self._folder = None if folder is None else Path(folder)
        self._from_folder: list[bytes] = []
        self._stamp: object = None
        self._checked_at = 0.0
        if self._folder is not None:
            if not self._folder.is_dir():
                raise ConfigError(f"api-key-dir {folder} is not a folder")
            self._reload()

    @property
    def required(self) -> bool:
        """A folder asks for keys also while it is empty: nobody gets in then."""
        return bool(self._fixed) or self._folder is not None

    def allows(self, authorization: str | None) -> bool:
        """Whether an ``Authorization`` header carries a key. Compares with each key in constant time."""
        if not self.required:
            return True
        if self._folder is not None and time.monotonic() - self._checked_at >= CHECK_INTERVAL_S:
            self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in (*self._fixed, *self._from_folder)]
        return scheme.lower() == "bearer" and any(matches)

    def name(self, authorization: str | None) -> bytes:
        """What tells the owner of one key from that of another; all are one where none is needed."""
        return _digest((authorization or "").partition(" ")[2].strip()) if self.required else b""

    def _reload(self) -> None:
        assert self._folder is not None
        self._checked_at = time.monotonic()
        try:
            # A mounted Secret keeps its versions in dot-folders and links to them from its visible names.
            files = [f for f in sorted(self._folder.iterdir()) if not f.name.startswith(".") and f.is_file()]
            stamp = [(f.name, (s := f.stat()).st_mtime_ns, s.st_size, s.st_ino) for f in files]
            if stamp == self._stamp:
                return
            keys = [f.read_text("utf-8").strip() for f in files]
        except (OSError, UnicodeDecodeError) as error:
            _log.warning("API keys in %s cannot be read, the last ones stay: %s", self._folder, error)
            return
        self._stamp = stamp
        self._from_folder = [_digest(key) for key in keys if key]
        _log.info("%d API keys read from %s", len(self._from_folder), self._folder)


def read_key_file(path: str | Path) -> tuple[str, ...]:
    """The keys of a file, one a line. Raises ``ConfigError`` when there is none, or it cannot be read."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api-key-file {path} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:  # else everyone would get in
        raise ConfigError(f"api-key-file {path} holds no key: write one a line, or leave the flag out")
    return keys


def sent_key(authorization: str | None, x_api_key: str | None) -> str | None:
    """The ``Authorization`` header, or the ``x-api-key`` of Anthropic's clients in its form."""
    return authorization or (f"Bearer {x_api_key}" if x_api_key else None)


def _digest(key: str) -> bytes:
    """Keys are compared by digest, so that neither their content nor their length shows in the time taken."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
