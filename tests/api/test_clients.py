"""Our own clients on our own server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.client.batch import main as run_batch
from octavo.client.bench.cli import main as bench
from octavo.client.complete import main as complete


def test_bench_counts_tokens_by_their_ids_and_reports_cached_ones(fast: Any, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    sizes = ["--requests=3", "--turns=3", "--input-tokens=30", "--output-tokens=20"]
    assert bench(["serve", "multi-turn", f"--url={fast.url}", f"--json={out}", *sizes]) == 0
    found = json.loads(out.read_text())
    assert (found["requests"], found["output_tokens"]) == (9, 180)
    assert found["tokens_counted_by"] == {"token ids": 9}
    assert 0.3 < found["cached_share"] < 1  # the second and the third turn begin with what went before


def test_a_batch_and_a_completion(fast: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0}
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    )
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert run_batch([*files, f"--url={fast.url}"]) == 0
    response = json.loads((tmp_path / "out.jsonl").read_text())["response"]
    assert response["status_code"] == 200 and response["request_id"]
    capsys.readouterr()
    assert complete(["hello", f"--url={fast.url}", "--max-tokens=3", "--temperature=0"]) == 0
    assert capsys.readouterr().out == response["body"]["choices"][0]["text"] + "\n"
