"""Who runs a generation closes it, however its request ends; the same for every API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable

from starlette.responses import Response

from octavo.api.generation import Generation


@contextlib.asynccontextmanager
async def owned(generation: Generation) -> AsyncIterator[None]:
    """Closes the generation at the end of the block, whole or broken off."""
    try:
        yield
    finally:
        await generation.close()


async def answered(generation: Generation, answer: Awaitable[Response]) -> Response:
    """What ``answer`` comes to. Where the client leaves before (``ClientGone``), or it fails, the generation
    is closed; else the response owns it.
    """
    try:
        return await answer
    except BaseException:
        await generation.close()
        raise


def cached_tokens_comment(generation: Generation) -> bytes:
    """Tells a router how many tokens the cache held: it learns from that, and clients skip it."""
    return b": cached_tokens %d\n\n" % generation.cached_tokens
