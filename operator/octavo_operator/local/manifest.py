"""The manifest file: read it, refuse what one machine cannot do, notice its edits."""

from __future__ import annotations

import asyncio
from pathlib import Path

from octavo.errors import ConfigError
from octavo_operator.resource import InferenceService, load

POLL_S = 0.3  # looking at the file's date: works with every editor and file system


class Manifest:
    """A file holding one InferenceService. ``api_key_dir``: what stands for the Secret of `spec.auth`."""

    def __init__(self, path: Path, api_key_dir: Path | None) -> None:
        self._path, self._api_key_dir = path, api_key_dir
        self._text: str | None = None

    def read(self) -> InferenceService:
        """The resource as the file says now. Raises ``ConfigError`` with the message of a cluster."""
        self._text = None
        try:
            self._text = self._path.read_text()
        except OSError as error:
            raise ConfigError(f"{self._path}: the manifest cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: the manifest is not UTF-8 text") from error
        try:
            service = load(self._text)
            _refuse_for_one_machine(service, self._api_key_dir)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error.message}", param=error.param) from error
        return service

    async def edited(self) -> None:
        """Return once the file's text is another than was read last, and no longer being written."""
        before = self._stamp()
        while True:
            await asyncio.sleep(POLL_S)
            now = self._stamp()
            if now == before and self._current_text() != self._text:
                return
            before = now

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _current_text(self) -> str | None:
        try:
            return self._path.read_text()
        except (OSError, UnicodeDecodeError):
            return None


def _refuse_for_one_machine(service: InferenceService, api_key_dir: Path | None) -> None:
    if service.paused:
        raise ConfigError("spec.paused: true means hands off: nothing is started or changed; set it to false")
    secret = service.api_key_secret
    if secret is not None and api_key_dir is None:
        raise ConfigError(
            f"spec.auth: the Secret {secret!r} is in a cluster only: give a folder with its keys as files by "
            "--api-key-dir, or remove spec.auth"
        )
    if secret is None and api_key_dir is not None:
        raise ConfigError("spec.auth is not set, so the keys of --api-key-dir would not be asked for: set it")


def first_key(folder: Path | None) -> str | None:
    """A key to call ourselves with. Raises ``ConfigError`` when the folder holds none."""
    if folder is None:
        return None
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        keys = [key for path in files if (key := path.read_text("utf-8").strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-dir {folder} cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"--api-key-dir {folder} holds no key: each file is one")
    return keys[0]
