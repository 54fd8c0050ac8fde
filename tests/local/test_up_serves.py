"""`octavo up` with real engines, the real router and the example's real model."""

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
import yaml
from local.watched_up import Up, alive, until

EXAMPLE = Path(__file__).parents[2] / "manifests/examples/smollm2.yaml"
START_S = 300  # two engines loading on a machine that does other things too

Started = Callable[..., Up]


@pytest.fixture
def example(tmp_path: Path) -> Callable[..., Path]:
    """Write the example manifest with other replicas or flags."""

    def write(replicas: int, **engine: object) -> Path:
        body = yaml.safe_load(EXAMPLE.read_text())
        body["spec"]["replicas"] = replicas
        body["spec"]["engine"].update({"kvCacheMemory": "64Mi", **engine})
        fresh, path = tmp_path / "new.yaml", tmp_path / "smollm2.yaml"
        fresh.write_text(yaml.safe_dump(body))
        return fresh.replace(path)

    return write


def test_the_example_manifest_answers_once_and_leaves_nothing(started: Started) -> None:
    up = started("-f", str(EXAMPLE), "--once", real=True)
    up.line("starting on", START_S)
    below = up.children()
    rest = "\n".join(up.rest(START_S))
    assert up.process.returncode == 0, rest
    for stage in ("loading weights", "sizing the cache", "warming", "ready"):
        assert f"smollm2-engine-0: {stage}" in rest and f"smollm2-engine-1: {stage}" in rest
    assert "Paris" in rest and "time to first token" in rest
    assert alive(below) == []


def test_a_service_lives_through_edits_and_ctrl_c_ends_it_all(started: Started, example: Callable) -> None:
    manifest = example(2)
    up = started("-f", str(manifest), real=True, cores=1)
    up.line("serving until Ctrl-C", START_S)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{up.port}/v1", api_key="none", timeout=120) as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]

        def ask() -> str:
            message = {"role": "user", "content": "Say hello."}
            answer = client.chat.completions.create(model="smollm2", messages=[message], max_tokens=4)
            return answer.choices[0].message.content or ""

        example(3)
        up.line("smollm2-engine-2: ready", START_S)
        assert ask()
        example(1)
        up.line("smollm2-engine-[12]: gone", START_S)
        up.line("smollm2-engine-[12]: gone", START_S)
        assert up.names() == ["smollm2-engine-0"]
        assert ask()
        example(1, maxModelLen=10**7)
        up.line("smollm2-engine-3: .*max-model-len", START_S)
        assert ask()
    below = up.children()
    assert up.interrupt() == 0
    assert alive(below) == []


def test_others_lack_the_private_key_and_nothing_is_left_when_up_is_killed(
    started: Started, example: Callable
) -> None:
    up = started("-f", str(example(1)), real=True)
    up.line("serving until Ctrl-C", START_S)
    below = up.children()
    assert len(below) >= 3  # the router, the API process and its engine
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{up.endpoints()[0]['private_url']}/server_info", timeout=10)
    up.process.kill()
    until(lambda: not alive(below))
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{up.port}/live", timeout=5)
