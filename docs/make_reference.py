"""Writes the parts of the reference and of the page on JSON that come from the code, and the JSON Schema.

The text above the mark in a page is written by hand and stays as it is.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from nsys_analyzer.analysis.kernels.class_rules import CLASSES
from nsys_analyzer.analysis.ranks.run import ParallelRun
from nsys_analyzer.analysis.summary.summary import STATUSES, Summary
from nsys_analyzer.cli.main import cli
from nsys_analyzer.export import FORMATS
from nsys_analyzer.export.frame import OPERATION_COLUMNS
from nsys_analyzer.questions.ask import Answers, CannotAnswer
from nsys_analyzer.questions.claims import Claims
from nsys_analyzer.report.renderers import RENDERERS, json_comparison
from nsys_analyzer.report.renderers.json_report import GENERATOR, SCHEMA_VERSION

DOCS = Path(__file__).parent
MARK = "<!-- From here on written by docs/make_reference.py: make examples -->\n"
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
#: A width, in characters, at which no help text is cut.
WIDTH = 1000
#: The range of a number whose upper bound only means that it is a 32-bit integer.
LEAST = re.compile(r"(\d+)<=x<=2147483647")
#: A line of a docstring that describes attributes: their names, and what they are.
ATTRIBUTES = re.compile(r"((?:\w+, )*\w+): (.*)")


def main() -> None:
    """Writes the pages and the schema."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """Returns the whole text of each file, by its path."""
    made = {DOCS / "reference.md": reference(), DOCS / "json.md": json_types()}
    whole = {path: path.read_text(encoding="utf-8").partition(MARK)[0] + MARK + text for path, text in made.items()}
    schemas = {DOCS / "schema.json": schema(), DOCS / "answers.schema.json": schema_of_answers()}
    return {**whole, **{path: json.dumps(one, indent=1) + "\n" for path, one in schemas.items()}}


def reference() -> str:
    """Returns the commands with their options, the output formats, the columns and the kernel classes."""
    lines = [
        "",
        "## Commands",
        "",
        *commands(cli, click.Context(cli, info_name="nsys-analyze", **cli.context_settings), "###"),
    ]
    lines += ["## Output formats", ""]
    formats = [("report --format", name, f"`{one.file}`") for name, one in RENDERERS.items()]
    formats += [("export --format", name, f"the capture's name with `{one.suffix}`") for name, one in FORMATS.items()]
    lines += table(("option", "format", "file"), [(f"`{option}`", f"`{name}`", file) for option, name, file in formats])
    lines += ["## Columns of the table of GPU operations", ""]
    lines += ["The third column shows which of these columns `load(…).kernels` also has.", ""]
    columns = [
        (f"`{name}`", one.unit, "yes" if one.of_kernels else "", cell(one.doc))
        for name, one in OPERATION_COLUMNS.items()
    ]
    lines += table(("column", "unit", "of kernels", "meaning"), columns)
    lines += ["## Kernel classes", ""]
    lines += table(("class", "kernels"), [(name, cell(row.meaning)) for name, row in CLASSES.items()])
    return "\n".join(lines)


def commands(group: click.Group, parent: click.Context, heading: str) -> Iterator[str]:
    """Yields the lines of a section for each command of a group."""
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)
        yield from (f"{heading} {context.command_path}", "")
        usage = " ".join(command.collect_usage_pieces(context))
        yield from ("```sh", f"{context.command_path} {usage}", *examples(command), "```", "")
        yield from (cell(inspect.cleandoc(command.help or ""), keep_paragraphs=True), "")
        records = [one.get_help_record(context) for one in command.get_params(context)]
        options = [(f"`{shown}`".replace("|", "\\|"), cell(text)) for shown, text in filter(None, records)]
        yield from table(("option", "meaning"), [row for row in options if "--help" not in row[0]])
        if isinstance(command, click.Group):
            yield from commands(command, context, f"{heading}#")


def examples(command: click.Command) -> Iterator[str]:
    """Yields the example of a command's help."""
    if command.epilog:
        yield command.epilog.removeprefix("Example: ")


def json_types() -> str:
    """Returns the description of a comparison, and of every type in a report's JSON."""
    said = inspect.cleandoc(json_comparison.__doc__ or "")
    said = said[said.index("A comparison contains") :]
    lines = ["", said.replace("``", "`"), "", "## The types of a report", ""]
    names = field_names()
    for name, one in schema()["$defs"].items():
        first, meanings = described(one.get("description", ""))
        lines += [f"### {name}", "", *([first, ""] if first else [])]
        rows = [
            (f"`{key}`", type_of(kind), meanings.get(key) or meanings.get(names.get(name, {}).get(key, ""), ""))
            for key, kind in one.get("properties", {}).items()
        ]
        lines += table(("key", "type", "meaning"), rows)
    return "\n".join(lines)


def field_names() -> dict[str, dict[str, str]]:
    """Returns for each type the names of its fields by their keys in JSON."""
    structs = [*msgspec.Struct.__subclasses__()]
    for struct in structs:  # grows while it is read, so that it also has the subclasses of subclasses
        structs += struct.__subclasses__()
    return {
        struct.__name__: {field.encode_name: field.name for field in msgspec.structs.fields(struct)}
        for struct in structs
    }


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of a report."""
    (capture, run), types = msgspec.json.schema_components((Summary, ParallelRun), schema_hook=_text)
    of_run = types[run["$ref"].rpartition("/")[2]]["properties"]
    of_run["run_notes"]["items"] = {"type": "string"}  # JSON has the report's sentences instead of the notes
    del types["JoinNote"]
    whole = {
        "schema_version": {"const": SCHEMA_VERSION},
        "generator": {"const": GENERATOR},
        "captures": {"type": "array", "items": capture},
        "benches": {"type": "array", "items": {"type": "object"}},
        **of_run,
        "other_runs": {"type": "array", "items": run},
    }
    required = ["schema_version", "generator", "captures"]
    return {"$schema": SCHEMA, "type": "object", "properties": whole, "required": required, "$defs": types}


def schema_of_answers() -> dict[str, Any]:
    """Returns the JSON Schema of the answers of ``ask``, ``check`` and ``explain --budget``, and of missing answers."""
    kinds, types = msgspec.json.schema_components((Answers, Claims, CannotAnswer))
    cannot = {"type": "object", "properties": {"cannot_answer": kinds[2]}, "required": ["cannot_answer"]}
    return {"$schema": SCHEMA, "anyOf": [*kinds[:2], cannot], "$defs": types}


def _text(kind: type) -> dict[str, str]:
    """Returns the schema of text with spans, which JSON holds as a string."""
    if kind.__name__ not in ("Text", "StrOrText", "FactOrText"):
        raise NotImplementedError(kind)
    return {"type": "string"}


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the first paragraphs of a type's docstring, and the meaning of each attribute that it describes."""
    states = ", ".join(f"`{one}`" for one in STATUSES)
    docstring = re.sub(r"\bNone\b|``None``", "null", docstring).replace("``STATUSES``", states)
    text, _, attributes = inspect.cleandoc(docstring).partition("Raises:")[0].partition("Attributes:\n")
    if text.rstrip().endswith(")") and text.startswith(f"{text.partition('(')[0]}("):
        text = "" if " " not in text.partition("(")[0] else text  # the signature that a dataclass has without one
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(attributes).splitlines():
        if found := ATTRIBUTES.fullmatch(line):
            names = found[1].split(", ")
            meanings |= dict.fromkeys(names, cell(found[2]))
        else:
            meanings |= {name: f"{meanings[name]} {cell(line)}".strip() for name in names}
    return cell(text, keep_paragraphs=True), meanings


def type_of(kind: Mapping[str, Any]) -> str:
    """Returns the type of a key in words: a link to a type of this page, or a list, with or without null."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(map(type_of, kind["anyOf"]))
    if "enum" in kind:
        return " or ".join("null" if one is None else f'`"{one}"`' for one in kind["enum"])
    if kind.get("type") == "array":
        several = kind.get("prefixItems") or [kind.get("items") or {}]
        return f"list of {', '.join(dict.fromkeys(type_of(one) for one in several if one))}"
    if kind.get("type") == "object" and kind.get("additionalProperties"):
        return f"object of {type_of(kind['additionalProperties'])}"
    return str(kind.get("type", "any"))


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns a table of markdown; empty without rows."""
    if not rows:
        return []
    lines = (titles, tuple("---" for _ in titles), *rows)
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def cell(text: str, *, keep_paragraphs: bool = False) -> str:
    """Returns a text of a docstring or a help as markdown, in which characters that could be marks are escaped."""
    text = (
        LEAST.sub(r"x>=\1", text)
        .replace("\b", "")
        .replace("``", "`")
        .replace("<", "&lt;")
        .replace("*", "\\*")
        .replace("|", "\\|")
    )
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    return ("\n\n" if keep_paragraphs else " ").join(paragraphs).strip()


if __name__ == "__main__":
    main()
