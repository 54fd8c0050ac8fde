"""Requests whose grammars are being built: the scheduler gets them when that is done, so no step waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from octavo.core.outputs import EngineOutput, EngineRequest


class GrammarWait:
    """``prepare`` begins to build a grammar; its future raises ``InvalidRequest`` for one of no use."""

    def __init__(self, prepare: Callable[[str], Future[Any]]) -> None:
        self._prepare = prepare
        self._held: list[tuple[list[EngineRequest], list[Future[Any]]]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def request_ids(self) -> list[str]:
        """Those that wait."""
        return [request.request_id for requests, _ in self._held for request in requests]

    def hold(self, requests: Sequence[EngineRequest]) -> bool:
        """Keep these, which belong together, until their grammars are built. False: they need not wait.

        Raises what is wrong with a grammar that is known already.
        """
        grammars = {one.sampling.grammar for one in requests} - {None}
        building = [self._prepare(grammar) for grammar in grammars if grammar is not None]
        for future in building:
            if future.done():
                future.result()
        waits = [future for future in building if not future.done()]
        if waits:
            self._held.append((list(requests), waits))
        return bool(waits)

    def ready(self) -> Iterator[tuple[list[EngineRequest], BaseException | None]]:
        """Those that wait no more, and why they cannot be served, if so."""
        for entry in list(self._held):
            requests, waits = entry
            if all(future.done() for future in waits):
                self._held.remove(entry)
                if requests:
                    yield requests, next((e for future in waits if (e := future.exception())), None)

    def abort(self, request_id: str) -> EngineOutput | None:
        """Drop one. None when it is not here."""
        for requests, _ in self._held:
            for request in requests:
                if request.request_id == request_id:
                    requests.remove(request)
                    return EngineOutput(request_id=request_id, token_ids=[], finish_reason="abort")
        return None

    def wait(self, timeout_s: float) -> None:
        """Return when a grammar is built, at the latest after so many seconds."""
        wait([future for _, waits in self._held for future in waits], timeout_s, FIRST_COMPLETED)
