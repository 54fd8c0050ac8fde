"""The `octavo` command: where a package is missing it says which extra brings it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:9", "tqdm"),
        ("bench serve random", "tqdm"),
        ("chat", "aiohttp"),
        ("complete", "aiohttp"),
        ("serve m", "uvicorn"),
        ("router", "starlette"),
        ("operator", "kopf"),
    ],
)
def test_a_command_whose_package_is_missing_names_the_extra_that_brings_it(
    command: str, package: str, tmp_path: Path
) -> None:
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    code = f"import sys; sys.modules[{package!r}] = None; from octavo.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    extra = COMMANDS[command.split()[0]][2]
    assert done.returncode == 2, done.stderr
    assert f"needs {package}" in done.stderr and f"octavo[{extra}]" in done.stderr
    assert package in {re.split(r"[\[>=<]", one)[0] for one in EXTRAS[extra]}


def test_every_command_names_an_extra_that_exists() -> None:
    assert {extra for _, _, extra in COMMANDS.values()} <= EXTRAS.keys()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_ends_quietly_where_nobody_reads_what_it_prints(unbuffered: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")  # enough for fetch to print where it is
    for command in ["--version"], ["fetch", str(model)]:
        done = subprocess.run(
            [sys.executable, "-m", "octavo.cli", *command],
            stdout=write,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert (done.returncode, done.stderr) == (141, ""), command
    os.close(write)


def test_another_pipe_that_breaks_is_no_quiet_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("octavo.cli._run", broken)
    with pytest.raises(BrokenPipeError):
        main(["serve"])
