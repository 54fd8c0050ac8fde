"""What must not be in the source: stubs, promises, folders for everything, unreadably long files."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for top in ("kernels", "server", "router", "operator", "benchmarks", "tests")
    for suffix in ("*.py", "*.cpp", "*.h", "*.hpp")
    for path in sorted((ROOT / top).rglob(suffix))
    if path != Path(__file__)
]
LONGEST_FILE = 450  # lines; 400 is the aim
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common"}


def shown(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_nothing_is_left_to_do() -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [
        shown(path, number)
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    assert left == []


def test_nothing_is_a_stub() -> None:
    stubs = [
        shown(path, node.lineno)
        for path in SOURCES
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "NotImplementedError"
    ]
    assert stubs == []


def test_no_error_is_swallowed() -> None:
    swallowed = [
        shown(path, node.lineno)
        for path in SOURCES
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(each, ast.Pass) for each in node.body)
    ]
    assert swallowed == []


def test_a_module_is_named_for_what_it_holds() -> None:
    modules = [path for path in SOURCES if path.suffix == ".py"]
    assert [str(path) for path in modules if path.stem in VAGUE or path.parent.name in VAGUE] == []


def test_a_file_tells_one_story() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in SOURCES
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert long == {}
