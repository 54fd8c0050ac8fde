"""The description of the API is true: schemathesis drives the server with what it allows and what it forbids,
and finds no fault of ours and no answer that is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, REFUSED_FIELDS
from octavo.api.openapi import openapi_document

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
document = openapi_document(["tiny", "alias"])
schema = schemathesis.openapi.from_dict(document)


@pytest.fixture(scope="module")
def sound(serve: Any) -> Iterator[Any]:
    with serve("sound", max_model_len=96, max_num_seqs=16) as running:
        yield running


@schema.parametrize()
@settings(
    max_examples=30, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
def test_nothing_fails_and_every_answer_is_described(case: Any, sound: Any) -> None:
    case.call_and_validate(base_url=sound.url, checks=CHECKS)


def test_it_is_served_and_has_every_field(sound: Any) -> None:
    assert sound.get("/openapi.json").json() == document
    for name, fields in (("ChatRequest", CHAT_FIELDS), ("CompletionRequest", COMPLETION_FIELDS)):
        assert set(document["components"]["schemas"][name]["properties"]) == fields - REFUSED_FIELDS
    assert sound.metric("octavo:internal_errors_total") == 0
