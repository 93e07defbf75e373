"""Renews everything that the repository shows of reports: ``make examples``.

From committed captures, timings and rows, without a GPU: the report of one run with its figures, the picture of its
page's first screen, the reports of the sweep, of the experiments and of the programs, what explains the runs on several
GPUs, the page on planted faults and that of comparisons, and the output of every command that README.md and the pages
of ``docs/`` show.

A page shows a command as a block of the language ``console``: a line behind ``$``, and what it prints on a terminal of
80 columns. ``…`` stands for paragraphs that are left out. The commands run in a folder that holds ``examples/``, with
the captures unpacked.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, PngImagePlugin

from tests.conftest import ROOT
from tests.support.pages import View, browser, write_page

SWEEP, BENCHES, FAULTS, PROGRAMS, RANKS, SERVING = (
    ROOT / "examples" / name for name in ("sweep", "benches", "faults", "programs", "ranks", "serving")
)
#: What the captures of the server do not say.
SERVED = ("--model", "small", "--context-length", "1024")
RUN = SWEEP / "small_ctx256_train_fp32"
README = ROOT / "README.md"
#: The pages whose commands are run.
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
#: A command of a page, and what it prints.
EXAMPLE = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
LEFT_OUT = "…"
#: How well savings are predicted, its table in short, and the page that shows it, too.
ACCURACY, PREDICTIONS = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "predictions.md"
SHORT_TABLE = re.compile(r"\| pairs \| faults \|(?:[^\n]*\n)+?(?=\n)")
#: The page's first screen, which README.md shows, and the key in its metadata that holds the digest of what it says.
FIRST_SCREEN = ROOT / "examples" / "pages" / "first_screen.png"
DIGEST = "says-sha256"


def write_report(folder: Path) -> None:
    """Writes ``report.md`` of the run that lies in a folder."""
    shutil.rmtree(folder / "report_figures", ignore_errors=True)
    (folder / "report.md").unlink(missing_ok=True)
    _nsys_analyze(folder, "report", "capture.sqlite", "--csv", "timings.csv")


@functools.cache
def output_of(command: str) -> str:
    """What a command of a page prints, without spaces at the ends of lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (ROOT / "examples").rglob("*"):
            if path.is_file():
                shown = folder / path.relative_to(ROOT)
                shown.parent.mkdir(parents=True, exist_ok=True)
                shown.symlink_to(path)
        program, *arguments = shlex.split(command)
        if program != "nsys-analyze":
            raise ValueError(f"{command}: a page shows commands of nsys-analyze")
        for argument in arguments:
            packed = folder / f"{argument}.xz"
            if packed.exists():
                (folder / argument).write_bytes(lzma.decompress(packed.read_bytes()))
        printed = _python(folder, "-m", "nsys_analyzer", *arguments, errors=subprocess.STDOUT)
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


def stretches(output: str) -> Iterator[list[str]]:
    """The paragraphs of an example's output, a list for each stretch without a gap."""
    for stretch in re.split(rf"^{LEFT_OUT}$", output, flags=re.MULTILINE):
        if stretch.strip():
            yield stretch.strip("\n").split("\n\n")


def count_common_words(text: str, other: str) -> int:
    """The number of words with which both texts begin."""
    pairs = zip(text.split(), other.split(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def renewed(example: re.Match[str]) -> str:
    """An example with what its command prints now; each stretch begins with the same words, and is as long."""
    command, shown = example["command"], example["output"]
    printed = output_of(command).strip("\n").split("\n\n")
    if LEFT_OUT not in shown.splitlines():
        return f"```console\n$ {command}\n" + "\n\n".join(printed) + "\n```"
    kept, behind = [], 0
    for stretch in stretches(shown):
        word = stretch[0].split()[0]
        candidates = [i for i, block in enumerate(printed) if i >= behind and block.split()[:1] == [word]]
        if not candidates:
            raise ValueError(f"{command} prints no paragraph that begins with {word!r}")
        first = max(candidates, key=lambda i: count_common_words(printed[i], stretch[0]))
        if first > behind:
            kept.append(LEFT_OUT)
        behind = first + len(stretch)
        kept += printed[first:behind]
    if behind < len(printed):
        kept.append(LEFT_OUT)
    return f"```console\n$ {command}\n" + "\n\n".join(kept) + "\n```"


def write_captures_of(example: Path, path: Path, *options: str) -> None:
    """Writes the report of an example's captures, without figures."""
    with tempfile.TemporaryDirectory() as folder:
        _unpack(example, Path(folder))
        _nsys_analyze(Path(folder), "report", ".", "--no-figures", *options)
        path.write_bytes((Path(folder) / "report.md").read_bytes())


def write_ranks(path: Path) -> None:
    """Writes what ``explain`` says of the runs on several GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "captures").mkdir()
        _unpack(RANKS, Path(folder) / "captures")
        path.write_text(_nsys_analyze(Path(folder), "explain", "captures", "--format", "markdown"), encoding="utf-8")


def _unpack(example: Path, folder: Path) -> None:
    """The captures of an example, their manifests and timings."""
    for packed in (example / "captures").iterdir():
        if packed.suffix == ".xz":
            (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
        else:
            shutil.copy(packed, folder)


def write_accuracy(path: Path) -> str:
    """Writes the page on planted faults, and returns its summary."""
    return _python(ROOT, str(ROOT / "examples" / "accuracy.py"), str(path))


def said_first() -> str:
    """The digest of what README.md shows of the run: the picture of its page has it, too."""
    first = next(EXAMPLE.finditer(README.read_text(encoding="utf-8")))
    return hashlib.sha256(first["output"].encode()).hexdigest()


def draw_first_screen(picture: Path) -> None:
    """Draws the first screen of the run's page, 1,280 × 800 pixels, with the digest of what it says."""
    with tempfile.TemporaryDirectory() as folder, browser() as opened:
        page = Path(folder) / "report.html"
        write_page(page, RUN)
        view = View(opened, page, height=800)
        view.frames()
        drawn = view.page.screenshot()
    about = PngImagePlugin.PngInfo()
    about.add_text(DIGEST, said_first())
    Image.open(io.BytesIO(drawn)).quantize(128).save(picture, pnginfo=about, optimize=True)


def _nsys_analyze(folder: Path, *arguments: str) -> str:
    return _python(folder, "-m", "nsys_analyzer", *arguments)


def _python(folder: Path, *arguments: str, errors: int | None = None) -> str:
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, stderr=errors,
        encoding="utf-8",
    ).stdout  # fmt: skip


def main() -> None:
    """Renews the reports, the tables, the outputs on the pages, and the picture of the first screen."""
    write_report(RUN)
    page, count = SHORT_TABLE.subn(write_accuracy(ACCURACY), PREDICTIONS.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{PREDICTIONS} has {count} tables of planted faults, not one")
    PREDICTIONS.write_text(page, encoding="utf-8")
    _python(ROOT, str(ROOT / "examples" / "comparison.py"))
    write_captures_of(PROGRAMS, PROGRAMS / "report.md")
    write_captures_of(SERVING, SERVING / "report.md", *SERVED)
    write_ranks(RANKS / "explained.md")
    for folder in (SWEEP, BENCHES):
        shutil.rmtree(folder / "report_figures", ignore_errors=True)
        (folder / "report.md").unlink(missing_ok=True)
        _nsys_analyze(folder, "report", ".")
    renew_pages()


def renew_pages() -> None:
    """Renews what the commands of the pages print, and the picture of the first screen."""
    for path in PAGES:
        path.write_text(EXAMPLE.sub(renewed, path.read_text(encoding="utf-8")), encoding="utf-8")
    draw_first_screen(FIRST_SCREEN)


if __name__ == "__main__":
    renew_pages() if sys.argv[1:] == ["pages"] else main()
