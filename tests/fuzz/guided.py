"""Coverage-guided runs of the loader and of the converter: ``python -m tests.fuzz.guided converter --seconds 600``.

atheris (libFuzzer) changes the bytes of small inputs and keeps those that reach new lines. Whatever ends in another
exception than the package's own is a finding; libFuzzer leaves its input in the working folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["nsys_analyzer"]):
    from nsys_analyzer.analysis.summary.summarize import summarize
    from nsys_analyzer.trace.kineto import read_tables
    from nsys_analyzer.trace.trace import Trace

from nsys_analyzer.errors import NsysAnalyzerError
from tests.support.export import Export, training_step
from tests.support.kineto import Kineto

_LONGEST = 1 << 17


def _loader(folder: Path) -> tuple[Callable[[bytes], None], bytes]:
    """Reads an export and summarizes it; the input to start from."""
    path = folder / "t.sqlite"

    def load(content: bytes) -> None:
        path.write_bytes(content)
        summarize(Trace.load(path), "t")

    return load, training_step(Export().gpu()).write(folder / "seed.sqlite").read_bytes()


def _converter(folder: Path) -> tuple[Callable[[bytes], None], bytes]:
    """Reads a trace of PyTorch's profiler; the input to start from."""
    path = folder / "t.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_tables(path)

    recorded = Kineto().gpu().range("forward", 0, 100).operator("aten::mm", 5, 20).thread(500, "thread 500 (python3)")
    recorded.launch(1, 10).kernel("ampere_sgemm_128x64_tn", 1, 20, 30).launch(2, 40).copy("Memcpy HtoD", 2, 60, 5, 64)
    recorded.memory(512, 30, 0, 1024)
    return read, json.dumps({**recorded.properties, "traceEvents": recorded.events}).encode()


TARGETS = {"loader": _loader, "converter": _converter}


def main() -> None:
    """Runs one target for some seconds; the exit code is libFuzzer's, 0 where nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided")
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        corpus.mkdir()
        use, seed = TARGETS[given.target](folder)
        (corpus / "seed").write_bytes(seed)

        def one_input(content: bytes) -> None:
            try:
                use(content)
            except NsysAnalyzerError:
                return  # what a broken input deserves

        options = [
            f"-max_total_time={given.seconds}",
            f"-seed={given.seed}",
            f"-max_len={_LONGEST}",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=3000", "-timeout=60", str(corpus)], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
