"""Read the header of a GGUF file: metadata and the table of tensors, without numpy or torch.

Follows the GGUF specification (ggml repository, docs/gguf.md), versions 2 and 3, little endian. The metadata
of a 262,144-token vocabulary reads in about 0.1 s (the gguf package's reader: many seconds). Used for the
model's shape, the tokenizer and the weights alike.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ModelLoadError

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32  # bytes, when general.alignment is absent

# Numbers of a block and its bytes, for each tensor type by its number in the file.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip


class GGUFTensor(NamedTuple):
    """Where a tensor lies: ``shape`` rows first as in torch, ``offset`` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: ``metadata`` by key, ``tensors`` by name, raw ``data`` on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private map: torch wraps writable memory only, and nothing here writes.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
            self.close()
            raise ModelLoadError(
                f"{path} is damaged: its header ends or breaks off early ({error})"
            ) from error
        except ModelLoadError:
            self.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. While views of ``data`` live, the map lives on until they go."""
        try:
            self._map.close()
        except BufferError:  # a view is still exported; the map goes with its last view
            del self._map

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The tensor's bytes, mapped, not copied."""
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.nbytes]

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        (version,) = struct.unpack_from("<I", self._map, 4)
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} is GGUF version {version}: versions 2 and 3 are supported")
        num_tensors, num_keys = struct.unpack_from("<QQ", self._map, 8)
        self._at = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        table = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in table:
            self.tensors[name] = self._locate(name, shape, kind, start + offset)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("I")
        shape = struct.unpack_from(f"<{dims}Q", self._map, self._at)
        self._at += 8 * dims
        return name, tuple(reversed(shape)), self._scalar("I"), self._scalar("Q")

    def _locate(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        if kind not in TENSOR_TYPES:
            raise ModelLoadError(f"{self.path}: tensor {name} has the unknown type number {kind}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        count = 1
        for dim in shape:
            count *= dim
        nbytes = count // block * block_bytes
        if count % block or offset + nbytes > len(self._map):
            raise ModelLoadError(
                f"{self.path} is damaged: tensor {name} {type_name} {shape} does not fit the file"
            )
        return GGUFTensor(name, shape, type_name, offset, nbytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._map[self._at : self._at + length]
        if len(raw) != length:
            raise ValueError(f"a string of {length} bytes at {self._at}")
        self._at += length
        return raw.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} at {self._at}")
        return _SCALARS[kind]

    def _array(self) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        layout = struct.Struct(f"<{length}{self._code(kind)}")
        values = list(layout.unpack_from(self._map, self._at))
        self._at += layout.size
        return values

    def _strings(self, length: int) -> list[str]:
        """A vocabulary is one such array: the loop is kept tight."""
        data, at, unpack, values = self._map, self._at, struct.Struct("<Q").unpack_from, []
        for _ in range(length):
            end = at + 8 + unpack(data, at)[0]
            values.append(data[at + 8 : end].decode())
            at = end
        if at > len(data):
            raise ValueError(f"an array of {length} strings at {self._at}")
        self._at = at
        return values
