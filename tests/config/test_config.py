"""The settings: flags and keywords mean the same, and what cannot be meant is refused by name."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig, engine_config
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-parallel-size=1", "--pipeline-parallel-size=1", "--quantization=none",
        "--speculative-config=none", "--reasoning-parser=none", "--kv-cache-dtype=auto",
    ],
)  # fmt: skip
def test_a_feature_to_come_takes_the_flag_that_leaves_it_off(flag: str) -> None:
    assert engine_config("m", [flag]) == EngineConfig(model="m")


@pytest.mark.parametrize("flag", ["--tensor-parallel-size=2", "--quantization=awq", "--kv-cache-dtype=fp8"])
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
