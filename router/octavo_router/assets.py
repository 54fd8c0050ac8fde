"""Tokenizers and chat templates of the engines: fetched once per digest, built off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from octavo.core.block_hash import BlockHasher
from octavo.errors import OctavoError
from octavo.prompt.assets import PromptAssets
from octavo.prompt.renderer import PromptRenderer
from octavo_router.engine import Scheme
from octavo_router.prefix import Exact

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 30.0  # a tokenizer is some megabytes
RETRY_S = 5.0  # before assets that could not be loaded are asked for again
MAX_KEPT = 8  # schemes kept; a rolling update needs two per model


@dataclass
class _Entry:
    exact: Exact | None = None
    error: str = ""
    loud: bool = False
    task: asyncio.Task[None] | None = None
    retry_at: float = 0.0


def make_hasher(scheme: Scheme) -> BlockHasher:
    """The engine's hasher. Raises ``OctavoError`` when this router cannot compute the same hashes."""
    hasher = BlockHasher(scheme.hash, scheme.block_size)
    if scheme.root and hasher.root.hex() != scheme.root:
        raise OctavoError(
            f"the engines' hash root is {scheme.root}, ours for {scheme.hash} is {hasher.root.hex()}: "
            "engine and router are of versions that hash differently"
        )
    return hasher


class AssetStore:
    """``Exact`` per scheme, loaded from the engine that published it."""

    def __init__(
        self, session: aiohttp.ClientSession, headers: Mapping[str, str], on_change: Callable[[], None]
    ) -> None:
        """``on_change`` is called after each attempt to load."""
        self._session = session
        self._headers = headers
        self._on_change = on_change
        self._entries: dict[Scheme, _Entry] = {}
        self._renderers: dict[tuple[str, str], PromptRenderer] = {}

    def want(self, scheme: Scheme, private_url: str) -> None:
        """Start loading unless it is loaded, being loaded, or failed a moment ago."""
        entry = self._entries.pop(scheme, None) or _Entry()
        self._entries[scheme] = entry  # the most recently wanted is last
        if entry.exact is None and entry.task is None and time.monotonic() >= entry.retry_at:
            entry.task = asyncio.create_task(self._load(scheme, entry, private_url))
        if len(self._entries) > MAX_KEPT:
            oldest = next(iter(self._entries))
            if (task := self._entries.pop(oldest).task) is not None:
                task.cancel()
            self._drop_unused_renderers()

    def loading(self, scheme: Scheme) -> bool:
        """The first attempt has not ended yet."""
        entry = self._entries.get(scheme)
        return entry is None or (entry.exact is None and not entry.error)

    def exact(self, scheme: Scheme) -> tuple[Exact | None, str, bool]:
        """The loaded scheme, or why there is none, and whether that is a fault to be said loudly."""
        entry = self._entries.get(scheme)
        if entry is None or (entry.exact is None and not entry.error):
            return None, "the tokenizer and chat template are being loaded", False
        return entry.exact, "" if entry.exact else entry.error, entry.loud

    async def close(self) -> None:
        """Stop loading."""
        tasks = [e.task for e in self._entries.values() if e.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, scheme: Scheme, entry: _Entry, private_url: str) -> None:
        url = f"{private_url}/prompt_assets"
        try:
            hasher = make_hasher(scheme)
            renderer = self._renderers.get((scheme.tokenizer_digest, scheme.template_digest))
            if renderer is None:
                timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
                async with self._session.get(url, headers=self._headers, timeout=timeout) as response:
                    data = await response.read()
                    if response.status != 200:
                        raise OctavoError(f"{url} answered {response.status}")
                renderer = await asyncio.to_thread(_build, data, scheme)
                self._renderers[scheme.tokenizer_digest, scheme.template_digest] = renderer
            entry.exact, entry.error, entry.loud = Exact(renderer, hasher), "", False
        except (OctavoError, aiohttp.ClientError, OSError, TimeoutError) as error:
            entry.error = f"prompt assets cannot be used: {error or type(error).__name__}"
            entry.loud = True
            entry.retry_at = time.monotonic() + RETRY_S
        finally:
            entry.task = None
        self._on_change()

    def _drop_unused_renderers(self) -> None:
        used = {(s.tokenizer_digest, s.template_digest) for s in self._entries}
        self._renderers = {key: r for key, r in self._renderers.items() if key in used}


def _build(data: bytes, scheme: Scheme) -> PromptRenderer:
    """Runs on a thread: parsing a large vocabulary takes a part of a second."""
    assets = PromptAssets.from_bytes(data)
    if (assets.tokenizer_digest, assets.template_digest) != (scheme.tokenizer_digest, scheme.template_digest):
        raise OctavoError(
            f"they are {assets.tokenizer_digest} and {assets.template_digest}, the engine published "
            f"{scheme.tokenizer_digest} and {scheme.template_digest}"
        )
    return PromptRenderer(assets)
