"""Requests that fail alone: by a fault of their row, or by settings that leave nothing to draw."""

from __future__ import annotations

from typing import Any

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_fault_of_one_row_ends_that_request_alone(fast: Any) -> None:
    before = fast.metric("octavo:internal_errors_total")
    failing = {"model": "tiny", "prompt": [300, 5, 6], "max_tokens": 3}
    assert "NaN" in error_of(fast.post("/v1/completions", failing), 500)["message"]
    events = fast.post("/v1/completions", {**failing, "stream": True})
    assert events.status_code in (200, 500)
    assert fast.metric("octavo:internal_errors_total") == before + 2
    assert fast.metric("vllm:request_success_total", finished_reason="error") >= 2
    assert fast.post("/v1/completions", COMPLETION).status_code == 200


def test_settings_that_leave_no_token_are_a_bad_request_and_no_fault(fast: Any) -> None:
    before = fast.metric("octavo:internal_errors_total"), fast.metric("octavo:row_faults_total")
    error = error_of(fast.post("/v1/completions", {**COMPLETION, "prompt": [303, 5]}), 400)
    assert error["code"] == "invalid_value" and "no token to draw" in error["message"]
    assert fast.post("/v1/completions", COMPLETION).status_code == 200
    assert (fast.metric("octavo:internal_errors_total"), fast.metric("octavo:row_faults_total")) == before
