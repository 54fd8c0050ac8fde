"""The engine's settings: one table for the command line, the offline API and the operator.

Each field of ``EngineConfig`` is a flag of ``octavo serve`` (``max_num_seqs`` is ``--max-num-seqs``) and a
keyword of ``LLM``. A setting whose feature is not built yet accepts only the value that means "off" and names
itself otherwise. This module imports no torch: the operator validates ``engine.args`` with it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from octavo.errors import ConfigError
from octavo.values import (
    json_fields,
    json_object,
    number,
    parse_max_model_len,
    parse_size,
    root_path,
    text_list,
    texts,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "int8")
DEVICES = ("auto", "cpu", "cuda")
SPECULATIVE_METHODS = ("ngram", "draft_model")
MAX_DRAFTS = 64  # tokens guessed at a time, or matched
POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("auto", "recompute", "swap")
TOOL_PARSERS = (
    "hermes", "llama3_json", "qwen3_xml", "qwen3_coder", "mistral", "pythonic", "deepseek_v3", "granite",
)  # fmt: skip
REASONING_PARSERS = ("qwen3", "deepseek_r1", "granite", "mistral")
HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead of the model; the names are vLLM's. Raises ``ConfigError``.

    ``method`` "ngram" takes what followed the last tokens where they occurred before, the longest match of
    ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens; "draft_model" asks the smaller ``model`` (a path or
    an address as ``octavo serve`` takes) of the same vocabulary.
    """

    num_speculative_tokens: int
    method: str = ""
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        method, model = self.method, self.model
        if model in ("ngram", "[ngram]"):
            method, model = method or "ngram", None
        method = method or ("draft_model" if model else "ngram")
        if method not in SPECULATIVE_METHODS:
            known = " or ".join(SPECULATIVE_METHODS)
            raise ConfigError(f"method {method!r} is not supported: choose {known}")
        if (method == "draft_model") != isinstance(model, str):
            raise ConfigError(
                f"model is {model!r} with the method {method!r}: a draft_model is a path or an address, "
                "ngram has none"
            )
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "model", model)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            low = self.prompt_lookup_min if name == "prompt_lookup_max" else 1
            object.__setattr__(self, name, number(name, getattr(self, name), True, low, MAX_DRAFTS))

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig | None:
        """From JSON, as the flag has it, or a dict; "none" is off."""
        if value == "none":
            return None
        if isinstance(value, SpeculativeConfig):
            return value
        fields = json_fields(cls, value)
        if "num_speculative_tokens" not in fields:
            raise ConfigError("num_speculative_tokens is missing: say how many tokens to guess at a time")
        return cls(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Where and how KV events are published; names are vLLM's. Raises ``ConfigError`` naming the field."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"  # or null: none
    endpoint: str | None = None  # None: port 5557 of the engine's host
    replay_endpoint: str | None = None  # None: port 5558 of the engine's host
    buffer_steps: int = 10_000  # batches kept for replays
    hwm: int = 100_000  # batches that may wait for one subscriber
    max_queue_size: int = 100_000  # batches that may wait to be sent
    topic: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if isinstance(field.default, int) and not isinstance(field.default, bool):
                number(field.name, value, True, 1, None)
            elif not isinstance(value, bool if kind is bool else str) and value != field.default:
                raise ConfigError(
                    f"{field.name} is {value!r}: it must be a {'flag' if kind is bool else 'text'}"
                )
        if self.publisher not in ("zmq", "null"):
            raise ConfigError(f"publisher is {self.publisher!r}: choose zmq or null")

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | KVEventsConfig) -> KVEventsConfig:
        """From JSON, as the flag has it, or a dict."""
        if isinstance(value, KVEventsConfig):
            return value
        return cls(**json_fields(cls, value))

    @property
    def on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def _setting(
    default: Any,
    help: str,
    *,
    parse: Callable[[Any], Any] | None = None,
    choices: Sequence[str] | None = None,
    off: tuple[Any, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    many: bool = False,
    metavar: str | None = None,
) -> Any:
    """A field with what its flag needs. ``off``: the only values accepted until the feature exists."""
    meta = {
        "help": help, "parse": parse, "choices": choices, "off": off, "low": low, "high": high, "many": many,
        "metavar": metavar,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=meta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine, validated on construction (``ConfigError``)."""

    model: str
    served_model_name: tuple[str, ...] = _setting((), "name clients send; repeat for aliases", many=True)
    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = _setting(8000, "public port", low=0, high=65535)
    private_port: int = _setting(8001, "port for the router and the operator", low=0, high=65535)
    device: str = _setting("auto", "where the model runs", choices=DEVICES)
    dtype: str = _setting(
        "auto", "type of weights and activations; auto: the checkpoint's (on a CPU, a GGUF file's quantised "
        "weights stay so)", choices=DTYPES,
    )  # fmt: skip
    gpu_memory_utilization: float = _setting(0.92, "share of GPU memory to use", low=0.01, high=1.0)
    kv_cache_memory_bytes: int | None = _setting(
        None,
        "size of the KV cache of each rank, e.g. 256Mi; default on CPU: a share of free memory",
        parse=parse_size,
    )
    kv_cache_dtype: str = _setting(
        "auto", "type of keys and values in the KV cache; auto: the model's; fp8 (that is fp8_e4m3) and int8 "
        "halve bfloat16's memory", choices=KV_CACHE_DTYPES,
    )  # fmt: skip
    swap_space: float | None = _setting(
        None, "GiB of host memory for preempted sequences; default: 4 with a GPU, else a quarter of the KV "
        "cache", parse=lambda value: number("swap-space", value, False, 0, None), metavar="GIB",
    )  # fmt: skip
    kv_offloading_gib: float = _setting(0.0, "GiB of host memory for cached blocks that are evicted", low=0)
    max_model_len: int | str | None = _setting(
        None, "longest prompt plus output; auto or -1: the longest that fits; default: the model's own",
        parse=parse_max_model_len, metavar="N|auto",
    )  # fmt: skip
    block_size: int = _setting(16, "tokens in a KV block", low=1, high=256)
    enable_prefix_caching: bool = _setting(True, "reuse the KV blocks of equal prefixes")
    prefix_caching_hash_algo: str = _setting("sha256", "hash of the prefix blocks", choices=HASH_ALGOS)
    prefix_caching_verify: bool = _setting(False, "compare tokens on a hit too, not only hashes; keeps them")
    enable_chunked_prefill: bool = _setting(True, "cut long prompts so that running streams keep their pace")
    max_num_seqs: int = _setting(256, "sequences in one step", low=1)
    max_num_batched_tokens: int = _setting(2048, "tokens in one step", low=1)
    scheduling_policy: str = _setting(
        "fcfs",
        "who enters first, and gives way last when blocks run out: by arrival, or by the requests' priority",
        choices=POLICIES,
    )
    long_prefill_token_threshold: int = _setting(
        0, "a prompt with more tokens left shares a step with others; 0: a quarter of a step", low=0
    )
    preemption_mode: str = _setting(
        "auto", "how a sequence gives up its blocks; auto: the cheaper way", choices=PREEMPTION_MODES
    )
    max_queue: int = _setting(1024, "requests that may wait; one more gets 429", low=1)
    max_queue_tokens: int = _setting(0, "tokens that may wait; 0: no limit but max-queue", low=0)
    enforce_eager: bool = _setting(
        False, "run each operation by itself: no CUDA graphs, on a CPU no recorded steps; slower, to look "
        "into the kernels",
    )  # fmt: skip
    async_scheduling: bool = _setting(True, "plan the next step while one runs")
    max_logprobs: int = _setting(
        20, "most logprobs, top_logprobs and prompt_logprobs of a request; -1: the vocabulary", low=-1
    )
    return_tokens_as_token_ids: bool = _setting(False, "name tokens of logprobs token_id:N in every answer")
    enable_force_include_usage: bool = _setting(False, "every stream ends with its usage, asked for or not")
    enable_request_id_headers: bool = _setting(True, "answers carry X-Request-Id")
    max_request_body: int = _setting(
        32 * 2**20, "largest body of a request, in bytes or as 32Mi", parse=parse_size, metavar="SIZE"
    )
    kv_events_config: KVEventsConfig | None = _setting(
        None, "publish KV events; JSON with vLLM's fields, {} for the defaults", parse=KVEventsConfig.of,
        metavar="JSON",
    )  # fmt: skip
    api_key: tuple[str, ...] = _setting((), "key clients must send; repeat for several", many=True)
    api_key_dir: str | None = _setting(None, "folder of files, each holding one API key (a mounted Secret)")
    api_key_file: str | None = _setting(
        None, "file of API keys, one a line; OCTAVO_API_KEY in the environment is one more"
    )
    root_path: str = _setting("", "prefix of every route behind a proxy, as /api", parse=root_path)
    allowed_origins: tuple[str, ...] = _setting(
        (), "web pages that may call (CORS); JSON list, or * for all; none without it", parse=text_list
    )
    allowed_methods: tuple[str, ...] = _setting(
        ("*",), "methods that allowed-origins may use; JSON list", parse=text_list
    )
    allowed_headers: tuple[str, ...] = _setting(
        ("*",), "headers that allowed-origins may send; JSON list", parse=text_list
    )
    allow_credentials: bool = _setting(False, "allowed-origins may send cookies and the like")
    ssl_keyfile: str | None = _setting(None, "key of ssl-certfile, where that does not hold it")
    ssl_certfile: str | None = _setting(
        None, "certificate of the public port: it speaks HTTPS; renewals are followed"
    )
    ssl_ca_certs: str | None = _setting(None, "certificates that clients' own are checked against")
    ssl_cert_reqs: int = _setting(0, "certificates of clients: 0 none, 1 optional, 2 required", low=0, high=2)
    api_server_count: int = _setting(1, "API processes before the engine, all on the public port", low=1)
    drain_grace_s: float = _setting(5.0, "seconds after SIGTERM in which new requests are still taken", low=0)
    drain_timeout_s: float = _setting(60.0, "seconds after SIGTERM until running streams are cut", low=0)
    default_chat_template_kwargs: dict[str, Any] | None = _setting(
        None, "JSON passed to the chat template unless the request says otherwise", parse=json_object,
        metavar="JSON",
    )  # fmt: skip
    chat_template: str | None = _setting(None, "a file, or the template itself, in place of the model's own")
    chat_template_content_format: str = _setting(
        "auto", "how templates get contents: texts, or lists of parts; auto: as the template reads them",
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    trust_request_chat_template: bool = _setting(
        False, "take chat_template from requests; a template can use up time and memory"
    )
    enable_auto_tool_choice: bool = _setting(True, "let models decide to call tools")
    tool_call_parser: str = _setting(
        "auto", "format of tool calls; auto: by the chat template", choices=("auto", "none", *TOOL_PARSERS)
    )
    reasoning_parser: str = _setting(
        "auto", "splits reasoning from the answer; auto: by the chat template",
        choices=("auto", "none", *REASONING_PARSERS),
    )  # fmt: skip
    tensor_parallel_size: int = _setting(
        1, "ranks that share out each layer: GPUs, or on a CPU processes", low=1
    )
    pipeline_parallel_size: int = _setting(1, "pipeline parallel ranks", off=(1,))
    quantization: str | None = _setting(None, "quantisation of safetensors weights", off=("none",))
    speculative_config: SpeculativeConfig | None = _setting(
        None, "guess tokens ahead; JSON: num_speculative_tokens, and method ngram or a draft model",
        parse=SpeculativeConfig.of, metavar="JSON",
    )  # fmt: skip
    speculative_model: str | None = _setting(None, "the draft model (speculative-config says more)")
    num_speculative_tokens: int | None = _setting(None, "tokens speculative-model guesses at a time")
    uvicorn_log_level: str = _setting(
        "warning", "how much the HTTP server itself logs",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )  # fmt: skip
    access_log: bool = _setting(True, "one line of JSON for each request")
    enable_log_requests: bool = _setting(False, "log prompts and settings of requests (texts of users!)")
    otlp_traces_endpoint: str | None = _setting(
        None, "where OpenTelemetry traces go, as http://collector:4318/v1/traces; needs octavo[otel]"
    )
    log_level: str = _setting("info", "how much to log", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.metadata:
                object.__setattr__(self, field.name, _validated(field, getattr(self, field.name)))
        if not self.model:
            raise ConfigError("no model given: name a path, or a file://, package:// or hf:// address")
        if self.speculative_model is not None or self.num_speculative_tokens is not None:
            object.__setattr__(self, "speculative_config", self._older_speculation())
        self._check_http()
        length = self.max_model_len
        step = self.max_num_batched_tokens
        if not self.enable_chunked_prefill and isinstance(length, int) and length > step:
            raise ConfigError(
                f"max-num-batched-tokens is {step}, below max-model-len {length}: without chunked "
                "prefill a prompt must fit one step. Raise it, or leave chunked prefill on"
            )

    def _check_http(self) -> None:
        for needed, names in (
            ("allowed_origins", ("allowed_methods", "allowed_headers", "allow_credentials")),
            ("ssl_certfile", ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")),
            ("ssl_ca_certs", ("ssl_cert_reqs",)),
        ):
            for field in dataclasses.fields(self):
                if (
                    field.name in names
                    and getattr(self, field.name) != field.default
                    and not getattr(self, needed)
                ):
                    flag, other = field.name.replace("_", "-"), needed.replace("_", "-")
                    raise ConfigError(f"{flag} needs {other}: give both, or neither")

    def _older_speculation(self) -> SpeculativeConfig:
        model, tokens = self.speculative_model, self.num_speculative_tokens
        if model is None or tokens is None:
            raise ConfigError("speculative-model and num-speculative-tokens go together: give both")
        old = SpeculativeConfig(model=model, num_speculative_tokens=tokens)
        if self.speculative_config not in (None, old):
            raise ConfigError("speculative-config and speculative-model are both given: give one")
        return old

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may send, the main one first."""
        return self.served_model_name or (self.model.rstrip("/").rsplit("/", 1)[-1],)


def _validated(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value in its setting's own type, from a flag's text or a keyword's value; None is the default."""
    meta, flag = field.metadata, field.name.replace("_", "-")
    if value is None or value == field.default:
        return field.default
    if meta["off"] is not None:
        if str(value) in map(str, (field.default, *meta["off"])):
            return field.default
        allowed = " or ".join(str(v) for v in meta["off"])
        raise ConfigError(f"{flag} is {value!r}: not supported yet; leave it out or give {allowed}")
    if meta["many"]:
        return texts(flag, (value,) if isinstance(value, str) else value)
    if meta["parse"]:
        try:
            return meta["parse"](value)
        except ConfigError as error:
            if error.message.startswith(flag):
                raise
            raise ConfigError(f"{flag}: {error.message}") from error
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{flag} is {value!r}: choose one of {', '.join(meta['choices'])}")
    if isinstance(field.default, bool) and not isinstance(value, bool):
        raise ConfigError(f"{flag} is {value!r}: it must be True or False")
    if isinstance(field.default, (bool, str)) or field.default is None:
        return value
    return number(flag, value, isinstance(field.default, int), meta["low"], meta["high"])


class CommandParser(argparse.ArgumentParser):
    """Parses every subcommand: no abbreviations; a mistake is a ``ConfigError``, one line for the user."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (`{self.prog} --help` lists what is allowed)")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting (``model`` is positional and added by the caller)."""
    for field in dataclasses.fields(EngineConfig):
        meta = field.metadata
        if not meta:
            continue
        flag, default = "--" + field.name.replace("_", "-"), field.default
        shown = "" if default is None or default == () else f" (default: {default})"
        if isinstance(default, bool):
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
                help=meta["help"] + shown,
            )  # fmt: skip
            continue
        parser.add_argument(
            flag, action="append" if meta["many"] else "store", default=argparse.SUPPRESS,
            metavar=meta["metavar"] or field.name.rsplit("_", 1)[-1].upper(), help=meta["help"] + shown,
        )  # fmt: skip


def engine_config(model: str, args: Sequence[str] | Mapping[str, Any] = ()) -> EngineConfig:
    """Settings from flags (``["--block-size=16"]``) or from keywords (``{"block_size": 16}``).

    Raises ``ConfigError`` naming the flag, its value and what is allowed.
    """
    if isinstance(args, Mapping):
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(args) - known):
            raise ConfigError(f"unknown setting {unknown[0]!r}: known are {', '.join(sorted(known))}")
        return EngineConfig(model=model, **args)
    parser = CommandParser(prog="octavo serve", add_help=False)
    add_engine_flags(parser)
    return EngineConfig(model=model, **vars(parser.parse_args(list(args))))
