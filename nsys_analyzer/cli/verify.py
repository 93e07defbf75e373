"""``nsys-analyze verify``: measures whether a changed program is faster, and whether the prediction held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from nsys_analyzer import __version__
from nsys_analyzer.cli.help import CRITERIA, INPUT, OUTPUT, RECORDING, RUNNING, command, option
from nsys_analyzer.cli.options import PATH, tell
from nsys_analyzer.configuration import LEDGER
from nsys_analyzer.errors import NsysAnalyzerError

#: The exit status for each verdict. The statuses 1 and 2 stand for errors, as in every command.
STATUS_OF_VERDICT = {"faster": 0, "slower": 3, "not comparable": 4, "no change that can be told": 5}


@command(epilog="Example: nsys-analyze verify runs/train --before-commit HEAD~1 -- python train.py")
@click.argument("folder", type=PATH, metavar="BEFORE")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- PROGRAM ARGUMENTS...")
@option(
    INPUT, "--before", "old_command", metavar="COMMAND",
    help="The command line of the old program. Default: the command line in BEFORE, if it differs from PROGRAM.",
)  # fmt: skip
@option(
    INPUT, "--before-commit", "commit", metavar="REVISION",
    help="Run the old program from this commit, in a separate git worktree. Default: the commit in BEFORE, if the "
    "command line in BEFORE equals PROGRAM.",
)  # fmt: skip
@option(
    CRITERIA, "--finding", metavar="ID",
    help="The finding of BEFORE that the change should fix, such as host_sync. "
    "Default: the finding with the largest saving that PROGRAM no longer has.",
)  # fmt: skip
@option(
    RUNNING, "--time-limit", type=click.FloatRange(min=0, min_open=True), default=600.0,
    show_default=True, metavar="SECONDS",
    help="The time limit for all pairs of processes together.",
)  # fmt: skip
@option(
    RUNNING, "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800.0,
    show_default=True, metavar="SECONDS",
    help="The time limit for each pair of processes, and for the recording of PROGRAM.",
)  # fmt: skip
@option(
    RUNNING, "--warmup", type=click.IntRange(0), metavar="N",
    help="The number of warm-up steps of each process, which are not measured. Default: as for nsys-analyze run.",
)  # fmt: skip
@option(
    RECORDING, "--profiler", type=click.Choice(["nsys", "torch", "none"]),
    help="The profiler that records PROGRAM after the measurement. With none, PROGRAM is not recorded. Default: as for "
    "nsys-analyze run.",
)  # fmt: skip
@option(
    OUTPUT, "--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    default=Path("verified"), show_default=True,
    help="The folder for the capture of the new program, and for logs.",
)  # fmt: skip
@click.pass_context
def verify(
    ctx: click.Context, folder: Path, program: tuple[str, ...], old_command: str | None, commit: str | None,
    finding: str | None, time_limit: float, timeout: float, warmup: int | None, profiler: str | None, output_dir: Path,
) -> None:  # fmt: skip
    """Measures whether PROGRAM is faster than the program of BEFORE, and whether the prediction held.

    BEFORE is a folder that nsys-analyze run wrote. Pairs of processes, one process of each program, take turns without
    a profiler until the change is known or --time-limit is over. Then PROGRAM is recorded once. The interval of the
    change is valid although the result is checked after each pair. The result is added to .nsys-analyze/ledger.jsonl as
    a line.

    The exit status is 0 if PROGRAM is faster, 3 if it is slower, 4 if the programs are not comparable because their
    losses or batches differ, and 5 if no change was detected.
    """
    from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD
    from nsys_analyzer.analysis.comparison.pairs import compare_runs
    from nsys_analyzer.capture.plan import Recording, make_plan
    from nsys_analyzer.cli.run_progress import handle_interruption
    from nsys_analyzer.report.model import Table
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.sections.comparison import answer_comparison, require_comparisons
    from nsys_analyzer.verify.ledger import append_entry
    from nsys_analyzer.verify.section import verification_section
    from nsys_analyzer.verify.verification import Request
    from nsys_analyzer.verify.verification import verify as verify_change

    recording = Recording(profiler=profiler if profiler != "none" else "torch")
    options = {} if warmup is None else {"warmup_steps": (warmup,)}
    plan = make_plan(options=options, recording=recording, program=program)
    request = Request(
        folder, plan, old_command, commit, finding, time_limit_s=time_limit, timeout_s=timeout, output_dir=output_dir,
        is_recorded=profiler != "none", version=__version__,
    )  # fmt: skip
    with handle_interruption(output_dir, ""):
        verification = verify_change(request, tell)
    print_section(
        verification_section(
            verification.entry, verification.more_pairs, verification.remark, verification.findings_after
        )
    )
    try:
        append_entry(verification.entry)
        if verification.after:
            comparisons = require_comparisons(compare_runs((verification.before,), (verification.after,), repeats=True))
            section = answer_comparison(comparisons, DEFAULT_THRESHOLD, detailed=False)
            if tables := tuple(block for block in section.blocks if isinstance(block, Table)):
                print_section(replace(section, title="", blocks=tables))
        click.echo(f"\n{LEDGER}")
    except NsysAnalyzerError as error:  # the verdict is valid without the ledger and the explanation
        tell(f"\n{error}")
    ctx.exit(STATUS_OF_VERDICT[verification.entry.verdict])
