"""``octavo chat``: a conversation in the terminal, with any OpenAI endpoint."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from octavo.client.asking import Answer, Screen, add_sampling_flags, sampling, say
from octavo.client.endpoint import Endpoint, EndpointError, add_endpoint_flags, choose_model
from octavo.config import CommandParser

HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt (and forget the conversation)
/stats         say cached tokens and speed after each answer, or no longer
/help          this list
/exit          leave (Ctrl-D too)
Ctrl-C stops an answer."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="octavo chat", description=__doc__)
    add_endpoint_flags(parser)
    parser.add_argument("--system", help="system prompt")
    add_sampling_flags(parser)
    args = parser.parse_args(list(argv))
    if sys.stdin.isatty():
        import readline  # noqa: F401  # its import gives input() a history and editing
    with asyncio.Runner() as runner:
        endpoint = Endpoint(args.url, args.api_key)
        runner.run(endpoint.__aenter__())
        try:
            return Chat(args, endpoint, runner).run()
        finally:
            runner.run(endpoint.__aexit__())


class Chat:
    """The conversation so far, and the loop that reads lines. Ctrl-C reaches ``Runner.run``, which cancels
    the answer and raises ``KeyboardInterrupt`` here.
    """

    def __init__(self, args: argparse.Namespace, endpoint: Endpoint, runner: asyncio.Runner) -> None:
        self._endpoint, self._runner, self._screen = endpoint, runner, Screen()
        self._fields = sampling(args)
        self._stats = args.stats
        self._model = runner.run(choose_model(endpoint, args.model))
        self._begin(args.system)

    def run(self) -> int:
        self._note(f"{self._model} at {self._endpoint.base}; /help says what you can do")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._note("\n(/exit or Ctrl-D leaves)")
                continue
            if line == "/exit":
                return 0
            if line.startswith("/"):
                self._obey(*line.split(maxsplit=1))
            elif line:
                self._ask(line)

    def _obey(self, command: str, text: str = "") -> None:
        if command == "/reset":
            self._begin(self._system)
        elif command == "/system":
            self._begin(text or None)
        elif command == "/stats":
            self._stats = not self._stats
            self._note("figures after each answer" if self._stats else "no figures")
        else:
            self._note(HELP if command == "/help" else f"{command} is unknown\n{HELP}")

    def _ask(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        body = {"model": self._model, "messages": self._messages, **self._fields}
        answer = Answer(self._endpoint, "/chat/completions", body)
        try:
            self._runner.run(self._screen.show(answer))
        except KeyboardInterrupt:
            self._note("(stopped)")
        except EndpointError as error:
            say(error)
        if answer.text:  # also what was said before it stopped: the next question may be about it
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()
        if self._stats and answer.usage:
            self._note(answer.figures())

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def _note(self, text: str) -> None:
        """On stderr: stdout holds answers alone."""
        print(text, file=sys.stderr, flush=True)
