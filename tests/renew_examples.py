"""Makes what the repository shows of reports anew: ``make examples``.

From committed captures, timings and rows, without a GPU: the report of one run with its figures and its picture, the
answers in README.md, which are of the same run, the report of the sweep and that of the experiments, the table of
planted faults and that of comparisons, and in README.md the faults in short, the findings of one, and a comparison. Of
the sweep's captures four are kept, and the timings of all. Of the programs without a range of their own the captures
are kept, and one report; of the runs on several GPUs the captures, and what explains them.

The picture needs ``markdown`` and ``pymupdf``, which ``make examples`` installs.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

from tests.conftest import ROOT

SWEEP, BENCHES, FAULTS, PROGRAMS, RANKS = (
    ROOT / "examples" / name for name in ("sweep", "benches", "faults", "programs", "ranks")
)
RUN = SWEEP / "small_ctx256_train_fp32"
README = ROOT / "README.md"
#: The answers of the run, as the terminal shows them, in README.md.
ANSWERS = re.compile(rf"(?<=```\n){RUN.name}\n.*?(?=```)", re.DOTALL)
#: The fault whose findings README.md shows, those findings, and the table of all faults in short.
FAULT = "item"
FINDINGS = re.compile(rf"(?<=```\n){FAULT}(?:\n|: A step takes).*?(?=```)", re.DOTALL)
SHORT_TABLE = re.compile(r"\| planted fault \|(?:[^\n]*\n)+?(?=\n)")
#: The program whose modules README.md shows, and their tree.
PROGRAM = "gpt2"
TREE = re.compile(rf"(?<=```\n)(?:{PROGRAM}: )?Of the kernel time.*?(?=```)", re.DOTALL)
#: The runs whose comparison README.md shows, of ``bench compile``, and its answer and first table.
BEFORE, AFTER = "small_ctx256_train_fp32", "small_ctx256_train_fp32_compile"
COMPARED = re.compile(rf"(?<=```\n)(?:{BEFORE} → [^\n]*: )?Faster: .*?(?=```)", re.DOTALL)
#: The run of which README.md shows who is late, and that.
LATE = "late_rank"
LATENESS = re.compile(rf"(?<=```\n){LATE} \(.*?(?=```)", re.DOTALL)
#: The key in the picture's metadata that holds the digest of the report which it shows.
DIGEST = "report-sha256"
_STYLE = """
    body { font-family: sans-serif; font-size: 11pt } code { font-family: monospace; font-size: 9pt }
    table { border-collapse: collapse } th, td { border: 1px solid #ccc; padding: 3px 8px }
    pre { background-color: #f3f3f3; font-size: 9pt }
"""


def write_report(folder: Path) -> str:
    """Writes ``report.md`` of the run that lies in a folder, and returns the answers that the terminal shows."""
    shutil.rmtree(folder / "report_figures", ignore_errors=True)
    (folder / "report.md").unlink(missing_ok=True)
    shown = _nsys_analyze(folder, "report", "capture.sqlite", "--csv", "timings.csv")
    answers = shown.partition("\n\n")[0]  # behind it stands the report's name
    return "".join(f"{line.rstrip()}\n" for line in answers.splitlines())


def explained(fault: str) -> str:
    """What ``explain`` says first of a fault's capture, down to the bar, and its first finding up to the remedy."""
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / f"{fault}.sqlite"
        capture.write_bytes(lzma.decompress((FAULTS / "captures" / f"{capture.name}.xz").read_bytes()))
        said = _nsys_analyze(Path(folder), "explain", capture.name)
    blocks = said.split("\n\n")
    finding = next(i for i, block in enumerate(blocks) if block.startswith("1. "))
    chosen = [*blocks[:4], *blocks[finding : finding + 3]]  # title, conditions, length, bar
    return "\n".join(line.rstrip() for line in "\n\n".join(chosen).splitlines()) + "\n"


def write_programs(path: Path) -> None:
    """Writes the report of the programs that were recorded as they are, without figures."""
    with tempfile.TemporaryDirectory() as folder:
        _unpack(PROGRAMS, Path(folder))
        _nsys_analyze(Path(folder), "report", ".", "--no-figures")
        path.write_bytes((Path(folder) / "report.md").read_bytes())


def tree() -> str:
    """What ``modules`` says of a program: the answer and the table."""
    with tempfile.TemporaryDirectory() as folder:
        _unpack(PROGRAMS, Path(folder))
        said = _nsys_analyze(Path(folder), "modules", f"{PROGRAM}.sqlite").split("\n\n")
    return "\n".join(line.rstrip() for line in "\n\n".join(said[1:3]).splitlines()) + "\n"


def compared() -> str:
    """What ``compare`` says first of the program before and after compiling, and what explains it."""
    said = _nsys_analyze(BENCHES / "compile" / "captures", "compare", BEFORE, AFTER).split("\n\n")
    return "\n".join(line.rstrip() for line in "\n\n".join(said[1:3]).splitlines()) + "\n"


def write_ranks(path: Path) -> str:
    """Writes what ``explain`` says of the runs on several GPUs; returns what it says of the one with a late rank."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "captures").mkdir()
        _unpack(RANKS, Path(folder) / "captures")
        path.write_text(_nsys_analyze(Path(folder), "explain", "captures", "--format", "markdown"), encoding="utf-8")
        late = [f"captures/{LATE}_rank{rank}.sqlite" for rank in range(2)]
        blocks = _nsys_analyze(Path(folder), "explain", *late).split("\n\n")
    first, losses = (
        next(i for i, block in enumerate(blocks) if block.startswith(start)) for start in (f"{LATE} (", "Where ")
    )
    return (
        "\n".join(line.rstrip() for line in "\n\n".join(blocks[i] for i in (first, first + 1, losses)).splitlines())
        + "\n"
    )


def _unpack(example: Path, folder: Path) -> None:
    """The captures of an example, their manifests and timings."""
    for packed in (example / "captures").iterdir():
        if packed.suffix == ".xz":
            (folder / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
        else:
            shutil.copy(packed, folder)


def write_table(path: Path) -> str:
    """Writes the table of planted faults, and returns it in short."""
    return _python(ROOT, str(ROOT / "examples" / "faults.py"), str(path))


def digest(report: Path) -> str:
    """The SHA-256 of a report, by which its picture knows it."""
    return hashlib.sha256(report.read_bytes()).hexdigest()


def draw(report: Path, picture: Path) -> None:
    """Draws the first page of a report, 880 × 1,000 pixels, with the report's digest in the metadata."""
    import markdown
    import pymupdf

    html = markdown.markdown(report.read_text(encoding="utf-8"), extensions=["tables", "fenced_code"])
    pages = io.BytesIO()
    story, writer = pymupdf.Story(html, user_css=_STYLE), pymupdf.DocumentWriter(pages)
    device = writer.begin_page(pymupdf.Rect(0, 0, 660, 750))
    story.place(pymupdf.Rect(16, 16, 644, 750))
    story.draw(device)
    writer.end_page()
    writer.close()
    drawn = pymupdf.open("pdf", pages.getvalue())[0].get_pixmap(dpi=96)
    about = PngImagePlugin.PngInfo()
    about.add_text(DIGEST, digest(report))
    Image.open(io.BytesIO(drawn.tobytes("png"))).quantize(64).save(picture, pnginfo=about, optimize=True)


def _nsys_analyze(folder: Path, *arguments: str) -> str:
    return _python(folder, "-m", "nsys_analyzer", *arguments)


def _python(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return done.stdout


def _put_into_readme(block: re.Pattern[str], text: str) -> None:
    changed, count = block.subn(lambda _: text, README.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{README} has {count} blocks that match {block.pattern!r}, not one")
    README.write_text(changed, encoding="utf-8")


def main() -> None:
    """Renews report, answers and picture of the run, the faults, and the reports of the sweep and the experiments."""
    _put_into_readme(ANSWERS, write_report(RUN))
    draw(RUN / "report.md", RUN / "report.png")
    _put_into_readme(SHORT_TABLE, write_table(FAULTS / "table.md"))
    _put_into_readme(FINDINGS, explained(FAULT))
    _put_into_readme(COMPARED, compared())
    _python(ROOT, str(ROOT / "examples" / "comparison.py"))
    write_programs(PROGRAMS / "report.md")
    _put_into_readme(TREE, tree())
    _put_into_readme(LATENESS, write_ranks(RANKS / "explained.md"))
    for folder in (SWEEP, BENCHES):
        shutil.rmtree(folder / "report_figures", ignore_errors=True)
        (folder / "report.md").unlink(missing_ok=True)
        _nsys_analyze(folder, "report", ".")


if __name__ == "__main__":
    main()
