"""One engine behind a pipe, for ``workloads.py``: runs in whichever interpreter has that engine.

    PYTHON benchmarks/workload_engine.py octavo|vllm MODEL MAX_MODEL_LEN MAX_NUM_SEQS CACHE_GIB

Answers each JSON line of standard input, a list of ``[prompt ids, output tokens]``, with a JSON line
``{"seconds": s, "tokens": n}``; the first line, ``{"ready": version}``, says that the model is loaded. The
prefix cache is emptied before each run. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Work = list[tuple[list[int], int]]
Run = Callable[[Work], int]


def octavo_engine(model: str, max_model_len: int, max_num_seqs: int, cache_gib: float) -> tuple[str, Run]:
    import octavo
    from octavo import LLM, SamplingParams

    llm = LLM(
        model=model,
        device="cpu",
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=int(cache_gib * 2**30),
    )

    def run(work: Work) -> int:
        llm.reset_prefix_cache()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in work]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return octavo.__version__, run


def vllm_engine(model: str, max_model_len: int, max_num_seqs: int, cache_gib: float) -> tuple[str, Run]:
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(cache_gib))))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )

    def run(work: Work) -> int:
        llm.reset_prefix_cache()
        params: Any = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in work
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return vllm.__version__, run


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, model, max_model_len, max_num_seqs, cache_gib = sys.argv[1:]
    make = {"octavo": octavo_engine, "vllm": vllm_engine}[kind]
    version, run = make(model, int(max_model_len), int(max_num_seqs), float(cache_gib))
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        began = time.perf_counter()
        tokens = run(work)
        answer = {"seconds": time.perf_counter() - began, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
