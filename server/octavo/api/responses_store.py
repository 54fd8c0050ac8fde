"""Responses kept in memory, so that they can be read again and followed; the least recently used go first."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.errors import InvalidRequest, ResponseNotFound

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20  # of all responses with their conversations as JSON, each counted whole
_encoder = msgspec.json.Encoder()


@dataclasses.dataclass
class Kept:
    """A response. ``items``: the conversation up to its end. ``key`` names who made it. ``task`` computes it
    where it is in the background.
    """

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    key: str
    task: asyncio.Task[None] | None = None
    size: int = 0

    @property
    def running(self) -> bool:
        """Still in the background."""
        return self.task is not None and not self.task.done()


class ResponseStore:
    """By id. Each belongs to the key that made it; others do not find it."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str, key: str) -> Kept:
        """Raises ``ResponseNotFound``."""
        kept = self._kept.get(response_id)
        if kept is None or kept.key != key:
            raise ResponseNotFound(
                f"the response {response_id!r:.100} is not kept here: it was never stored, was deleted, or "
                f"made room for newer ones (of {self._max_responses} responses and {self._max_bytes} bytes)"
            )
        self._kept.move_to_end(response_id)
        return kept

    def items_before(self, response_id: str, key: str) -> Sequence[dict[str, Any]]:
        """The conversation that a next response goes on from. Raises ``InvalidRequest`` where there is none
        or it has not ended; clients know by the code of the first, OpenAI's, that they have to send it all.
        """
        try:
            kept = self.get(response_id, key)
        except ResponseNotFound as error:
            raise InvalidRequest(
                error.message, param="previous_response_id", code="previous_response_not_found"
            ) from error
        if kept.running:
            message = f"the response {response_id} is still in progress: wait for its end"
            raise InvalidRequest(message, param="previous_response_id")
        return kept.items

    def put(self, kept: Kept) -> None:
        self._kept[kept.response["id"]] = kept
        self.changed(kept)

    def changed(self, kept: Kept) -> None:
        """Count again what a response has become; no more where it was deleted meanwhile."""
        name = kept.response["id"]
        if self._kept.get(name) is not kept:
            return
        self.num_bytes -= kept.size
        kept.size = len(_encoder.encode([kept.response, kept.items]))
        self.num_bytes += kept.size
        self._kept.move_to_end(name)
        for old in list(self._kept):
            if len(self._kept) <= self._max_responses and self.num_bytes <= self._max_bytes:
                return
            if not self._kept[old].running:
                self._remove(old)

    def delete(self, response_id: str, key: str) -> None:
        """Raises ``ResponseNotFound``."""
        kept = self.get(response_id, key)
        if kept.task is not None:
            kept.task.cancel()
        self._remove(response_id)

    def _remove(self, name: str) -> None:
        self.num_bytes -= self._kept.pop(name).size
