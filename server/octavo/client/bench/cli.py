"""``octavo bench serve``: load on any OpenAI endpoint, and what its users would see.

TRAFFIC is ``random``, ``multi-turn`` or ``shared-prefix``, drawn in the sizes that the flags say, or a file
of token ids. Figures count tokens, not chunks; failures are counted apart and make the exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.client.asking import json_object
from octavo.client.bench import summary
from octavo.client.bench.load import CHAT, COMPLETIONS, Outcome, Target, choose_fields, offer
from octavo.client.bench.traffic import SHAPES, Conversation, Shape, draw, read
from octavo.client.endpoint import Endpoint, add_endpoint_flags, choose_model, run
from octavo.config import CommandParser
from octavo.errors import ConfigError
from octavo.figures import picture

DEFAULT_CONCURRENCY = 16
TIMEOUT_S = 600.0
_SIZES = {
    "requests": "drawn conversations",
    "input_tokens": "words of a drawn question, about as many tokens",
    "output_tokens": "tokens of each answer",
    "spread": "lengths are uniform within this share of the mean, 0 to 1",
    "turns": "of multi-turn",
    "groups": "different prefixes of shared-prefix",
    "prefix_tokens": "words of a shared prefix",
    "seed": "of all that is drawn",
}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="octavo bench", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=CommandParser)
    _add_flags(kinds.add_parser("serve", help="load on an OpenAI endpoint", description=__doc__))
    args = parser.parse_args(list(argv))
    for name in ("rate", "concurrency", "timeout_s", *_SIZES):
        value = getattr(args, name)
        if value is not None and (value < 0 if name in ("spread", "seed") else value <= 0):
            raise ConfigError(f"{name.replace('_', '-')} is {value:g}: it must be above 0")
    if args.spread > 1:
        raise ConfigError(f"spread is {args.spread:g}: it must be between 0 and 1")
    traffic, path = _traffic(args)
    if args.plot:
        picture(1, 1)  # a missing library is said before the load, not after it
    return int(run(_serve(args, traffic, path)))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traffic", help=f"{', '.join(SHAPES)}, or a JSON file of scenarios of token ids")
    add_endpoint_flags(parser)
    parser.add_argument("--scenario", help="of the file")
    parser.add_argument("--rate", type=float, help="conversations begun a second, at random (Poisson)")
    parser.add_argument(
        "--concurrency", type=int,
        help=f"conversations at a time (default: {DEFAULT_CONCURRENCY}, with --rate unlimited)",
    )  # fmt: skip
    parser.add_argument(
        "--completions", action="store_true", help="drawn text to /v1/completions, not to chat"
    )
    for field in dataclasses.fields(Shape):
        parser.add_argument(
            "--" + field.name.replace("_", "-"), type=type(field.default), default=field.default,
            help=f"{_SIZES[field.name]} (default: {field.default})",
        )  # fmt: skip
    parser.add_argument(
        "--goodput", nargs="+", type=_bound, default=[], metavar="NAME:MS",
        help="count requests within bounds of ttft, itl, tpot, e2e, as ttft:500 tpot:50",
    )  # fmt: skip
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, help=f"of a request (default: {TIMEOUT_S:g})"
    )
    parser.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="other fields of each request"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the run")


def _bound(text: str) -> tuple[str, float]:
    name, _, bound = text.partition(":")
    known = [one.removesuffix("_ms") for one in summary.LATENCIES]
    try:
        if name not in known or not float(bound) > 0:
            raise ValueError
    except ValueError as error:
        raise ConfigError(f"goodput is {text!r}: give NAME:MS, NAME one of {', '.join(known)}") from error
    return f"{name}_ms", float(bound)


def _traffic(args: argparse.Namespace) -> tuple[list[Conversation], str]:
    if args.traffic in SHAPES:
        shape = Shape(**{name: getattr(args, name) for name in _SIZES})
        return draw(args.traffic, shape), COMPLETIONS if args.completions else CHAT
    return read(Path(args.traffic), args.scenario), COMPLETIONS


async def _serve(args: argparse.Namespace, traffic: list[Conversation], path: str) -> int:
    from tqdm import tqdm

    async with Endpoint(args.url, args.api_key, timeout_s=args.timeout_s) as endpoint:
        model = await choose_model(endpoint, args.model)
        fields = {**await choose_fields(endpoint, path, model), **args.extra_body}
        limit = args.concurrency or (None if args.rate else DEFAULT_CONCURRENCY)
        turns = sum(len(one.turns) for one in traffic)
        with tqdm(total=turns, unit="request", disable=not sys.stderr.isatty()) as bar:
            target = Target(endpoint, path, fields)
            outcomes = await offer(
                target, traffic, rate=args.rate, concurrency=limit, seed=args.seed, done=bar.update
            )
    about = {"url": args.url, "model": model, "traffic": args.traffic, "scenario": args.scenario}
    load = {"rate": args.rate, "concurrency": limit, "seed": args.seed}
    found = {
        **about,
        **load,
        "not_sent": turns - len(outcomes),
        **summary.figures(outcomes, dict(args.goodput)),
    }
    return report(args, found, outcomes)


def report(args: argparse.Namespace, found: dict[str, Any], outcomes: list[Outcome]) -> int:
    print(summary.table(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        summary.plot(outcomes, args.plot)
    return 1 if found["failed"] else 0
