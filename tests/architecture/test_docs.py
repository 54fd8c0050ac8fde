"""What the documents say is so."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_table_of_flags_is_that_of_the_engine() -> None:
    written = (ROOT / "docs/flags.md").read_text()
    assert written == runpy.run_path(str(ROOT / "docs/flags.py"))["table"](), (
        "python docs/flags.py > docs/flags.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    lost = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert lost == []


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / "README.md").read_text()))
    assert named and named <= targets


def test_manifests_of_the_readme_are_accepted() -> None:
    from octavo_operator.resource import load

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    resources = [block for block in blocks if "InferenceService" in block]
    assert resources
    for block in resources:
        assert load(block).name == yaml.safe_load(block)["metadata"]["name"]
