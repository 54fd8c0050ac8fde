"""The host tier: blocks come back as they were saved, in few copies, beside the steps."""

import threading

import pytest
import torch

from octavo.core.plan import Transfer, TransferDone
from octavo.worker.connector import HostConnector, NullConnector, runs


def cache_tensors(blocks: int = 8) -> list[torch.Tensor]:
    """Tensors of pages of different shapes and types, every page different."""
    return [
        torch.arange(blocks * 12, dtype=torch.float32).view(blocks, 3, 4),
        torch.arange(blocks * 5).view(blocks, 5),
        torch.arange(blocks * 6, dtype=torch.uint8).view(blocks, 2, 3).view(torch.float8_e4m3fn),
    ]


def finish(connector: HostConnector, count: int) -> list[TransferDone]:
    done: list[TransferDone] = []
    while len(done) < count:
        done += connector.finished(wait=True)
    return done


@pytest.mark.parametrize("long_run", [1, 8])
def test_blocks_come_back_as_they_were_saved_wherever_they_go(
    long_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.worker.connector.LONG_RUN", long_run)
    pages = cache_tensors()
    before = [tensor.clone() for tensor in pages]
    connector = HostConnector(pages, 4)
    connector.save(Transfer(1, False, [(2, 0), (3, 1), (7, 3)]))
    (saved,) = finish(connector, 1)
    assert saved.id == 1 and saved.seconds >= 0
    for tensor in pages:
        tensor.view(torch.uint8).zero_()
    connector.load(Transfer(2, True, [(5, 0), (0, 1), (1, 3)]))
    assert [done.id for done in finish(connector, 1)] == [2]
    for tensor, kept in zip(pages, before, strict=True):
        tensor, kept = tensor.view(torch.uint8), kept.view(torch.uint8)
        assert torch.equal(tensor[[5, 0, 1]], kept[[2, 3, 7]])
        assert not tensor[[2, 3, 4, 6, 7]].any()


def test_transfers_run_in_the_order_of_their_calls_and_end_once() -> None:
    pages = cache_tensors()
    connector = HostConnector(pages, 2)
    first = [tensor[1].clone() for tensor in pages]
    connector.save(Transfer(1, False, [(1, 0)]))
    connector.load(Transfer(2, True, [(6, 0)]))
    connector.save(Transfer(3, False, [(2, 1)]))
    assert sorted(done.id for done in finish(connector, 3)) == [1, 2, 3]
    assert all(
        torch.equal(tensor[6].float(), kept.float()) for tensor, kept in zip(pages, first, strict=True)
    )
    assert connector.finished(wait=True) == []


def test_who_does_not_wait_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    copy = HostConnector._copy_blocks
    monkeypatch.setattr(HostConnector, "_copy_blocks", lambda self, one: go.wait(30) and copy(self, one))
    connector = HostConnector(cache_tensors(), 2)
    connector.save(Transfer(1, False, [(1, 0)]))
    assert connector.finished(wait=False) == []
    go.set()
    assert [done.id for done in connector.finished(wait=True)] == [1]


def test_consecutive_blocks_are_one_copy() -> None:
    assert runs([(4, 1), (3, 0), (5, 2), (9, 3), (10, 5)]) == [(3, 0, 3), (9, 3, 1), (10, 5, 1)]
    assert runs([]) == []


def test_a_fault_in_a_copy_is_raised_to_the_step() -> None:
    connector = HostConnector(cache_tensors(), 2)
    connector.save(Transfer(1, False, [(1, 5)]))
    with pytest.raises((IndexError, RuntimeError)):
        connector.finished(wait=True)


def test_an_engine_without_host_memory_says_so() -> None:
    with pytest.raises(ValueError, match="no host tier"):
        NullConnector().save(Transfer(1, False, [(1, 0)]))
    assert NullConnector().finished(wait=True) == []
