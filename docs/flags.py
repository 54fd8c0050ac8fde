"""Write docs/flags.md from the engine's settings: `python docs/flags.py > docs/flags.md`. A test compares."""

import dataclasses

from octavo.config import EngineConfig

HEAD = """# Flags of `octavo serve`

Each is also a keyword of `LLM(...)` (`--max-num-seqs` is `max_num_seqs`) and, where the `InferenceService`
has no field for it, may stand in `spec.engine.args`. Written by `docs/flags.py` from `octavo.config`.

| flag | default | values | meaning |
|---|---|---|---|
"""


def table() -> str:
    """The whole page."""
    return HEAD + "".join(_row(field) for field in dataclasses.fields(EngineConfig) if field.metadata)


def _row(field: dataclasses.Field) -> str:
    name = field.name.replace("_", "-")
    flag = f"--[no-]{name}" if isinstance(field.default, bool) else f"--{name}"
    cells = (f"`{flag}`", _default(field.default), _values(field), field.metadata["help"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(value: object) -> str:
    if value is None or value == ():
        return ""
    return "on" if value is True else "off" if value is False else f"`{value}`"


def _values(field: dataclasses.Field) -> str:
    meta = field.metadata
    if meta["off"] is not None:
        return f"only {' or '.join(f'`{value}`' for value in meta['off'])} yet"
    if meta["choices"]:
        return ", ".join(f"`{value}`" for value in meta["choices"])
    if meta["low"] is not None and meta["high"] is not None:
        return f"{meta['low']} to {meta['high']}"
    if meta["low"] is not None:
        return f"{meta['low']} or more"
    if isinstance(field.default, bool):
        return ""
    return f"`{meta['metavar']}`" if meta["metavar"] else "several" if meta["many"] else ""


if __name__ == "__main__":
    print(table(), end="")
