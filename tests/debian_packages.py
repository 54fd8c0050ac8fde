"""Programs for tests, installed from Debian's packages where they are missing (root)."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def missing(files: Mapping[str, str]) -> list[str]:
    """The packages that bring the files which are not there. ``files``: a file and its package."""
    return [package for file, package in files.items() if not Path(file).exists()]


def install(files: Mapping[str, str]) -> None:
    if not (packages := missing(files)):
        return
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=env)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
        check=True,
        env=env,
        stdout=subprocess.DEVNULL,
    )
