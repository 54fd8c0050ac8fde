"""What the documents say is so."""

import re
import runpy
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_table_of_flags_is_that_of_the_engine() -> None:
    written = (ROOT / "docs/flags.md").read_text()
    assert written == runpy.run_path(str(ROOT / "docs/flags.py"))["table"](), (
        "python docs/flags.py > docs/flags.md"
    )


def test_the_table_of_routes_is_that_of_the_engine_and_of_the_router() -> None:
    from octavo.api.messages_routes import messages_routes
    from octavo.api.openai_routes import openai_routes
    from octavo.api.openapi import openapi_document, openapi_routes
    from octavo.api.page import page_routes
    from octavo.api.private_routes import private_routes
    from octavo.api.probes import probe_routes
    from octavo.api.responses_routes import responses_routes
    from octavo.api.service import Service
    from octavo.api.tokenize_routes import tokenize_routes
    from octavo.config import engine_config
    from octavo_router.proxy import ROUTES

    service = Service(engine_config("/model"), None)
    public = (openai_routes, responses_routes, messages_routes, tokenize_routes, probe_routes)
    routers = [routes(service) for routes in public]
    routers += [page_routes(), openapi_routes(service.config)]
    described = {route.path.replace(":path", "") for router in routers for route in router.routes}
    assert set(openapi_document(["m"])["paths"]) == described
    routers.append(private_routes(service, lambda: None))
    built = {route.path.replace(":path", "") for router in routers for route in router.routes}
    rows = [
        line.split("|")[1] for line in (ROOT / "docs/routes.md").read_text().splitlines() if "| `" in line
    ]
    written = {path for row in rows for path in re.findall(r"(/[\w/{}.]*)", row)}
    assert written == built
    assert {route.path for route in ROUTES} <= written


def test_the_table_of_fields_is_that_of_the_engine() -> None:
    from octavo.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, REFUSED_FIELDS

    rows = [
        line.split("|")[1] for line in (ROOT / "docs/fields.md").read_text().splitlines() if "| `" in line
    ]
    written = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(written) == len(set(written))
    assert set(written) == (CHAT_FIELDS | COMPLETION_FIELDS) - REFUSED_FIELDS


def test_the_table_of_the_routers_metrics_is_that_of_the_router() -> None:
    from octavo_router.index import PrefixIndex
    from octavo_router.metrics import Metrics

    shown = text_string_to_metric_families(Metrics(PrefixIndex(1024)).render().decode())
    page = (ROOT / "docs/metrics.md").read_text().partition("## The router")[2]
    written = re.findall(r"^\| `(octavo_router:\w+)` \| (\w+) \|", page, re.MULTILINE)
    exported = [(one.name, one.type) for one in shown if not one.name.endswith("_created")]
    assert sorted(written) == sorted(exported)


def test_the_formats_of_calls_are_known_by_the_marks_that_the_page_names() -> None:
    from octavo.prompt.tools.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format

    tools, reasoning = (ROOT / "docs/tool-calls.md").read_text().split("| reasoning parser |")
    for text, formats, pick in (
        (tools, TOOL_FORMATS, tool_format),
        (reasoning, REASONING_FORMATS, reasoning_format),
    ):
        rows = re.findall(r"^\| `(\w+)` \| (.*?) (?<!\\)\|", text, re.MULTILINE)
        picked = {name: pick("auto", marks.replace("\\", "")) for name, marks in rows}
        assert all(form is not None and form.name == name for name, form in picked.items())
        assert formats.keys() - picked.keys() <= {"qwen3_coder"}


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
