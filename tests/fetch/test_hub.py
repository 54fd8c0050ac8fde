"""hf:// against a hub of our own: the real client, real HTTP, a repository in memory."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "original/consolidated.00.safetensors": b"not needed",
}


class Hub(BaseHTTPRequestHandler):
    """The three routes of the hub that a snapshot download uses."""

    asked: list[str]

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path}")
        if "/org/gated" in path:
            self._answer(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="gated")
        elif "/org/tiny" not in path:
            self._answer(401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="not found")
        elif path.startswith("/api/models/org/tiny/revision/") and path.rsplit("/", 1)[-1] not in (
            "main",
            COMMIT,
        ):
            self._answer(404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="no such revision")
        elif path.startswith("/api/models/org/tiny/tree/"):
            self._answer(200, json.dumps([_entry(name) for name in FILES]).encode())
        elif path.startswith("/api/models/org/tiny/"):
            siblings = [{"rfilename": name, "size": len(body)} for name, body in FILES.items()]
            body = {
                "id": "org/tiny",
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            self._answer(200, json.dumps(body).encode())
        elif "/resolve/" in path and self.command == "GET" and self.server.breaks_off:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.close_connection = True  # long before the end
        elif (name := path.partition(f"/resolve/{COMMIT}/")[2]) in FILES:
            etag = hashlib.sha1(FILES[name]).hexdigest()
            self._answer(200, FILES[name], ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
        else:
            self._answer(404, b"{}", X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """The test's own output says enough."""


def _entry(name: str) -> dict[str, object]:
    return {
        "type": "file",
        "path": name,
        "size": len(FILES[name]),
        "oid": hashlib.sha1(FILES[name]).hexdigest(),
    }


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.breaks_off = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _fetch(uri: str, tmp_path: Path, endpoint: str, *dest: str) -> subprocess.CompletedProcess[str]:
    """`octavo fetch` in a process of its own: the hub client reads its environment once, at import."""
    import os

    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    environment.pop("HF_TOKEN", None)
    command = [sys.executable, "-m", "octavo.cli", "fetch", uri, *dest]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_a_repository_comes_with_the_files_an_engine_needs_and_no_others(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    done = _fetch("hf://org/tiny", tmp_path, f"http://127.0.0.1:{hub.server_port}", str(tmp_path / "models"))
    assert done.returncode == 0, done.stderr
    link = Path(done.stdout.strip())
    assert link == tmp_path / "models/model"
    folder = link.resolve()
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {name for name in names if not name.startswith(".cache")} == wanted


@pytest.mark.parametrize(
    ("uri", "part"),
    [
        ("hf://org/absent", "no repository org/absent, or it is private"),
        ("hf://org/gated", "org/gated is gated: accept its terms"),
        ("hf://org/tiny@v9", "org/tiny has no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_gets_one_line(
    hub: ThreadingHTTPServer, tmp_path: Path, uri: str, part: str
) -> None:
    done = _fetch(uri, tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert done.returncode == 1
    assert part in done.stderr.splitlines()[-1]


def test_a_hub_that_cannot_be_reached_is_said_with_the_way_out(tmp_path: Path) -> None:
    done = _fetch("hf://org/tiny", tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert (
        "the Hugging Face hub at http://127.0.0.1:9 cannot be reached" in last and "give file:///path" in last
    )


def test_a_download_that_breaks_off_is_one_line(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    hub.breaks_off = True
    done = _fetch("hf://org/tiny", tmp_path, f"http://127.0.0.1:{hub.server_port}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot be reached" in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_not_the_hubs_fault(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "models")
    done = _fetch("hf://org/tiny", tmp_path, f"http://127.0.0.1:{hub.server_port}", place)
    assert done.returncode == 1
    assert "org/tiny cannot be stored: " in done.stderr.splitlines()[-1]


def test_a_long_download_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo import fetch

    said: list[str] = []
    monkeypatch.setattr(fetch, "PROGRESS_S", 0.0)
    bars = fetch.progress_lines("org/tiny", said.append)
    with bars(total=4_000_000, unit="B") as bar, bars(total=2) as files:
        bar.update(1_000_000)
        bar.refresh()
        files.update(1)
        files.refresh()
    assert said and set(said) == {"org/tiny: 1 of 4 MB"}
