"""`octavo up` with light processes in place of engines and router: its own conduct is tested in seconds.

Run as ``python stand_in.py up -f FILE ...``: the real runner, whose children are this file again. An engine
with ``--max-num-seqs=13`` cannot start; it takes ``--max-queue`` hundredths of a second to be ready, and says
that ``--max-num-batched-tokens`` requests wait.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True


def engine(flags: dict[str, str]) -> int:
    if flags.get("max-num-seqs") == "13":
        print("octavo: max-num-seqs is 13: these engines are superstitious", flush=True)
        return 2
    stages = [("loading weights", "llama"), ("sizing the cache", ""), ("warming", "")]
    began, wait_s = time.monotonic(), int(flags.get("max-queue", "20")) / 100
    waiting = int(flags.get("max-num-batched-tokens", "0"))  # each engine's queue
    info = {
        "load": {"waiting": waiting, "running": 0, "kv_usage": 0.0},
        "limits": {"max_num_seqs": int(flags.get("max-num-seqs", "1"))},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            age = time.monotonic() - began
            if self.path == "/server_info":
                known = self.headers["Authorization"] == f"Bearer {os.environ['OCTAVO_PRIVATE_KEY']}"
                answer(self, 200 if known else 401, info)
            elif age >= wait_s:
                answer(self, 200, {"state": "ready", "stages": stages})
            else:
                answer(self, 503, {"state": "loading", "stages": stages[: 1 if age < wait_s / 2 else 2]})

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    threading.Thread(
        target=Server(("127.0.0.1", int(flags["private-port"])), Handler).serve_forever, daemon=True
    ).start()
    return serve(int(flags["port"]), Handler)


def router(flags: dict[str, str]) -> int:
    file = Path(flags["endpoints-file"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = json.loads(file.read_text())["endpoints"]
            answer(self, 200 if known or self.path == "/live" else 503, {"endpoints": known})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            events = [{"choices": [{"delta": {"content": piece}}]} for piece in ("Par", "is.")]
            events.append({"choices": [], "usage": {"completion_tokens": 2}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
            answer(self, 200, "".join(lines))

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return serve(int(flags["port"]), Handler)


def serve(port: int, handler: type[BaseHTTPRequestHandler]) -> int:
    server = Server(("127.0.0.1", port), handler)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.02)
    return 0


def answer(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "text/event-stream" if isinstance(body, str) else "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def main(args: list[str]) -> int:
    if args[0] in ("serve", "router"):
        flags = dict(arg.removeprefix("--").partition("=")[::2] for arg in args if arg.startswith("--"))
        return engine(flags) if args[0] == "serve" else router(flags)
    from octavo.cli import main as octavo
    from octavo_operator.local import process

    real = process.octavo_command
    process.octavo_command = lambda args: (
        real(args) if args[0] == "fetch" else [sys.executable, __file__, *args]
    )
    return octavo(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
