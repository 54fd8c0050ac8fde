"""Requests with a grammar enter the scheduler once it is built, and never hold up the others."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import pytest
from engine.fake_executor import CountingExecutor

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.errors import InvalidRequest


class Building(CountingExecutor):
    """Grammars are built when the test says so."""

    def __init__(self, config):
        super().__init__(config)
        self.futures = {}

    def prepare(self, grammar):
        return self.futures.setdefault(grammar, Future())


@pytest.fixture
def executor():
    return Building(EngineConfig(model="x"))


@pytest.fixture
def core(executor):
    return EngineCore(EngineConfig(model="x"), executor)


@pytest.fixture
def with_grammar(request_of):
    def build(name, grammar):
        request = request_of(name)
        sampling = msgspec.structs.replace(request.sampling, ignore_eos=False, grammar=grammar)
        return msgspec.structs.replace(request, sampling=sampling)

    return build


def steps(core, count):
    return [output for _ in range(count) for output in core.step()]


def test_others_run_while_a_grammar_is_built(core, executor, request_of, with_grammar) -> None:
    core.add([with_grammar("waits", "g")])
    core.add([request_of("runs", max_tokens=3)])
    outputs = steps(core, 4)
    assert {output.request_id for output in outputs} == {"runs"}
    assert core.has_work
    executor.futures["g"].set_result(None)
    assert {output.request_id for output in steps(core, 6)} == {"waits"}
    assert not core.has_work


def test_a_built_grammar_lets_its_requests_in_at_once(core, executor, with_grammar) -> None:
    executor.prepare("g").set_result(None)
    core.add([with_grammar("a", "g"), with_grammar("b", "g")])
    assert {output.request_id for output in steps(core, 2)} == {"a", "b"}


def test_a_grammar_of_no_use_rejects_its_requests_together(core, executor, with_grammar) -> None:
    core.add([with_grammar("a", "bad"), with_grammar("b", "bad")])
    executor.futures["bad"].set_exception(InvalidRequest("no such rule", param="grammar"))
    assert core.step() == []
    ((names, error),) = core.take_rejected()
    assert (names, error.message) == (["a", "b"], "no such rule")
    assert not core.has_work and core.take_rejected() == []
    with pytest.raises(InvalidRequest, match="no such rule"):
        core.add([with_grammar("c", "bad")])


def test_what_waits_for_a_grammar_can_be_aborted(core, executor, with_grammar) -> None:
    core.add([with_grammar("a", "g"), with_grammar("b", "g")])
    core.abort(["a"])
    assert [(one.request_id, one.finish_reason) for one in core.step()] == [("a", "abort")]
    executor.futures["g"].set_result(None)
    assert {output.request_id for output in steps(core, 3)} == {"b"}
