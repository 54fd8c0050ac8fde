"""``octavo run-batch -i in.jsonl -o out.jsonl``: a file of requests in OpenAI's batch format, answered.

By the endpoint at ``--url``, or by a model of its own: ``--model MODEL`` and flags of ``octavo serve``. Run
it again to go on where it stopped, and to ask again what failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.client.batch_file import Answers, Line, read_requests
from octavo.client.endpoint import KEY_ENV, Endpoint, EndpointError, run
from octavo.client.own_server import OwnServer
from octavo.config import CommandParser, engine_config
from octavo.errors import ConfigError

CONCURRENCY = 64
RETRIES = 5
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0  # between tries, doubled each time, unless the endpoint says
TIMEOUT_S = 3600.0
_LISTED = 20  # failures named at the end; all are in the file


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="octavo run-batch", description=__doc__)
    parser.add_argument("-i", "--input", type=Path, required=True, help="requests, one JSON object a line")
    parser.add_argument("-o", "--output", type=Path, required=True, help="answers; kept and continued")
    parser.add_argument("--url", help="the endpoint that answers")
    parser.add_argument("--api-key", help=f"of the endpoint (default: ${KEY_ENV})")
    parser.add_argument("--model", help="serve this model instead; other flags are the engine's")
    for name, default, text in (
        ("concurrency", CONCURRENCY, "requests at a time"),
        ("retries", RETRIES, "further tries after 408, 409, 429, 5xx and lost connections"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    args, rest = parser.parse_known_args(list(argv))
    if (args.url is None) == (args.model is None):
        raise ConfigError("give --url of an endpoint, or --model to serve one here")
    if args.concurrency < 1 or args.retries < 0:
        raise ConfigError("concurrency must be at least 1, retries at least 0")
    if args.model is not None:
        engine_config(args.model, rest)  # a wrong flag is said now
    elif rest:
        raise ConfigError(f"unrecognized arguments: {' '.join(rest)} (engine flags need --model)")
    known = {line.custom_id for line in read_requests(args.input)}
    if args.output.exists() and args.output.samefile(args.input):
        raise ConfigError(f"{args.output} holds the requests: write the answers to another file")
    with Answers(args.output, known) as answers:
        status = int(run(Batch(args, rest, answers, len(known)).run()))
    if status == 130:
        print(f"\nstopped; the same command goes on from {args.output}", file=sys.stderr)
    return status


class Batch:
    """One run over the requests that have no answer yet."""

    def __init__(self, args: argparse.Namespace, flags: list[str], answers: Answers, total: int) -> None:
        self._args, self._flags, self._answers, self._total = args, flags, answers, total
        self._failures: list[str] = []

    async def run(self) -> int:
        skipped = len(self._answers.answered)
        if skipped < self._total:
            if self._args.url:
                await self._answer_all(self._args.url, self._args.api_key)
            else:
                async with OwnServer(self._args.model, self._flags) as server:
                    await server.unless_dead(self._answer_all(server.url, None))
        answered = self._total - skipped - len(self._failures)
        print(
            f"{self._total} requests: {skipped} were answered before, {answered} now, "
            f"{len(self._failures)} failed",
            file=sys.stderr,
        )
        for failure in self._failures[:_LISTED]:
            print(f"  {failure}", file=sys.stderr)
        if len(self._failures) > _LISTED:
            print(f"  and {len(self._failures) - _LISTED} more, in {self._args.output}", file=sys.stderr)
        return 1 if self._failures else 0

    async def _answer_all(self, url: str, key: str | None) -> None:
        from tqdm import tqdm

        todo = (one for one in read_requests(self._args.input) if one.custom_id not in self._answers.answered)
        left = self._total - len(self._answers.answered)
        async with Endpoint(url, key, timeout_s=TIMEOUT_S) as endpoint:
            with tqdm(total=left, unit="request", disable=not sys.stderr.isatty()) as bar:

                async def work(lines: Iterator[Line]) -> None:
                    for line in lines:
                        await self._answer(endpoint, line)
                        bar.update()

                try:
                    async with asyncio.TaskGroup() as workers:
                        for _ in range(min(self._args.concurrency, left)):
                            workers.create_task(work(todo))
                except ExceptionGroup as group:  # one line for the user: they all say the same
                    raise group.exceptions[0] from group

    async def _answer(self, endpoint: Endpoint, line: Line) -> None:
        for attempt in range(self._args.retries + 1):
            try:
                body, request_id = await endpoint.post(line.url.removeprefix("/v1"), line.body)
                self._answers.write(line.custom_id, 200, request_id, body, None)
                return
            except EndpointError as error:
                if _passes(error) and attempt < self._args.retries:
                    await asyncio.sleep(wait_s(error, attempt))
                    continue
                said = {"code": error.code, "message": error.message, "param": error.param}
                self._answers.write(line.custom_id, error.status, error.request_id, error.body, said)
                self._failures.append(f"{line.custom_id}: {error.message}")
                return


def _passes(error: EndpointError) -> bool:
    """Whether a later try may get another answer."""
    return error.status in (0, 408, 409, 429) or error.status >= 500


def wait_s(error: EndpointError, attempt: int) -> float:
    """What the endpoint asks for in ``Retry-After``, else twice as long as before, spread at random."""
    asked = error.retry_after or ""
    if asked.replace(".", "", 1).isdecimal():
        return min(float(asked), LONGEST_WAIT_S)
    return min(FIRST_WAIT_S * 2.0**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
