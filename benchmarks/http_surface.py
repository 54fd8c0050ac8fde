"""What HTTP costs: throughput over the engine's own, CPU of the API's process, first events, idle streams.

    python benchmarks/http_surface.py WORKLOADS.json MODEL [--vllm-python PYTHON] [--clients 16] [--rounds 3]
        [--only A_decode_heavy ...] [--idle 1000]

WORKLOADS.json, MODEL, PYTHON and ``--peer-models``: as in ``workloads.py``. Each scenario is sent by so many
clients as streams and as whole answers, and run offline with as many sequences at once; engine and servers
take turns, and who rests is stopped. Client, API and engine share the machine. Printed: output tokens a
second; over offline, of the same round; CPU time of the API's process (the engine runs in another) for a
streamed token and a request; the time to a stream's first event in milliseconds; then what a waiting stream
takes of the API's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads import MAX_MODEL_LEN, MAX_NUM_SEQS, Engine, Group, command_line, for_vllm, read_work

from octavo.child_process import LOOPBACK, free_ports, octavo_command
from octavo.fetch import fetch

START_S = 600
KEY = "private"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Served(Group):
    """A server of one kind as a process (group) of its own, stopped while it rests."""

    def __init__(self, kind: str, python: str, model: str, cache_gib: float, log: Path) -> None:
        self.kind = kind
        self.port, self.private_port = free_ports(2)
        self._log = log
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if kind == "octavo":
            flags = [
                f"--private-port={self.private_port}",
                f"--kv-cache-memory-bytes={int(cache_gib * 2**30)}",
            ]
            command = [*octavo_command(["serve", model]), *flags, "--max-queue=4096", "--log-level=warning"]
            environment["OCTAVO_PRIVATE_KEY"] = KEY
        else:
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(cache_gib))))
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
            environment["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
            command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += [
            f"--host={LOOPBACK}",
            f"--port={self.port}",
            "--served-model-name=model",
            "--dtype=bfloat16",
        ]
        command += [f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-seqs={MAX_NUM_SEQS}"]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, text=True, start_new_session=True, env=environment
            )

    def load(self) -> None:
        deadline = time.monotonic() + START_S
        path = "/ready" if self.kind == "octavo" else "/health"
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(self._at(self.port, path)):
                break
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.kind} does not serve:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.5)
        self.signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def reset(self) -> None:
        """Forget cached prefixes."""
        port = self.private_port if self.kind == "octavo" else self.port
        headers = {"Authorization": f"Bearer {KEY}"}
        url = self._at(port, "/reset_prefix_cache")
        urllib.request.urlopen(urllib.request.Request(url, b"", headers)).read()

    def cpu_s(self) -> float:
        """CPU seconds of the process that speaks HTTP, all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def resident(self) -> int:
        """Bytes of memory of the process that speaks HTTP."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    @staticmethod
    def _at(port: int, path: str) -> str:
        return f"http://{LOOPBACK}:{port}{path}"


def post(payload: bytes) -> bytes:
    """A request for a completion as it goes over the wire."""
    fields = f"Host: {LOOPBACK}\r\nConnection: close\r\nContent-Type: application/json"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


async def ask(port: int, ids: list[int], count: int, stream: bool) -> float:
    """One completion on a connection of its own, read with as little work as can be; seconds to its first
    event (of a whole answer: to its end).
    """
    body = {"model": "model", "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    payload = json.dumps({**body, "stream": stream}).encode()
    began, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(post(payload))
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status!r}: {(await reader.read())[-500:]!r}")
    last = b""
    while part := await reader.read(65536):
        if not first and b"data:" in part:
            first = time.perf_counter()
        last = (last + part)[-200:]
    writer.close()
    if stream and b"[DONE]" not in last:
        raise SystemExit(f"a stream broke off: {last!r}")
    return (first or time.perf_counter()) - began


async def send(port: int, work: list[list[Any]], clients: int, stream: bool) -> list[float]:
    """All requests of ``work`` in order, ``clients`` at a time; the seconds to each one's first event."""
    waiting = list(reversed(work))
    firsts: list[float] = []

    async def client() -> None:
        while waiting:
            ids, count = waiting.pop()
            firsts.append(await ask(port, ids, count, stream))

    await asyncio.gather(*(client() for _ in range(clients)))
    return firsts


class Figures:
    """Of one server and one way to ask, over the rounds."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.cpu: list[float] = []
        self.firsts: list[float] = []

    def clear(self) -> None:
        for taken in (self.rates, self.cpu, self.firsts):
            taken.clear()

    def take(self, server: Served, work: list[list[Any]], clients: int, *, stream: bool) -> None:
        with server.awake():
            server.reset()
            cpu, began = server.cpu_s(), time.perf_counter()
            firsts = asyncio.run(send(server.port, work, clients, stream))
            seconds = time.perf_counter() - began
            self.cpu.append(server.cpu_s() - cpu)
        self.rates.append(sum(count for _, count in work) / seconds)
        self.firsts += firsts


async def idle_streams(server: Served, count: int) -> float:
    """Bytes of the API's memory for each of ``count`` streams that wait; as many as run at once go before."""

    async def open_some(number: int, max_tokens: int) -> list[asyncio.StreamWriter]:
        body = {"model": "model", "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
        payload = json.dumps({**body, "stream": True}).encode()
        pairs = [await asyncio.open_connection(LOOPBACK, server.port) for _ in range(number)]
        for _, writer in pairs:
            writer.write(post(payload))
        for reader, _ in pairs:
            if b" 200 " not in (status := await reader.readline()):
                raise SystemExit(f"a stream that was to wait got {status!r}")
        return [writer for _, writer in pairs]

    writers = await open_some(MAX_NUM_SEQS, MAX_MODEL_LEN - 100)
    writers += await open_some(50, 16)  # what is made once is made
    before = server.resident()
    writers += await open_some(count, 16)
    size = (server.resident() - before) / count
    for writer in writers:
        writer.close()
    return size


def report(
    offline: Engine, servers: list[Served], scenarios: dict[str, list[list[Any]]], args: argparse.Namespace
) -> None:
    for name, work in scenarios.items():
        tokens = sum(count for _, count in work)
        alone: list[float] = []
        taken = {(server.kind, stream): Figures() for server in servers for stream in (True, False)}
        for number in range(args.rounds + 1):
            alone.append(offline.run(work))
            for server in servers:
                for stream in (True, False):
                    taken[server.kind, stream].take(server, work, args.clients, stream=stream)
            if number == 0:  # warm now
                alone.clear()
                for figures in taken.values():
                    figures.clear()
        print(f"{name}: offline {statistics.median(alone):.1f} tokens/s")
        for (kind, stream), figures in taken.items():
            share = statistics.median(rate / base for rate, base in zip(figures.rates, alone, strict=True))
            cpu, firsts = statistics.median(figures.cpu), sorted(figures.firsts)
            rate, way = statistics.median(figures.rates), "streams" if stream else "whole"
            line = f"  {kind:7} {way:8} {rate:7.1f} tokens/s, {share:.2f} of ours offline; API CPU "
            line += f"{1e6 * cpu / tokens:5.0f} us a token, {1e3 * cpu / len(work):6.1f} ms a request"
            if stream:
                median, late = statistics.median(firsts), firsts[int(0.99 * len(firsts))]
                line += f"; first event {1e3 * median:.0f} ms, p99 {1e3 * late:.0f}"
            print(line, flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--peer-models", type=Path, help="where vLLM's files are, or are to be written")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--cache-gib", type=float, default=2.0)
    parser.add_argument("--idle", type=int, default=1000, help="streams that wait")
    args = parser.parse_args()
    model = fetch(args.model)
    scenarios = read_work(args.workloads, args.only or None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "offline"
        offline = Engine("octavo", sys.executable, str(model), args.cache_gib, log, args.clients)
        stack.callback(offline.close)
        offline.load()
        servers = []
        for kind, python, path in (
            ("octavo", sys.executable, model),
            ("vllm", args.vllm_python, None),
        ):
            if python:
                path = path or for_vllm(model, args.peer_models or folder)
                server = Served(kind, python, str(path), args.cache_gib, folder / kind)
                stack.callback(server.close)
                server.load()
                servers.append(server)
        report(offline, servers, scenarios, args)
        with servers[0].awake():
            size = asyncio.run(idle_streams(servers[0], args.idle))
        print(f"a stream that waits takes {size / 1024:.1f} KiB of the API's memory (of {args.idle})")


if __name__ == "__main__":
    main()
