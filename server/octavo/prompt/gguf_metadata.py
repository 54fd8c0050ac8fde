"""Read the metadata of a GGUF file: the key-value pairs in front of the tensors, nothing else.

Plain ``struct`` over a memory map, so that a vocabulary of 262,144 tokens takes a fraction of a second (the
``gguf`` package builds an array per element). Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from octavo.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 counted in 32 bits; nobody writes it any more
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file with its value; arrays are lists.

    Raises ``ModelLoadError`` when the file is not a GGUF file of version 2 or 3, or ends early.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data, path).metadata()
        except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
            raise ModelLoadError(f"{path} is not a whole GGUF file: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def metadata(self) -> dict[str, Any]:
        if self.data[:4] != _MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it does not start with the letters GGUF")
        self.at = 4
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self.path} is GGUF version {version}: versions 2 and 3 are read")
        self.scalar("Q")  # number of tensors
        count = self.scalar("Q")
        return dict(self.pair() for _ in range(count))

    def pair(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.scalar("I"))

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        start = self.at + 8
        end = start + int.from_bytes(self.data[self.at : start], "little")
        if end > len(self.data):
            raise ValueError("a string reaches past its end")
        self.at = end
        return self.data[start:end].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            values = struct.unpack_from(code, self.data, self.at)
            self.at += struct.calcsize(code)
            return list(values)
        return [self.value(kind) for _ in range(count)]
