"""What is needed to turn a request into tokens and tokens into text: read once, from a model folder or a GGUF
file.

The API process reads it from disk; a router gets the same bytes from an engine's private port. Both then
render with ``octavo.prompt.renderer``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.config import EngineConfig
from octavo.errors import ModelLoadError
from octavo.gguf_file import GGUFFile
from octavo.prompt.gguf_tokenizer import tokenizer_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_FORMAT = 2  # of ``to_bytes``; a reader refuses another
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # where the model names none: it reads any tokenizer.json


class PromptAssets(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenizer, chat template and the model's own defaults.

    ``special_tokens`` maps ``bos_token``, ``eos_token`` ... to their text, as chat templates expect them.
    ``vocab_size`` is the number of token ids that a prompt may hold. ``generation_config`` holds the model's
    own sampling defaults. ``content_format``: string, openai (a list of parts) or auto (what the template
    reads). ``request_templates``: requests may bring a template of their own. ``tokenizer_class``: the
    class of Hugging Face that reads the tokenizer, for clients.
    """

    tokenizer_json: str
    vocab_size: int
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    default_chat_template_kwargs: dict[str, Any] = {}
    generation_config: dict[str, Any] = {}
    content_format: Literal["auto", "string", "openai"] = "auto"
    request_templates: bool = False
    tokenizer_class: str = _TOKENIZER_CLASS
    format: int = _FORMAT

    @property
    def tokenizer_digest(self) -> str:
        """Equal for tokenizers that give equal ids."""
        return _digest(self.tokenizer_json)

    @property
    def template_digest(self) -> str:
        """Equal when chats render to the same text: template, special tokens and default arguments."""
        parts = [
            self.chat_template,
            self.special_tokens,
            self.default_chat_template_kwargs,
            self.content_format,
        ]
        return _digest(json.dumps(parts, sort_keys=True))

    def to_bytes(self) -> bytes:
        """For another process; ``from_bytes`` reads it."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PromptAssets:
        """Raises ``ModelLoadError`` when the bytes are of another format."""
        try:
            assets = msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"these are not prompt assets: {error}") from error
        if assets.format != _FORMAT:
            raise ModelLoadError(f"prompt assets are of format {assets.format}: this version reads {_FORMAT}")
        return assets


def load_assets(path: Path, config: EngineConfig | None = None) -> PromptAssets:
    """Read a Hugging Face folder (``tokenizer.json``), a GGUF file, or a folder that holds one GGUF file.

    Raises ``ModelLoadError`` naming the file that is missing or cannot be used.
    """
    assets = _read(path)
    if config is None:
        return assets
    return msgspec.structs.replace(
        assets,
        chat_template=_given_template(config.chat_template) or assets.chat_template,
        default_chat_template_kwargs=dict(config.default_chat_template_kwargs or {}),
        content_format=config.chat_template_content_format,
        request_templates=config.trust_request_chat_template,
    )


def _read(path: Path) -> PromptAssets:
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _from_folder(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelLoadError(
                f"{path} holds no tokenizer.json, and {len(files)} GGUF files: it must hold one or the other"
            )
        path = files[0]
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist: give a model folder or a GGUF file")
    return _from_gguf(path)


def _given_template(given: str | None) -> str | None:
    """The setting ``chat_template``: a file, or the template itself."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"chat-template is {given!r:.200}: neither a template nor a file that can be read ({error})"
        ) from error


def _from_gguf(path: Path) -> PromptAssets:
    with GGUFFile(path) as file:
        metadata = file.metadata
    text = tokenizer_json(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
    return PromptAssets(
        tokenizer_json=text,
        vocab_size=len(tokens),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: tokens[index] for name, index in named.items() if index is not None},
    )


def _from_folder(path: Path) -> PromptAssets:
    settings = _read_json(path / "tokenizer_config.json")
    model = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    special = {**_read_json(path / "special_tokens_map.json"), **settings}
    named = {name: _token_text(special[name]) for name in NAMED_TOKENS if special.get(name)}
    tokenizer = _read_json(path / "tokenizer.json")
    ids = _token_ids(tokenizer)
    tokenizer.update(truncation=None, padding=None)
    return PromptAssets(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        vocab_size=_vocab_size(model) or max(ids.values()) + 1,
        chat_template=_chat_template(path, settings),
        special_tokens=named,
        generation_config=generation,
        tokenizer_class=str(settings.get("tokenizer_class") or _TOKENIZER_CLASS),
    )


def _vocab_size(model: dict[str, Any]) -> int | None:
    size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The file beside the tokenizer, else the one inside its settings (of several named ones,
    ``default``).
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Every token of a ``tokenizer.json`` with its id."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # Unigram: pairs of token and score
        vocab = {pair[0]: index for index, pair in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}}


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
