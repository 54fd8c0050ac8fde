"""Whether `octavo bench serve` and guidellm say the same of one server.

    python benchmarks/bench_agreement.py MODEL GUIDELLM [--rounds 3] [--requests 48] [--concurrency 8]

MODEL: as ``octavo serve`` takes it, served for the run; or the URL of a server that runs, with a model named
"model". GUIDELLM: the command of an environment that has the package (`pip install guidellm`). The two take
turns with prompts of one distribution, never the same ones (the second would find them cached). Printed: the
median over the rounds of each, their ratio, and in brackets how much one and the same client differs from
round to round (largest over smallest): a ratio within that is noise. guidellm divides the time after a
request's first token by its other tokens, as our "a token after the first" does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.child_process import octavo_command
from octavo.client.bench.traffic import Shape, draw
from octavo.client.own_server import OwnServer

FLAGS = ["--served-model-name=model", "--max-model-len=1024", "--kv-cache-memory-bytes=256Mi"]
FIGURES = {
    "time to first token, mean": "ms",
    "time to first token, p50": "ms",
    "a token after the first, mean": "ms",
    "whole answer, mean": "ms",
    "output tokens": "/s",
    "requests": "/s",
}


def ours(url: str, shape: Shape, concurrency: int, folder: Path) -> list[float]:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in vars(shape).items()]
    out = folder / "ours.json"
    flags = ["--completions", f"--concurrency={concurrency}", f"--url={url}", f"--json={out}", *sizes]
    subprocess.run(
        octavo_command(["bench", "serve", "random", *flags]), check=True, stdout=subprocess.DEVNULL
    )
    found = json.loads(out.read_text())
    ttft = found["ttft_ms"]
    means = [ttft["mean"], ttft["p50"], found["tpot_ms"]["mean"], found["e2e_ms"]["mean"]]
    return [*means, found["output_tokens_per_s"], found["requests_per_s"]]


def guidellm(command: str, url: str, shape: Shape, concurrency: int, folder: Path) -> list[float]:
    prompts, out = folder / "prompts.jsonl", folder / "guidellm.json"
    turns = [one.turns[0] for one in draw("random", shape)]
    rows = [{"prompt": turn.prompt, "output_tokens_count": turn.max_tokens} for turn in turns]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "model": "model",
            "request_format": "/v1/completions",
        },
        "profile": {"kind": "concurrent", "streams": concurrency},
        "constraint": {"kind": "max_requests", "count": shape.requests},
        "data": {"kind": "json_file", "path": str(prompts)},
        "output": {"kind": "json", "path": str(out)},
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
    subprocess.run(
        [command, "run", "--disable-console", *flags],
        check=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = json.loads(out.read_text())["benchmarks"][0]
    if found["metrics"]["request_totals"]["successful"] != shape.requests:
        raise SystemExit(f"guidellm: {found['metrics']['request_totals']}")
    metrics = {name: found["metrics"][name]["successful"] for name in (
        "time_to_first_token_ms", "inter_token_latency_ms", "request_latency", "output_token_count",
    )}  # fmt: skip
    ttft, answers = metrics["time_to_first_token_ms"], metrics["request_latency"]
    means = [ttft["mean"], ttft["median"], metrics["inter_token_latency_ms"]["mean"], 1000 * answers["mean"]]
    seconds = found["duration"]
    return [*means, metrics["output_token_count"]["total_sum"] / seconds, answers["count"] / seconds]


async def compare(args: argparse.Namespace) -> list[list[list[float]]]:
    """Figures of each round, for each client."""
    clients = [ours, functools.partial(guidellm, args.guidellm)]
    rounds: list[list[list[float]]] = [[] for _ in clients]
    async with contextlib.AsyncExitStack() as stack:
        url = args.model
        if not url.startswith("http"):
            server = OwnServer(args.model, [*FLAGS, f"--dtype={args.dtype}"])
            url = (await stack.enter_async_context(server)).url
        with tempfile.TemporaryDirectory() as name:
            for number in range(args.rounds + 1):
                for client, taken in enumerate(rounds):
                    shape = Shape(
                        requests=args.requests,
                        input_tokens=args.input_tokens,
                        output_tokens=args.output_tokens,
                        seed=2 * number + client,
                    )
                    work = (url, shape, args.concurrency, Path(name))
                    figures = await asyncio.to_thread(clients[client], *work)
                    if number:  # the first round warms up
                        taken.append(figures)
                    print(".", end="", file=sys.stderr, flush=True)
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("guidellm")
    parser.add_argument("--dtype", default="bfloat16")
    for name, default in (
        ("rounds", 3), ("requests", 48), ("concurrency", 8), ("input-tokens", 128), ("output-tokens", 64),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    rounds = asyncio.run(compare(parser.parse_args()))
    print(f"\n{'':34}{'octavo bench':>22}{'guidellm':>22}{'ratio':>8}")
    for index, (name, unit) in enumerate(FIGURES.items()):
        columns = [[figures[index] for figures in taken] for taken in rounds]
        shown = [
            f"{statistics.median(values):.1f} {unit} ({max(values) / min(values):.2f})" for values in columns
        ]
        ratio = statistics.median(columns[0]) / statistics.median(columns[1])
        print(f"{name:34}{shown[0]:>22}{shown[1]:>22}{ratio:>8.3f}")


if __name__ == "__main__":
    main()
