"""The `octavo` command: where a package is missing it says which extra brings it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.cli import COMMANDS

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:9", "tqdm"),
        ("bench serve random", "tqdm"),
        ("chat", "aiohttp"),
        ("complete", "aiohttp"),
        ("serve", "uvicorn"),
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
