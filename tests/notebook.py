"""Writes docs/notebook.ipynb from code cells and their output on this machine: ``python -m tests.notebook``."""

import ast
import json
import lzma
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs/notebook.ipynb"
#: The captures of the notebook, by the name of each in ``tests/data``.
CAPTURES = {"train.sqlite": "train_small256", "graph.sqlite": "graphnode_small256"}
_INTRODUCTION = """# Captures in a notebook

`summarize`, `build_report` and `compare` answer with values that show themselves: as a line of text, and where the
notebook can, as the sections of the report, without scripts. Each cell here was executed on the captures that its
words name."""
#: A text above each cell, and its code.
CELLS = (
    (
        "What comes first of one capture:",
        'from nsys_analyzer import summarize\n\n(capture,) = summarize("train.sqlite")\ncapture',
    ),
    (
        "Its figures are attributes; a phase has the GPU's work in milliseconds:",
        "{phase.phase: round(phase.gpu_ms, 2) for phase in capture.phases}",
    ),
    (
        "The whole report, which `render` makes markdown, a page or JSON of:",
        "from nsys_analyzer import build_report, render\n\nreport = build_report([capture])\n"
        "len(report.sections), render(report).splitlines()[0]",
    ),
    (
        "The kernels as a DataFrame:",
        'from nsys_analyzer import load\n\nkernels = load("train.sqlite").kernels\n'
        'kernels.groupby("class")["duration_ns"].agg(["count", "sum"]).sort_values("sum", ascending=False).head(3)',
    ),
    (
        "What changed between two runs; the second replays each phase as a CUDA graph:",
        'from nsys_analyzer import compare\n\ncompare("train.sqlite", "graph.sqlite").compared[0]',
    ),
)


def outputs(cells: Sequence[str], folder: Path) -> Iterator[dict[str, str]]:
    """Executes code cells in order, in a folder with the captures; yields what each shows, as text and as HTML."""
    for name, stem in CAPTURES.items():
        (folder / name).write_bytes(lzma.decompress((ROOT / f"tests/data/{stem}.sqlite.xz").read_bytes()))
    known: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for cell in cells:
            *statements, last = ast.parse(cell).body
            assert isinstance(last, ast.Expr), "a cell ends with the value that it shows"
            exec(compile(ast.Module(statements, []), "cell", "exec"), known)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), known)
            html = {"text/html": value._repr_html_()} if hasattr(value, "_repr_html_") else {}
            yield {"text/plain": repr(value), **html}
    finally:
        os.chdir(before)


def _cell(number: int, code: str, shown: Mapping[str, str]) -> dict[str, Any]:
    data = {kind: text.splitlines(keepends=True) for kind, text in shown.items()}
    output = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
    lines = code.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": number, "metadata": {}, "source": lines, "outputs": [output]}


def _words(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def main() -> None:
    """Executes the cells and writes the notebook."""
    cells = [_words(_INTRODUCTION)]
    with tempfile.TemporaryDirectory() as folder:
        shown = outputs([code for _, code in CELLS], Path(folder))
        for number, ((text, code), output) in enumerate(zip(CELLS, shown, strict=True), 1):
            cells += [_words(text), _cell(number, code, output)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
