"""A headless Chromium, Debian's, driven by playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import debian_packages
import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = {"/usr/bin/chromium": "chromium"}
# Without the network's leave Chromium asks its maker for news, many times at every start.
_QUIET = [
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have little of it
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; Chromium is installed first where it is missing. In CI never skipped."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            reason = "the page's test needs Chromium: apt install chromium"
            if os.environ.get("CI", "") not in ("", "0", "false"):
                pytest.fail(reason)
            pytest.skip(reason)
        debian_packages.install(CHROMIUM)
        path = next(iter(CHROMIUM))
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root's own pages only
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=Path(path), args=[*_QUIET, *sandbox])
        yield browser
        browser.close()
