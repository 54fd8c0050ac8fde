"""The arrows of the house: who may import whom, read from the source."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPS = ("kernels", "server", "router", "operator")
HEAVY = {"torch", "transformers", "numpy", "safetensors", "triton"}  # hundreds of megabytes, or need them

# What the router and operator image holds.
LIGHT = (
    "octavo.core",
    "octavo.prompt",
    "octavo.config",
    "octavo.values",
    "octavo.fetch",
    "octavo.api_keys",
    "octavo.http_protocol",
    "octavo.client",
    "octavo_router",
    "octavo_operator",
)

# Room -> rooms of ours that it may import. A module of `octavo` outside a room (octavo.config) is its own.
BASE = {"octavo", "octavo.errors", "octavo.config", "octavo.values"}
CORE = BASE | {"octavo.core"}
PROMPT = CORE | {"octavo.prompt", "octavo.gguf_file"}
KERNELS = {"octavo_kernels"}
LAYERS = CORE | KERNELS | {"octavo.layers"}
MODELS = LAYERS | {"octavo.models", "octavo.gguf_file"}
# Grammars are built over the tokenizer; tensor parallel ranks are processes.
WORKER = MODELS | PROMPT | {"octavo.worker", "octavo.sampling", "octavo.child_process"}
ENGINE = WORKER | {"octavo.engine", "octavo.fetch", "octavo.importing", "octavo.speculative"}
MAY_IMPORT = {
    "octavo_kernels": KERNELS,
    "octavo.errors": set(),
    "octavo.config": {"octavo.errors", "octavo.values"},
    "octavo.values": {"octavo.errors"},
    "octavo.api_keys": {"octavo.errors"},
    "octavo.http_protocol": {"octavo.errors"},
    "octavo.fetch": {"octavo.config", "octavo.errors"},
    "octavo.gguf_file": {"octavo.errors"},
    "octavo.core": CORE,
    "octavo.prompt": PROMPT,
    "octavo.layers": LAYERS,
    "octavo.models": MODELS,
    "octavo.sampling": CORE | KERNELS | {"octavo.sampling"},
    "octavo.worker": WORKER | {"octavo.engine.executor"},  # the Protocol that it fulfils
    "octavo.speculative": CORE | {"octavo.speculative"},
    "octavo.engine": ENGINE,
    "octavo.llm": ENGINE | {"octavo.llm"},
    "octavo.api": ENGINE | {"octavo.api", "octavo.api_keys", "octavo.http_protocol"},
    "octavo.client": BASE | {"octavo.figures", "octavo.child_process", "octavo.client"},
    "octavo.figures": {"octavo.errors"},
    "octavo.child_process": set(),
    "octavo.importing": set(),
    "octavo.simulate": CORE | {"octavo.figures", "octavo.simulate"},
    "octavo.cli": {"octavo", "octavo.errors", "octavo.importing"},
    "octavo": {"octavo.core", "octavo.llm"},
    "octavo_router": PROMPT | {"octavo_router", "octavo.api_keys", "octavo.http_protocol"},
    "octavo_operator": {"octavo.errors", "octavo.config", "octavo.child_process", "octavo_operator"},
}


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of ours, by name."""
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = list(path.relative_to(ROOT / top).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file imports anywhere, but for what only the type checker sees."""
    tree = ast.parse(path.read_text())
    for node in [each for statement in tree.body for each in _at_run_time(statement)]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if _is_module(whole) else base), node.lineno


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _at_run_time(child)


def _is_module(name: str) -> bool:
    place = Path(*name.split("."))
    return any(
        (ROOT / top / place).is_dir() or (ROOT / top / place.with_suffix(".py")).is_file() for top in TOPS
    )


def room(module: str, rooms: set[str]) -> str:
    """The longest name in ``rooms`` that ``module`` is, or lies in."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in rooms), module)


def test_every_module_lies_in_a_room_with_rules() -> None:
    lost = [name for name, _ in sources() if room(name, set(MAY_IMPORT)) == "octavo" != name]
    assert lost == []


def test_arrows_run_one_way() -> None:
    wrong = []
    for name, path in sources():
        allowed = MAY_IMPORT[room(name, set(MAY_IMPORT))]
        for imported, line in imports(name, path):
            if imported.split(".")[0] not in ("octavo", "octavo_kernels", "octavo_router", "octavo_operator"):
                continue
            known = set(MAY_IMPORT) | allowed
            if room(imported, known) not in allowed | {room(name, known)}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert wrong == []


@pytest.mark.parametrize("light", LIGHT)
def test_light_rooms_name_no_heavy_library(light: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for name, path in sources()
        if room(name, {light}) == light
        for imported, line in imports(name, path)
        if imported.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_light_rooms_load_no_torch() -> None:
    """All modules of the rooms that the router and operator image holds, imported for real."""
    rooms = set(LIGHT)
    names = [name for name, _ in sources() if room(name, rooms) in rooms]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_top_folders_are_no_packages() -> None:
    """`operator/__init__.py` would shadow Python's own module."""
    assert [top for top in TOPS if (ROOT / top / "__init__.py").exists()] == []
