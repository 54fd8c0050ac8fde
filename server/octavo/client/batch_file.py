"""OpenAI's batch files: lines of requests in, lines of answers out, one for each ``custom_id``."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.errors import ConfigError, OctavoError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class Line(msgspec.Struct, frozen=True):
    """One request. Other fields of a line mean nothing."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_requests(path: Path) -> Iterator[Line]:
    """The requests of a file; empty lines are skipped. Raises ``ConfigError`` naming the line."""
    decoder = msgspec.json.Decoder(Line)
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _checked(decoder, raw, f"{path} line {number}", seen, number)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _checked(
    decoder: msgspec.json.Decoder[Line], raw: bytes, where: str, seen: dict[str, int], number: int
) -> Line:
    try:
        line = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if (first := seen.setdefault(line.custom_id, number)) != number:
        raise ConfigError(f"{where}: custom_id {line.custom_id!r} is also that of line {first}")
    if line.method != "POST":
        raise ConfigError(f"{where}: method is {line.method!r}: only POST can be batched")
    if line.url not in URLS:
        raise ConfigError(f"{where}: url is {line.url!r}: choose one of {', '.join(URLS)}")
    if line.body.get("stream"):
        raise ConfigError(f"{where}: stream is true: a batch holds whole answers, leave it out")
    return line


class Answers:
    """The file of answers, each line written whole. Lines of an earlier run stay, but for failures, which
    are to be asked again, and for a last line that was cut.
    """

    def __init__(self, path: Path, known: set[str]) -> None:
        """``known``: the custom_ids of the requests. Raises ``ConfigError`` for a file of other answers."""
        self.answered: set[str] = set()
        kept = []
        try:
            old = path.read_bytes() if path.exists() else b""
            for number, raw in enumerate(old.splitlines(keepends=True), 1):
                custom_id, failed = _outcome(raw, f"{path} line {number}", known)
                if not failed:
                    self.answered.add(custom_id)
                    kept.append(raw)
            whole = b"".join(kept)
            if whole != old:
                fresh = path.with_name(path.name + ".part")
                fresh.write_bytes(whole)
                fresh.replace(path)
            self._file: BinaryIO = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def write(
        self, custom_id: str, status: int, request_id: str | None, body: Any, error: dict[str, Any] | None
    ) -> None:
        """``status`` 0: nothing was answered. Raises ``OctavoError`` when the disk takes no more."""
        response = {"status_code": status, "request_id": request_id, "body": body} if status else None
        line = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        data = json.dumps(line).encode() + b"\n"
        try:
            if self._file.write(data) < len(data):
                raise OSError("only a part fitted")
        except OSError as error:
            raise OctavoError(f"an answer cannot be written: {error}") from error


def _outcome(raw: bytes, where: str, known: set[str]) -> tuple[str, bool]:
    """The custom_id of a line, and whether it is to be asked again."""
    if not raw.endswith(b"\n"):  # the run was killed in the middle of it
        return "", True
    try:
        line = json.loads(raw)
        custom_id, response = line["custom_id"], line["response"]
        failed = line["error"] is not None or response["status_code"] >= 400
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} is no answer of a batch: write to another file") from error
    if custom_id not in known:
        raise ConfigError(f"{where} answers {custom_id!r}, which was not asked: write to another file")
    return custom_id, failed
