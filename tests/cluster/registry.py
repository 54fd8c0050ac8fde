"""A small image registry (OCI distribution v2: push and pull) that forgets what has been pulled.

buildah keeps an image's layers and containerd keeps them unpacked; a third copy of a 5 GB image would only
take disk. So once an image has been pulled, `forget` replaces its layers by their sizes: a later push still
hears that they are there and sends the changed ones alone.
"""

import hashlib
import json
import os
import re
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20
_OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"  # what a manifest is that does not say
_KEEP_BELOW = 1 << 16  # bytes: manifests and image configs stay


class Registry:
    """Serves `folder` on 127.0.0.1 of the network namespace of the thread that makes it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        for name in ("blobs", "tags", "uploads"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for part in (folder / "uploads").iterdir():
            part.unlink()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"store": self}))
        self.port: int = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True, name="registry").start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def forget(self) -> None:
        """Frees the layers: all images in here have been pulled."""
        for blob in (self.folder / "blobs").iterdir():
            if blob.suffix != ".size" and blob.stat().st_size > _KEEP_BELOW:
                blob.with_suffix(".size").write_text(str(blob.stat().st_size))
                blob.unlink()

    def distrust(self) -> None:
        """Takes back `forget`: what was pulled is lost, so all of it must be pushed again."""
        for size in (self.folder / "blobs").glob("*.size"):
            size.unlink()

    def size(self, digest: str) -> int | None:
        """Bytes of a blob that is here, or was pulled from here; None for an unknown one."""
        path = self.blob(digest)
        if path.exists():
            return path.stat().st_size
        size = path.with_suffix(".size")
        return int(size.read_text()) if size.exists() else None

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.removeprefix("sha256:")

    def tag(self, name: str, reference: str) -> Path:
        return self.folder / "tags" / f"{name}:{reference}".replace("/", "+")

    def upload(self, ident: str) -> Path:
        return self.folder / "uploads" / ident


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Registry

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: pushes and pulls report their own errors."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.path = self.path.split("?")[0]  # containerd names the host that this one stands in for
        if self.path == "/v2/":
            self._answer(200)
        elif m := re.fullmatch(r"/v2/(.+)/blobs/(sha256:\w+)", self.path):
            size = self.store.size(m[2])
            path = self.store.blob(m[2])
            if size is None or (self.command == "GET" and not path.exists()):
                self._answer(404)
            elif self.command == "HEAD":
                self._answer(200, {"Content-Length": str(size), "Docker-Content-Digest": m[2]})
            else:
                self._send(path, "application/octet-stream", m[2])
        elif m := re.fullmatch(r"/v2/(.+)/manifests/(.+)", self.path):
            digest = m[2] if m[2].startswith("sha256:") else self._tagged(m[1], m[2])
            if digest is None or not self.store.blob(digest).exists():
                self._answer(404)
            else:
                kind = json.loads(self.store.blob(digest).read_bytes()).get("mediaType", _OCI_MANIFEST)
                self._send(self.store.blob(digest), kind, digest)
        else:
            self._answer(404)

    def do_POST(self) -> None:
        name = self.path.removeprefix("/v2/").split("/blobs/uploads/")[0]
        ident = uuid.uuid4().hex
        self.store.upload(ident).touch()
        self._drain()
        self._answer(202, {"Location": f"/v2/{name}/blobs/uploads/{ident}", "Range": "0-0"})

    def do_PATCH(self) -> None:
        ident = self.path.rsplit("/", 1)[1]
        with self.store.upload(ident).open("ab") as f:
            for chunk in self._body():
                f.write(chunk)
            end = f.tell()
        self._answer(202, {"Location": self.path, "Range": f"0-{end - 1}"})

    def do_PUT(self) -> None:
        if m := re.fullmatch(r"/v2/(.+)/blobs/uploads/(\w+)\?digest=sha256(?::|%3A)(\w+)", self.path):
            part, digest = self.store.upload(m[2]), hashlib.sha256()
            with part.open("ab") as f:
                for chunk in self._body():
                    f.write(chunk)
            with part.open("rb") as f:
                while chunk := f.read(_CHUNK):
                    digest.update(chunk)
            if digest.hexdigest() != m[3]:
                part.unlink()
                self._answer(400)
                return
            os.replace(part, self.store.blob(m[3]))
            self._answer(201, {"Docker-Content-Digest": f"sha256:{m[3]}"})
        elif m := re.fullmatch(r"/v2/(.+)/manifests/(.+)", self.path):
            body = b"".join(self._body())
            digest_hex = hashlib.sha256(body).hexdigest()
            self.store.blob(digest_hex).write_bytes(body)
            self.store.tag(m[1], m[2]).write_text(digest_hex)
            self._answer(201, {"Docker-Content-Digest": f"sha256:{digest_hex}"})
        else:
            self._drain()
            self._answer(404)

    def _tagged(self, name: str, reference: str) -> str | None:
        tag = self.store.tag(name, reference)
        return f"sha256:{tag.read_text()}" if tag.exists() else None

    def _send(self, path: Path, kind: str, digest: str) -> None:
        size = path.stat().st_size
        self._answer(
            200, {"Content-Type": kind, "Content-Length": str(size), "Docker-Content-Digest": digest}
        )
        if self.command == "GET":
            with path.open("rb") as f:
                while chunk := f.read(_CHUNK):
                    self.wfile.write(chunk)

    def _answer(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": "0"} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()

    def _drain(self) -> None:
        for _ in self._body():
            pass

    def _body(self) -> Iterator[bytes]:
        """The request's body, whether sent by length or in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield from _pieces(self.rfile, size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield from _pieces(self.rfile, int(self.headers.get("Content-Length") or 0))


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        piece = stream.read(min(size, _CHUNK))
        if not piece:
            raise ConnectionError("the client closed the connection within a body")
        size -= len(piece)
        yield piece
