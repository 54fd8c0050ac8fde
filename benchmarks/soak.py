"""A server at twice its capacity for ten minutes, and everything clients do to it; exit status 0 if it holds.

    python benchmarks/soak.py MODEL [--seconds 600] [--seed 0] [flags of octavo serve ...]

As many clients as twice the requests that the server holds (running and queued) send without a pause:
streams and whole answers, prompts that share prefixes, long prompts, n > 1, beams, structured output,
priorities, deadlines; they leave at random points, read slowly, and send what is wrong. The KV cache is small
enough that sequences are preempted. At the end there must be

- no leak: nothing running, nothing waiting, no block held, and memory that has not grown;
- nothing stuck: every request ended within two minutes;
- the right end for each: 200 with a finish reason for every choice, 429 with Retry-After where the queue is
  full or a deadline cannot be met (or, where the engine was amid a long step, that refusal as all that a
  stream holds), and for each wrong request its own status;
- no fault in the log, and exit status 0 after SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

MAX_NUM_SEQS, MAX_QUEUE = 16, 24
FLAGS = (
    f"--max-num-seqs={MAX_NUM_SEQS}",
    f"--max-queue={MAX_QUEUE}",
    "--max-num-batched-tokens=256",
    "--max-model-len=1024",
    "--kv-cache-memory-bytes=48Mi",
    "--scheduling-policy=priority",
    "--served-model-name=soak",
)
URGENT_SHARE = 0.1  # of the requests have a higher priority than the others
STUCK_S = 120.0  # a request that has not ended by then never will
IDLE_S = 20.0  # how long the server may take to be empty once all clients have gone
LONGEST_PAUSE_S = 1.0  # a refused client comes back after at most this, whatever it was told: pressure stays
GROWTH = 0.05  # memory at the end may be this much above what it was a third into the run
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}
REFUSALS = ("rate_limit_exceeded", "deadline_exceeded")  # codes of a 429
WRONG: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": 9}, 400),
    ({"max_tokens": 0}, 400),
    ({"prompt": [10**9]}, 400),
    ({"prompt": []}, 400),
    ({"prompt": [5] * 2000}, 400),
    ({"n": 1000}, 400),
    ({"stop": [""]}, 400),
    ({"structured_outputs": {"regex": "("}}, 400),
    ({"model": "nobody"}, 404),
)


@dataclasses.dataclass
class Ask:
    """One request: what it sends, how its client behaves, and what may come of it."""

    kind: str
    body: dict[str, Any]
    path: str = "/v1/completions"
    statuses: tuple[int, ...] = (200, 429)
    reasons: tuple[str, ...] = ("stop", "length")
    leave_after: int | None = None  # events read before the client leaves; 0: none
    pause_s: float = 0.0  # before each read
    check: Callable[[str], None] | None = None  # of the text of a choice that stopped by itself


class Traffic:
    """Draws requests. The same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(100) for _ in range(4)]
        self._kinds = [
            self._plain, self._plain, self._whole, self._long, self._samples, self._beams, self._schema,
            self._deadline, self._leaves, self._leaves, self._slow, self._wrong,
        ]  # fmt: skip

    def next(self) -> Ask:
        ask = self._random.choice(self._kinds)()
        # Few come first: a priority that is always in demand starves those below it, and that is its meaning.
        urgent = self._random.random() < URGENT_SHARE
        ask.body = {"model": "soak", "priority": -1 if urgent else 0, **ask.body}
        return ask

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(4, 260) for _ in range(count)]

    def _prompt(self) -> dict[str, Any]:
        shared = self._random.choice([[], *self._prefixes])
        prompt = [*shared, *self._tokens(self._random.randint(1, 60))]
        return {"prompt": prompt, "max_tokens": self._random.randint(1, 60), "temperature": 1.0}

    def _plain(self) -> Ask:
        return Ask("stream", {**self._prompt(), "stream": True})

    def _whole(self) -> Ask:
        return Ask("whole", self._prompt())

    def _long(self) -> Ask:
        prompt = self._tokens(self._random.randint(300, 900))
        return Ask("long prompt", {"prompt": prompt, "max_tokens": 10, "stream": True})

    def _samples(self) -> Ask:
        n = self._random.randint(2, 6)
        return Ask("n > 1", {**self._prompt(), "n": n, "stream": self._random.random() < 0.5})

    def _beams(self) -> Ask:
        return Ask("beams", {**self._prompt(), "n": self._random.randint(2, 4), "use_beam_search": True})

    def _schema(self) -> Ask:
        body = {
            "messages": [{"role": "user", "content": f"{self._random.random()} animals, as JSON"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "max_tokens": 60,
            "stream": self._random.random() < 0.5,
        }
        return Ask("schema", body, path="/v1/chat/completions", check=_fits_schema)

    def _deadline(self) -> Ask:
        body = {**self._prompt(), "timeout_s": self._random.choice((0.01, 0.2, 1.0, 4.0)), "stream": True}
        return Ask("deadline", body, reasons=("stop", "length", "abort"))

    def _leaves(self) -> Ask:
        body = {**self._prompt(), "n": self._random.choice((1, 1, 3)), "stream": True}
        return Ask("leaves", body, leave_after=self._random.choice((0, 1, 5)))

    def _slow(self) -> Ask:
        return Ask("slow reader", {**self._prompt(), "stream": True}, pause_s=self._random.uniform(0.05, 0.4))

    def _wrong(self) -> Ask:
        fields, status = self._random.choice(WRONG)
        return Ask("wrong", {**self._prompt(), **fields}, statuses=(status, 429))


def _fits_schema(text: str) -> None:
    value = json.loads(text)
    if set(value) != {"count", "kind"} or value["kind"] not in ("cat", "dog"):
        raise ValueError(f"{text!r} is not what the schema asks for")


class Clients:
    """Sends requests until told to stop, and keeps what was not as it should be."""

    def __init__(self, url: str, session: aiohttp.ClientSession, traffic: Traffic) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.faults: list[str] = []
        self.stop = asyncio.Event()
        self._url, self._session, self._traffic = url, session, traffic

    async def client(self) -> None:
        """One client: request after request, with a pause where it was refused."""
        while not self.stop.is_set():
            ask = self._traffic.next()
            try:
                async with asyncio.timeout(STUCK_S):
                    outcome, pause_s = await self._send(ask)
            except TimeoutError:
                outcome, pause_s = "stuck", 0.0
                self.faults.append(f"{ask.kind}: no end after {STUCK_S:.0f} s: {json.dumps(ask.body)[:200]}")
            except (aiohttp.ClientError, ValueError, KeyError) as error:
                outcome, pause_s = "broken", LONGEST_PAUSE_S
                self.faults.append(f"{ask.kind}: {type(error).__name__}: {error}"[:400])
            self.outcomes[ask.kind][outcome] += 1
            if pause_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stop.wait(), min(pause_s, LONGEST_PAUSE_S))

    async def _send(self, ask: Ask) -> tuple[str, float]:
        """Its outcome, and how long to stay away. Raises ``ValueError`` for an answer that is not right."""
        if ask.leave_after == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1), self._post(ask) as response:
                    await response.read()
            return "left", 0.0
        async with self._post(ask) as response:
            if response.status not in ask.statuses:
                raise ValueError(f"status {response.status}: {(await response.text())[:300]}")
            if response.status == 429:
                return "429", float(response.headers["Retry-After"])
            if response.status != 200:
                if not (await response.json())["error"]["message"]:
                    raise ValueError("an error without a message")
                return str(response.status), 0.0
            if not ask.body.get("stream"):
                texts, reasons = _whole(await response.json(), "chat" in ask.path)
            else:
                texts, reasons, outcome = await self._read(ask, response)
                if outcome:
                    return outcome, 0.0
        self._judge(ask, texts, reasons)
        return reasons[0] if len(set(reasons.values())) == 1 else "mixed", 0.0

    def _post(self, ask: Ask) -> Any:
        size = 256 if ask.pause_s else 2**16  # a slow reader's buffers hold little
        return self._session.post(self._url + ask.path, json=ask.body, read_bufsize=size)

    async def _read(
        self, ask: Ask, response: aiohttp.ClientResponse
    ) -> tuple[dict[int, str], dict[int, str], str]:
        """Texts and finish reasons, and the outcome where it is another: "left", or "late" for a refusal."""
        texts: dict[int, str] = defaultdict(str)
        reasons: dict[int, str] = {}
        done, outcome = False, ""
        async for event in _events(response):
            if ask.pause_s:
                await asyncio.sleep(ask.pause_s)
            if done:
                raise ValueError(f"an event after [DONE]: {event}")
            if event == "[DONE]":
                done = True
                continue
            data = json.loads(event)
            if "error" in data:
                if data["error"]["code"] not in REFUSALS or any(texts.values()):
                    raise ValueError(f"an error in the stream: {data['error']}")
                outcome = "late"
                continue
            for choice in data["choices"]:
                index = choice["index"]
                if index in reasons:
                    raise ValueError(f"choice {index} goes on after its end")
                texts[index] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice["finish_reason"] is not None:
                    reasons[index] = choice["finish_reason"]
            if ask.leave_after is not None:
                ask.leave_after -= 1
                if not ask.leave_after:
                    response.close()
                    return texts, reasons, "left"
        if not done:
            raise ValueError("the stream ended without [DONE]")
        return texts, reasons, outcome

    def _judge(self, ask: Ask, texts: dict[int, str], reasons: dict[int, str]) -> None:
        wanted = set(range(ask.body.get("n", 1)))
        if set(reasons) != wanted:
            raise ValueError(f"choices {sorted(wanted - set(reasons))} have no finish reason")
        for index, reason in reasons.items():
            if reason not in ask.reasons:
                raise ValueError(f"choice {index} ended with {reason!r}")
            if reason == "stop" and ask.check is not None:
                ask.check(texts[index])


def _whole(answer: dict[str, Any], chat: bool) -> tuple[dict[int, str], dict[int, str]]:
    choices = answer["choices"]
    texts = {one["index"]: one["message"]["content"] if chat else one["text"] for one in choices}
    return texts, {one["index"]: one["finish_reason"] for one in choices}


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


class Server:
    """The process of ``octavo serve`` and those under it."""

    def __init__(self, model: str, flags: list[str], log: Path) -> None:
        self.port, self.log = _free_port(), log
        ports = (f"--port={self.port}", f"--private-port={_free_port()}")
        command = [sys.executable, "-m", "octavo.cli", "serve", model, *FLAGS, *ports, *flags]
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stderr=errors)

    def check(self) -> None:
        """Ends the run where the server has ended, with its status and last words, less its access log."""
        if (status := self.process.poll()) is not None:
            lines = self.log.read_text().splitlines()
            last = [line for line in lines if not line.startswith("{")][-40:]
            raise SystemExit("\n".join([f"the server ended with status {status}:", *last]))

    def memory_mib(self) -> float:
        """What the tree of processes holds."""
        parents = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        tree = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= more
        pages = 0
        for pid in tree:
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def log_faults(self) -> list[str]:
        """Lines of the log that tell of a fault."""
        marks = (" ERROR ", " CRITICAL ", "Traceback")
        return [line for line in self.log.read_text().splitlines() if any(mark in line for mark in marks)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


async def _load(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url + "/load") as response:
        load: dict[str, Any] = await response.json()
        return load


async def _metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The sum of the samples of each name."""
    sums: dict[str, float] = defaultdict(float)
    async with session.get(url + "/metrics") as response:
        for line in (await response.text()).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                sums[name.partition("{")[0]] += float(value)
    return sums


async def _until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether what ``condition`` waits for becomes true in so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await condition():
                await asyncio.sleep(0.2)
            return True
    return False


async def soak(server: Server, seconds: float, seed: int) -> list[str]:
    """Run, print, and return what was not as it should be."""
    url = f"http://127.0.0.1:{server.port}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ready() -> bool:
            server.check()
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + "/ready") as response:
                    return response.status == 200
            return False

        await _until(ready, STUCK_S)
        if "slow reference kernels" in server.log.read_text():
            print(
                "the C++ kernels are not built: on the slow reference ones requests may seem stuck",
                flush=True,
            )
        clients = Clients(url, session, Traffic(seed))
        tasks = [asyncio.create_task(clients.client()) for _ in range(2 * (MAX_NUM_SEQS + MAX_QUEUE))]
        memory: list[tuple[float, float]] = []
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds and server.process.poll() is None:
            memory.append((now, server.memory_mib()))
            if len(memory) % 10 == 0:
                load = await _load(session, url)
                total = sum(map(Counter.total, clients.outcomes.values()))
                print(f"{now:5.0f} s  {total} requests, {load}, {memory[-1][1]:.0f} MiB", flush=True)
            await asyncio.sleep(1)
        server.check()
        clients.stop.set()
        await asyncio.gather(*tasks)
        faults = clients.faults

        async def empty() -> bool:
            load = await _load(session, url)
            return load["running"] == load["waiting"] == load["kv_usage"] == 0

        if not await _until(empty, IDLE_S):
            faults.append(f"not empty {IDLE_S:.0f} s after the last client left: {await _load(session, url)}")
        metrics = await _metrics(session, url)
        if metrics["octavo:internal_errors_total"]:
            faults.append(f"{metrics['octavo:internal_errors_total']:.0f} internal errors are counted")
        if not metrics["vllm:num_preemptions_total"]:
            faults.append("nothing was preempted: the run was too short, or the cache too large")
    server.process.send_signal(signal.SIGTERM)
    status = await asyncio.to_thread(server.process.wait, STUCK_S)
    if status:
        faults.append(f"the server ended with status {status}")
    faults += server.log_faults()
    _print(clients.outcomes, metrics)
    return faults + _growth(memory)


def _growth(memory: list[tuple[float, float]]) -> list[str]:
    """Memory against time from a third of the run on, printed; a fault where it has grown."""
    late = memory[len(memory) // 3 :]
    slope = statistics.linear_regression(*zip(*late, strict=True)).slope * 60
    quarter = max(1, len(late) // 4)
    before, after = (statistics.median(m for _, m in part) for part in (late[:quarter], late[-quarter:]))
    print(
        f"memory {before:.0f} MiB a third into the run, {after:.0f} MiB at its end: {slope:+.1f} MiB a minute"
    )
    return [f"memory grew from {before:.0f} to {after:.0f} MiB"] if after > before * (1 + GROWTH) else []


def _print(outcomes: dict[str, Counter[str]], metrics: dict[str, float]) -> None:
    names = sorted({name for counts in outcomes.values() for name in counts})
    print(f"\n{'':12}" + "".join(f"{name:>8}" for name in names))
    for kind, counts in sorted(outcomes.items()):
        print(f"{kind:12}" + "".join(f"{counts[name] or '':>8}" for name in names))
    for name in ("vllm:num_preemptions", "vllm:generation_tokens", "vllm:prefix_cache_hits"):
        print(f"{name.partition(':')[2]}: {metrics[name + '_total']:.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.model, flags, Path(folder) / "server.log")
        try:
            faults = asyncio.run(soak(server, options.seconds, options.seed))
        finally:
            server.process.kill()
            server.process.wait()
    for fault, count in Counter(faults).most_common(20):
        print(f"FAULT x{count}: {fault}")
    print("held" if not faults else f"{len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
