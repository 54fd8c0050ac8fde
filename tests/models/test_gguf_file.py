"""Reading GGUF headers: what the gguf package wrote is found again, and damage is named."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.gguf_file import TENSOR_TYPES, GGUFFile


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 10000.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    block = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("b", block, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_read_back(written: Path) -> None:
    with GGUFFile(written) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.block_count"] == 3
        assert file.metadata["llama.rope.freq_base"] == 10000.5
        assert file.metadata["tokenizer.ggml.add_bos_token"] is True
        assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "é", ""]
        assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
        assert file.tensors["a"].shape == (2, 3)
        assert np.array_equal(np.frombuffer(file.data(file.tensors["a"]), np.float32), np.arange(6))
        assert (file.tensors["b"].shape, file.tensors["b"].type) == ((4, 32), "Q8_0")
        reference = {t.name: t for t in gguf.GGUFReader(written).tensors}
        for name, tensor in file.tensors.items():
            assert bytes(file.data(tensor)) == reference[name].data.tobytes()


def test_type_table_agrees_with_the_gguf_package() -> None:
    for number, (name, block, nbytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (block, nbytes)


@pytest.mark.parametrize("keep", [3, 20, 90, 200, -40])
def test_a_cut_file_is_refused_with_one_line(written: Path, keep: int) -> None:
    written.write_bytes(written.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"small\.gguf") as error:
        GGUFFile(written)
    assert "\n" not in error.value.message


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="does not begin with GGUF"):
        GGUFFile(path)
