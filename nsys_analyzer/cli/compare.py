"""``nsys-analyze compare``: compares two runs, and explains the change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import CRITERIA, INPUT, OUTPUT, Function, command, format_option, option
from nsys_analyzer.cli.options import PATH, choose_format, configuration_options, names_options, scheduler_option, tell

if TYPE_CHECKING:
    from nsys_analyzer.analysis.comparison.pairs import Comparisons
    from nsys_analyzer.configuration import Run
    from nsys_analyzer.trace.phase_names import PhaseNames

#: The exit status if a step is slower by more than --fail-above allows, or exceeds a budget.
SLOWER_STATUS = 3


def _parse_percentage(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Returns a percentage as a fraction: ``5%`` and ``5`` are 0.05."""
    if text is not None and not re.fullmatch(r"\d{1,4}(\.\d+)?%?", text):
        raise click.BadParameter(f"{text!r} is not a percentage, such as 5%", ctx, param)
    return None if text is None else float(text.removesuffix("%")) / 100


def _timings_option(side: str) -> Callable[[Function], Function]:
    """Adds the option for the unprofiled times of one side, "before" or "after"."""
    return option(
        INPUT, f"--csv-{side}", f"csv_{side}", type=PATH, metavar="FILE", multiple=True,
        help=f"A CSV file with times of {side.upper()} without the profiler. Repeatable. Default: timings.csv in the "
        f"folder of {side.upper()}, or in the folder above.",
    )  # fmt: skip


@command(epilog="Example: nsys-analyze compare before.sqlite after.sqlite --fail-above 5%")
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@option(OUTPUT, "-o", "--output", metavar="FILE", help="The file to write. With --format text, the file is markdown.")
@format_option("text", "markdown", "json", help="markdown is for a pull request; json contains every figure.")
@option(
    CRITERIA, "--fail-above", callback=_parse_percentage, metavar="PERCENT",
    help="Exit with 3 if a step is slower by more than this percentage and by more than chance. Exit with 1 if a step "
    "cannot be compared.",
)  # fmt: skip
@option(
    CRITERIA, "--budgets", "budgets_path", type=PATH, metavar="FILE",
    help="A TOML file with the largest values that are allowed for AFTER: the keys step_ms, launches, "
    "peak_memory_gib and step_joules, and the tables phases_ms and classes_ms. Exit with 3 if AFTER exceeds a value by "
    "more than chance. Exit with 1 if a value of AFTER is not known.",
)  # fmt: skip
@option(OUTPUT, "--force", is_flag=True,
        help="Compare the runs even if their configurations differ, replace a file even if nsys-analyze did not write "
        "it, and make a missing folder.")  # fmt: skip
@option(INPUT, "--repeats", is_flag=True, help="Treat all captures of a folder as runs of one program.")
@option(
    CRITERIA, "--cpu-spread", callback=_parse_percentage, metavar="PERCENT", default="25%", show_default=True,
    help="How much the time in which the GPU waits for the CPU varies between runs of one program, as a standard "
    "deviation. 25% was measured on shared hosts. On a machine without other load, the variation is smaller.",
)  # fmt: skip
@_timings_option("after")
@_timings_option("before")
@scheduler_option
@names_options
@configuration_options
@click.pass_context
def compare(
    ctx: click.Context,
    before: Path,
    after: Path,
    output: str | None,
    output_format: str,
    fail_above: float | None,
    budgets_path: Path | None,
    force: bool,
    repeats: bool,
    cpu_spread: float,
    csv_before: tuple[Path, ...],
    csv_after: tuple[Path, ...],
    scheduler: str | None,
    names: PhaseNames,
    configuration: Run,
) -> None:
    """Prints what changed from BEFORE to AFTER, whether it is more than chance, and what explains it.

    BEFORE and AFTER are captures, JSON reports, or folders of captures. The runs of two folders are matched by their
    configuration, and several runs of one configuration are combined. BEFORE can also be the folder of a baseline, as
    nsys-analyze baseline writes it.
    """
    from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD
    from nsys_analyzer.analysis.comparison.estimates import read_budgets
    from nsys_analyzer.analysis.comparison.pairs import compare_runs
    from nsys_analyzer.cli.run_progress import show_reading
    from nsys_analyzer.errors import ConfigurationError, DifferentConditionsError
    from nsys_analyzer.experiments.evidence import load_runs
    from nsys_analyzer.inputs.gather import find_saved_reports
    from nsys_analyzer.report.sections.comparison import require_comparisons
    from nsys_analyzer.report.writing import check_target
    from nsys_analyzer.system.cluster import Workers
    from nsys_analyzer.verify.baselines import select_same_hardware

    budgets = read_budgets(budgets_path) if budgets_path else None
    target = Path(output) if output and output != "-" else None
    given_format = None if output_format == "text" else output_format
    output_format = choose_format(target, given_format, {"markdown": ".md", "json": ".json"}, "text")
    if target:
        check_target(target, (before, after, *csv_before, *csv_after), force=force)
    workers = Workers(scheduler, show_reading)
    inputs = (before, csv_before), (after, csv_after)
    if report := next((path for path, csv in inputs if csv and find_saved_reports(path)), None):
        raise ConfigurationError(f"{report} is a report, which contains its own times", "Leave out --csv for it")
    runs_before, runs_after = (
        load_runs(path, csv, tell=tell, names=names, overrides=configuration, workers=workers) for path, csv in inputs
    )
    # A baseline may have runs of several machines; those of the same hardware are taken.
    if before.is_dir() and find_saved_reports(before):
        runs_before = select_same_hardware(runs_before, runs_after)
    comparisons = require_comparisons(
        compare_runs(runs_before, runs_after, cpu_spread=cpu_spread, repeats=repeats, force=force, budgets=budgets)
    )
    _write_comparisons(comparisons, DEFAULT_THRESHOLD if fail_above is None else fail_above, output_format, target)
    compared_pairs, refused_pairs = comparisons.compared, comparisons.refused
    all_budgets = [budget for pair in compared_pairs for budget in pair.budgets]
    exceeded_budgets, unknown_budgets = (
        [budget.quantity for budget in all_budgets if budget.verdict == verdict]
        for verdict in ("exceeded", "not known")
    )
    for verdict, figures in (("exceeded", exceeded_budgets), ("not known", unknown_budgets)):
        if figures:
            tell(f"Budgets {verdict}: {', '.join(figures)}")
    is_slower = fail_above is not None and any(pair.is_slower_by(fail_above) for pair in compared_pairs)
    if is_slower or exceeded_budgets:
        ctx.exit(SLOWER_STATUS)
    if (fail_above is not None and comparisons.unmatched) or unknown_budgets:
        ctx.exit(1)
    if fail_above is not None and refused_pairs:
        ctx.exit(DifferentConditionsError.exit_status if all(pair.conditions_differ for pair in refused_pairs) else 1)
    if fail_above is not None:
        unclear_count = sum(pair.verdict(fail_above) == "unclear" for pair in compared_pairs)
        if unclear_count:
            tell(
                f"{unclear_count} of {len(compared_pairs)} comparisons are too uncertain for --fail-above: see the "
                "report."
            )


def _write_comparisons(comparisons: Comparisons, limit: float, output_format: str, target: Path | None) -> None:
    """Writes the comparisons to the target, or prints them if there is none."""
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.renderers import RENDERERS, markdown
    from nsys_analyzer.report.renderers.json_comparison import comparison_data
    from nsys_analyzer.report.renderers.json_report import format_json
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.sections.comparison import answer_comparison
    from nsys_analyzer.system.atomic_write import write_text

    if output_format == "json":
        text = format_json(comparison_data(comparisons, limit))
    elif output_format == "markdown" or target:
        section = answer_comparison(comparisons, limit)
        text = markdown.render(Report(section.title, (replace(section, title=""),)), {})
    else:
        print_section(answer_comparison(comparisons, limit, detailed=False))
        return
    if target is None:
        click.echo(text, nl=False, file=data_stream() if output_format == "json" else None)
        return
    mark = f"\n{RENDERERS['markdown'].mark}\n" if output_format != "json" else ""
    write_text(target, f"{text}{mark}")
    click.echo(str(target))
