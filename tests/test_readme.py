"""Tests that README.md and ``docs/`` show what the tool prints today: ``make examples`` renews them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from PIL import Image

from nsys_analyzer import build_report, render, summarize
from nsys_analyzer.cli.main import cli
from tests.conftest import ROOT
from tests.renew_examples import DIGEST, EXAMPLE, FIRST_SCREEN, PAGES, README, output_of, renewed, said_first

EXAMPLES = [
    pytest.param(found, id=f"{path.name}: {found['command']}")
    for path in PAGES
    for found in EXAMPLE.finditer(path.read_text(encoding="utf-8"))
]
#: Pages that show no command line of ours.
WITHOUT_COMMANDS = ("architecture.md", "nsys_stats.md", "python.md")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that makes the pages from the code."""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_command_prints_what_the_page_shows(example: re.Match[str]) -> None:
    assert renewed(example) == example[0]


def test_what_is_left_out_of_an_output_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows the title, and two paragraphs from "Where" on; of the output now, one stands between them."""
    monkeypatch.setattr("tests.renew_examples.output_of", lambda _: "a title\n\nnew\n\nWhere now\n\nb\n\nc\n")
    shown = "```console\n$ nsys-analyze x\na name\n\n…\n\nWhere once\n\nB\n\n…\n```"
    (example,) = EXAMPLE.finditer(shown)
    assert renewed(example) == "```console\n$ nsys-analyze x\na title\n\n…\n\nWhere now\n\nb\n\n…\n```"


def test_another_program_is_not_run() -> None:
    with pytest.raises(ValueError, match="a page shows commands of nsys-analyze"):
        output_of("rm -r examples")


def test_the_readme_is_short_and_names_every_command() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert sorted(re.findall(r"^\| `nsys-analyze ([\w-]+)` \|", text, re.MULTILINE)) == sorted(cli.list_commands(None))


def test_every_page_is_linked_and_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f"](docs/{page.name})" in README.read_text(encoding="utf-8")
        assert f": docs/{page.name}\n" in menu


def test_the_picture_shows_what_the_readme_says() -> None:
    """It is of the same run, drawn when the first screen said the same."""
    with Image.open(FIRST_SCREEN) as picture:
        assert picture.info[DIGEST] == said_first()
        assert picture.size == (1280, 800)
    assert FIRST_SCREEN.stat().st_size < 150_000


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: str(path.name))
def test_a_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", aim.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.name))
def test_a_command_line_on_a_page_has_options_that_there_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:\$ )?nsys-analyze ([^\n]+)$|`nsys-analyze ([^`\n]+)`", text, re.MULTILINE)
    assert lines or page.name in WITHOUT_COMMANDS
    for line in map("".join, lines):
        words = list(itertools.takewhile(lambda word: word != "--", line.partition("  #")[0].split()))
        if words[0] in ("COMMAND", "--help"):
            continue
        command: click.Command = cli
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z]+(-[a-z]+)*", words[0]):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, line
            command = found
        known = {
            option
            for one in command.get_params(click.Context(command, **cli.context_settings))
            for option in (*one.opts, *one.secondary_opts)
        }
        assert {
            word.rstrip(".").partition("=")[0] for word in words if word.startswith("-") and word != "-"
        } <= known, line


def test_what_is_made_from_the_code_is_current(reference: ModuleType) -> None:
    for path, text in reference.pages().items():
        assert path.read_text(encoding="utf-8") == text, "python docs/make_reference.py"


def test_the_schema_has_every_key_of_a_report(reference: ModuleType, real_capture: Callable[[str], Path]) -> None:
    schema = reference.schema()
    document = json.loads(render(build_report(summarize(real_capture("train_small256"))), "json"))
    assert unknown(document, schema, schema["$defs"]) == []
    document["captures"][0]["findings"][0]["other"] = 1
    assert unknown(document, schema, schema["$defs"]) == ["captures.findings.other"]


def unknown(value: Any, schema: dict[str, Any], types: dict[str, Any], path: str = "") -> list[str]:
    """The keys of a document that its schema does not declare, and those that it requires and that are missing."""
    if "$ref" in schema:
        schema = types[schema["$ref"].rpartition("/")[2]]
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    if len(kinds) == 1 and kinds[0] is not schema:
        return unknown(value, kinds[0], types, path)
    if isinstance(value, list):
        return [key for one in value for key in unknown(one, schema.get("items") or {}, types, path)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    declared = schema["properties"]
    wrong = {*value.keys() - declared.keys(), *set(schema.get("required", ())) - value.keys()}
    inner = [key for name in value.keys() & declared.keys() for key in unknown(
        value[name], declared[name], types, f"{path}{name}."
    )]  # fmt: skip
    return [*(f"{path}{name}" for name in sorted(wrong)), *inner]
