"""``octavo simulate``: what the engine would do, without a model.

``paper`` prints the figures of the paged-attention design beside the reference's. ``trace`` runs the real
scheduler on arrivals, with the time of each step from a model of the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from octavo.config import CommandParser
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError
from octavo.figures import text
from octavo.simulate import paper, report
from octavo.simulate.costs import Machine
from octavo.simulate.lengths import PAPER, WORKLOADS
from octavo.simulate.replay import replay
from octavo.simulate.trace import VOCABULARY, Arrival, draw, read

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="octavo simulate", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=CommandParser)
    tables = kinds.add_parser("paper", help="memory of contiguous and paged caches, and of sharing")
    tables.add_argument("--requests", type=int, default=5000)
    tables.add_argument("--seeds", type=int, default=20, help="runs with different requests (default: 20)")
    tables.add_argument("--block-size", type=int, default=16)
    trace = kinds.add_parser("trace", help="the scheduler on an arrival trace")
    _add_trace_flags(trace)
    args = parser.parse_args(list(argv))
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
            raise ConfigError(f"{name.replace('_', '-')} is {value}: it must be above 0")
    return _paper(args) if args.kind == "paper" else _trace(args)


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", help=f"a JSON lines or CSV file, or drawn lengths: {', '.join(WORKLOADS)} (with --rate)"
    )
    parser.add_argument(
        "--rate", type=float, help="drawn arrivals a second; of a file: replayed this many times faster"
    )
    parser.add_argument(
        "--requests", type=int, help="how many requests (default: 500 drawn, or the whole file)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of drawn arrivals (default: 1)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--sweep", choices=("block-size",), help=f"run with each of {SWEEP}")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    for field in dataclasses.fields(Machine):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(
            flag, type=float, default=field.default, help=f"of the machine (default: {field.default:g})"
        )


def _paper(args: argparse.Namespace) -> int:
    each = [paper.packings(args.requests, seed, args.block_size) for seed in range(args.seeds)]
    whole, paged = (paper.mean_packing(column) for column in zip(*each, strict=True))
    print(
        f"OPT-13B, {paper.TOKEN_BYTES / 1000:.0f} KB a token, {paper.SLOTS} slots; means of {args.seeds} x "
        f"{args.requests} requests,\nlognormal prompts (mean {PAPER.prompt_mean}) and outputs (mean "
        f"{PAPER.output_mean}), sigma {PAPER.sigma}, at most {PAPER.max_total} tokens\n\n"
        f"{'':<28}tokens in memory  requests  slots lost a request"
    )
    for name, packing, reference in (
        ("contiguous, 2,048 reserved", whole, paper.REFERENCE_CONTIGUOUS),
        (f"paged, blocks of {args.block_size}", paged, paper.REFERENCE_PAGED),
    ):
        print(f"{name:<28}{packing.token_share:>16.1%}{packing.requests:>10.1f}{packing.lost_slots:>22.1f}")
        share, count, *lost = reference
        print(f"{'  reference':<28}{share:>16.1%}{count:>10.1f}" + "".join(f"{one:>22.1f}" for one in lost))
    print(
        f"\nn samples of one prompt ({paper.SHARED_PROMPT} tokens, {paper.SHARED_OUTPUT} more each), "
        "in blocks\n"
        f"{'':<8}{'apart':>7}{'shared':>8}{'saved':>8}   reference"
    )
    for samples in paper.SAMPLES:
        apart, shared = paper.sharing(samples, args.block_size, paper.SHARED_PROMPT, paper.SHARED_OUTPUT)
        theirs = "{}, {}, {:.1%}".format(*paper.REFERENCE_SHARING[samples])
        print(f"n = {samples:<4}{apart:>7}{shared:>8}{1 - shared / apart:>8.1%}   {theirs}")
    return 0


def _trace(args: argparse.Namespace) -> int:
    arrivals = _arrivals(args)
    names = [field.name for field in dataclasses.fields(Machine)]
    machine = Machine(**{name: getattr(args, name) for name in names})
    sizes = SWEEP if args.sweep else (args.block_size,)
    runs = {}
    for size in sizes:
        settings = SchedulerSettings(
            max_model_len=args.max_model_len,
            vocab_size=VOCABULARY,
            block_size=size,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_queue=len(arrivals),
        )
        run = replay(arrivals, settings, machine)
        runs[size] = report.figures(run)
        if not args.sweep:
            print(text(runs[size]))
            if args.plot:
                report.plot(run, args.plot)
    if args.sweep:
        print(_sweep_table(runs))
        if args.plot:
            report.plot_sweep(runs, args.plot)
    if args.json:
        args.json.write_text(json.dumps(runs if args.sweep else runs[args.block_size], indent=1) + "\n")
    return 0


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.trace in WORKLOADS:
        if args.rate is None:
            raise ConfigError(f"lengths drawn as {args.trace} need --rate, requests a second")
        return draw(WORKLOADS[args.trace], args.requests or 500, args.rate, args.seed)
    arrivals = read(Path(args.trace))[: args.requests]
    return [dataclasses.replace(one, time=one.time / (args.rate or 1.0)) for one in arrivals]


def _sweep_table(runs: dict[int, dict]) -> str:  # type: ignore[type-arg]
    lines = ["block size   s/token mean    p90   tokens/s   running   slots with tokens   preemptions"]
    best = min(run["normalised_latency_s_per_token"]["mean"] for run in runs.values())
    for size, run in runs.items():
        latency = run["normalised_latency_s_per_token"]
        mark = "  best" if latency["mean"] == best else ""
        lines.append(
            f"{size:>10} {latency['mean']:>14.4f} {latency['p90']:>6.3f} {run['output_tokens_per_s']:>10.0f} "
            f"{run['running_mean']:>9.1f} {run['slots_with_tokens']:>19.1%} {run['preemptions']:>13}{mark}"
        )
    return "\n".join(lines)
