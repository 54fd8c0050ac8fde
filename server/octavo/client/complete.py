"""``octavo complete``: one prompt, from the command line or standard input, continued on standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from octavo.client.asking import Answer, Screen, add_sampling_flags, sampling
from octavo.client.endpoint import Endpoint, add_endpoint_flags, choose_model, run
from octavo.config import CommandParser
from octavo.errors import ConfigError

MAX_TOKENS = 256  # the API's own default, 16, ends most answers in their first sentence


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="octavo complete", description=__doc__)
    parser.add_argument("prompt", nargs="?", default="-", help="the text to go on from; - reads stdin")
    add_endpoint_flags(parser)
    add_sampling_flags(parser)
    parser.set_defaults(max_tokens=MAX_TOKENS)
    args = parser.parse_args(list(argv))
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise ConfigError("the prompt is empty: give it as an argument or on standard input")
    return int(run(_complete(args, prompt)))


async def _complete(args: argparse.Namespace, prompt: str) -> int:
    async with Endpoint(args.url, args.api_key) as endpoint:
        body = {"model": await choose_model(endpoint, args.model), "prompt": prompt, **sampling(args)}
        answer = Answer(endpoint, "/completions", body)
        await Screen().show(answer)
        if args.stats:
            print(answer.figures(), file=sys.stderr)
    return 0
