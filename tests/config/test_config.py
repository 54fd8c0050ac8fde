"""The settings: flags and keywords mean the same, and what cannot be meant is refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from octavo.config import EngineConfig, engine_config
from octavo.errors import ConfigError


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size=1", "--quantization=none"])
def test_a_feature_to_come_takes_the_flag_that_leaves_it_off(flag: str) -> None:
    assert engine_config("m", [flag]) == EngineConfig(model="m")


@pytest.mark.parametrize("flag", ["--pipeline-parallel-size=2", "--quantization=awq"])
def test_a_feature_to_come_is_refused_by_name(flag: str) -> None:
    name, _, value = flag.removeprefix("--").partition("=")
    with pytest.raises(ConfigError, match=f"{name} is '{value}': not supported yet"):
        engine_config("m", [flag])


def test_none_is_the_default_and_flags_equal_keywords() -> None:
    assert engine_config("m", {"block_size": None, "dtype": None, "api_key": None}) == EngineConfig(model="m")
    flags = [
        "--block-size=32",
        "--no-enable-prefix-caching",
        "--max-model-len=-1",
        "--api-key=a",
        "--api-key=b",
    ]
    keywords = {
        "block_size": 32, "enable_prefix_caching": False, "max_model_len": "auto", "api_key": ["a", "b"],
    }  # fmt: skip
    assert engine_config("m", flags) == engine_config("m", keywords)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("block_size", 16.5, "whole number"),
        ("block_size", "16.5", "a number"),
        ("block_size", 0, "between 1 and 256"),
        ("block_size", "9" * 400, "a number"),
        ("gpu_memory_utilization", "nan", "finite number"),
        ("drain_timeout_s", float("inf"), "finite number"),
        ("enable_prefix_caching", "no", "True or False"),
        ("max_model_len", "²", "a number of tokens"),
        ("kv_cache_dtype", "fp8_e5m2", "choose one of auto, float32, .*fp8, fp8_e4m3, int8"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(setting: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError, match=setting.replace("_", "-") + " is .*" + allowed):
        engine_config("m", {setting: value})


@pytest.mark.parametrize("setting", ["api_key", "served_model_name"])
@pytest.mark.parametrize("value", ["", " ", ["one", ""], 5, [5]], ids=str)
def test_an_empty_key_or_name_is_refused(setting: str, value: object) -> None:
    """An empty key, as an unset variable gives one, would leave the server open."""
    with pytest.raises(ConfigError, match=setting.replace("_", "-") + " is "):
        engine_config("m", {setting: value})


@pytest.mark.parametrize("flag", ["--kv-cache-memory-bytes=lots", "--default-chat-template-kwargs={"])
def test_what_cannot_be_read_is_said_with_its_flag(flag: str) -> None:
    with pytest.raises(ConfigError, match="^" + flag.removeprefix("--").partition("=")[0]):
        engine_config("m", [flag])


def settings_again(config: EngineConfig) -> EngineConfig:
    """As the engine's process gets them."""
    return engine_config("m", {k: v for k, v in dataclasses.asdict(config).items() if k != "model"})


@pytest.mark.parametrize(
    ("given", "method", "model"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, "ngram", None),
        ({"model": "/draft", "num_speculative_tokens": "4"}, "draft_model", "/draft"),
        ({"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 7}, "ngram", None),
    ],
)
def test_speculation_is_asked_for_as_vllm_has_it(given: dict, method: str, model: str | None) -> None:
    config = engine_config("m", [f"--speculative-config={json.dumps(given)}"])
    assert config.speculative_config is not None
    assert (config.speculative_config.method, config.speculative_config.model) == (method, model)
    assert config == engine_config("m", {"speculative_config": given}) == settings_again(config)
    assert engine_config("m", ["--speculative-config=none"]) == EngineConfig(model="m")


def test_the_older_flags_of_speculation_mean_the_same() -> None:
    old = engine_config("m", ["--speculative-model=/draft", "--num-speculative-tokens=4"])
    new = {"model": "/draft", "num_speculative_tokens": 4}
    assert old.speculative_config == engine_config("m", {"speculative_config": new}).speculative_config
    assert settings_again(old) == old
    with pytest.raises(ConfigError, match="give both"):
        engine_config("m", ["--speculative-model=/draft"])
    with pytest.raises(ConfigError, match="give one"):
        engine_config(
            "m", {"speculative_model": "/a", "num_speculative_tokens": 4, "speculative_config": new}
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle", "num_speculative_tokens": 3}, "'eagle' is not supported: choose ngram or draft"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0: it must be between"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}, "prompt_lookup_max is 1"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model is None"),
        ({"num_speculative_tokens": 3, "quantization": "x"}, "unknown field 'quantization'"),
    ],
)
def test_speculation_that_cannot_be_is_refused_by_name(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculative-config: .*{message}"):
        engine_config("m", {"speculative_config": given})


def test_host_memory_is_given_in_gib() -> None:
    config = engine_config("m", ["--swap-space=0.5", "--kv-offloading-gib=2"])
    assert (config.swap_space, config.kv_offloading_gib) == (0.5, 2.0)
    assert settings_again(config) == config
    with pytest.raises(ConfigError, match="swap-space is '-1': it must be at least 0"):
        engine_config("m", ["--swap-space=-1"])
