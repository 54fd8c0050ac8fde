"""A server of several API processes, seen one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from octavo.api.responses_routes import keeper

COUNT = 3
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
ENDLESS = {**BODY, "max_tokens": 1900, "stream": True}
PATIENCE_S = 60
ONE_RESPONSE = "/v1/responses/{response_id}"


def ask(running: Any, number: int, method: str, *arguments: Any) -> Any:
    """Call one of the API processes as they call each other."""
    calling = running.server.service.peers.call(number, method, *arguments)
    return asyncio.run_coroutine_threadsafe(calling, running._loop).result(PATIENCE_S)


def counted(running: Any, number: int, name: str, **labels: str) -> float:
    """The sum over the samples of one process alone."""
    families = ask(running, number, "metrics")
    samples = [sample for *_, each in families for sample in each]
    return sum(
        value for sample, found, value in samples if sample == name and labels.items() <= found.items()
    )


def answered(running: Any, route: str, status: str = "200") -> list[float]:
    """How many answers each process gave."""
    name = "octavo:http_requests_total"
    return [counted(running, number, name, route=route, status=status) for number in range(COUNT)]


def until(condition: Callable[[], Any]) -> Any:
    """What ``condition`` comes to, once that is true."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < give_up, "it never came true"
        time.sleep(0.01)
    return found


def client_of(running: Any) -> httpx.Client:
    """A client with a connection of its own, which any process may have accepted; it is kept, as another
    might be accepted by another process.
    """
    limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
    return httpx.Client(base_url=running.url, timeout=PATIENCE_S, trust_env=False, limits=limits)


def fresh(running: Any, method: str, path: str, **options: Any) -> httpx.Response:
    """The answer to a request on a connection of its own."""
    with client_of(running) as client:
        return client.request(method, path, **options)


@contextlib.contextmanager
def connected(running: Any) -> Iterator[list[httpx.Client]]:
    """A client for each process, connected to it."""
    found: dict[int, httpx.Client] = {}
    with contextlib.ExitStack() as stack:
        give_up = time.monotonic() + PATIENCE_S
        while len(found) < COUNT:
            assert time.monotonic() < give_up, "a process got no request"
            before, client = answered(running, "/live"), stack.enter_context(client_of(running))
            client.get("/live")
            after = until(lambda before=before: changed(answered(running, "/live"), before))
            found.setdefault(next(n for n in range(COUNT) if after[n] > before[n]), client)
        yield [found[number] for number in range(COUNT)]


def changed(after: list[float], before: list[float]) -> list[float]:
    """``after``, once it is not as ``before``: an answer is counted a moment after it has gone out."""
    return after if after != before else []


def by_all(running: Any, method: str, path: str, route: str, **options: Any) -> list[httpx.Response]:
    """The answers of all processes to the same request; they have one status."""
    first = running.clients[0].request(method, path, **options)
    status = str(first.status_code)
    before = answered(running, route, status)
    answers = [client.request(method, path, **options) for client in running.clients[1:]]
    assert {str(answer.status_code) for answer in answers} == {status}
    until(lambda: answered(running, route, status)[1:] == [count + 1 for count in before[1:]])
    return [first, *answers]


class Held:
    """A stream that is open, and has begun."""

    def __init__(self, client: httpx.Client, name: str, body: dict[str, Any]) -> None:
        request = client.build_request("POST", "/v1/completions", json=body, headers={"X-Request-Id": name})
        self.answer = client.send(request, stream=True)
        self.lines = (line for line in self.answer.iter_lines() if line.startswith("data: {"))
        next(self.lines)

    def finish_reason(self) -> str:
        """Of the stream that is read to its end."""
        return str(json.loads(list(self.lines)[-1][6:])["choices"][0]["finish_reason"])


@contextlib.contextmanager
def one_in_each(running: Any, **fields: Any) -> Iterator[list[Held]]:
    """An open stream in each process; its request id is in-0 where that is the first, and so on."""
    with connected(running) as clients:
        held = [Held(client, f"in-{number}", {**ENDLESS, **fields}) for number, client in enumerate(clients)]
        yield held


def pid_of(running: Any, number: int) -> int:
    return int(running.server._processes._running[number].child.pid)


def stored_in_each(running: Any, **fields: Any) -> list[str]:
    """The id of a response that each process keeps."""
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 4, **fields}
    made = [client.post("/v1/responses", json=body).json()["id"] for client in running.clients]
    assert [keeper(name, COUNT) for name in made] == list(range(COUNT))
    return made
