from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.core.outputs import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import EngineClient
from octavo.engine.launch import start_engine


@pytest.fixture
def run():
    """Run a coroutine to its end, in at most 30 s."""
    return lambda coroutine: asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.fixture
def engine(monkeypatch):
    """``async with engine("paced") as client``: a client of a real engine process with a fake executor."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")

    @contextlib.asynccontextmanager
    async def start(name="fast", *, wait=True, stall_s=10.0, end_stalled_s=30.0, **settings):
        process = start_engine(f"fake_executor:{name}")
        client = EngineClient(process, stall_s=stall_s, end_stalled_s=end_stalled_s)
        config = EngineConfig(model="file:///nowhere", **settings)
        await client.start(config, model_path=Path("/nowhere"))
        try:
            if wait:
                await client.wait_ready()
            yield client
        finally:
            await client.close()

    return start


@pytest.fixture
def request_of():
    """Build a request of n prompt tokens that runs ``max_tokens`` long."""

    def build(name, prompt=(1, 2, 3), max_tokens=5, **fields):
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(request_id=name, prompt_token_ids=list(prompt), sampling=sampling, **fields)

    return build
