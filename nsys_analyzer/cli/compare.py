"""``nsys-analyze compare``: what changed between two runs, and what explains it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsys_analyzer.cli.help import INPUT, JUDGED, OUTPUT, command, format_option, option
from nsys_analyzer.cli.options import Command, configuration_options, format_of, names_options, scheduler_option, tell

if TYPE_CHECKING:
    from nsys_analyzer.analysis.comparison.pairs import Comparisons
    from nsys_analyzer.analysis.ranges.phases import PhaseNames
    from nsys_analyzer.configuration import Run

#: The exit status where the step is slower by more than --fail-above allows, or a budget is exceeded.
SLOWER = 3


def _fraction(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A percentage as a fraction: ``5%`` and ``5`` are 0.05."""
    if text is not None and not re.fullmatch(r"\d{1,4}(\.\d+)?%?", text):
        raise click.BadParameter(f"{text!r} is no percentage, such as 5%", ctx, param)
    return None if text is None else float(text.removesuffix("%")) / 100


def _timings_option(side: str) -> Callable[[Command], Command]:
    text = f"Timings of unprofiled runs of {side.upper()}. Default: timings.csv in its folder, or in the one above."
    path = click.Path(path_type=Path)
    return option(INPUT, f"--csv-{side}", f"csv_{side}", type=path, metavar="FILE", multiple=True, help=text)


@command(epilog="Example: nsys-analyze compare before.sqlite after.sqlite --fail-above 5%")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@option(OUTPUT, "-o", "--output", metavar="FILE", help="The file to write, text as markdown.")
@format_option("text", "markdown", "json", help="markdown is for a pull request, json holds every figure.")
@option(
    JUDGED, "--fail-above", callback=_fraction, metavar="PERCENT",
    help="Exit with 3 where a step is slower by more than this, and by more than chance; with 1 where it could not be "
    "compared.",
)  # fmt: skip
@option(
    JUDGED, "--budgets", "budgets_path", type=click.Path(path_type=Path), metavar="FILE",
    help="The most that AFTER may take, TOML: step_ms = 40, launches, peak_memory_gib, and tables phases_ms and "
    "classes_ms. Exit with 3 where it takes more, and more than by chance; with 1 where that is not known.",
)  # fmt: skip
@option(
    OUTPUT,
    "--force",
    is_flag=True,
    help="Compare what cannot be compared; replace a file that nsys-analyze did not write; make a missing folder.",
)
@option(INPUT, "--repeats", is_flag=True, help="Take all captures of a folder for runs of one program.")
@option(
    JUDGED, "--cpu-spread", callback=_fraction, metavar="PERCENT", default="25%", show_default=True,
    help="By how much the time that the GPU waits for the program differs between two runs of it (a standard "
    "deviation). 25% was measured on shared hosts; a quiet machine of your own has less.",
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
    given: Run,
) -> None:
    """Print what changed from BEFORE to AFTER, whether it is more than chance, and what explains it.

    BEFORE and AFTER are captures, reports written as JSON, or folders of captures: the runs of a folder are matched by
    their configuration, and several runs of one are taken together. BEFORE may be the folder of a baseline, too.
    """
    from nsys_analyzer.analysis.comparison.budgets import read_budgets
    from nsys_analyzer.analysis.comparison.comparison import DEFAULT_THRESHOLD
    from nsys_analyzer.analysis.comparison.pairs import compare_runs
    from nsys_analyzer.cli.run_progress import reading
    from nsys_analyzer.errors import ConfigurationError, DifferentConditionsError
    from nsys_analyzer.experiments.gather import load_runs, reports_at
    from nsys_analyzer.report.writing import check_target
    from nsys_analyzer.system.cluster import Workers

    budgets = read_budgets(budgets_path) if budgets_path else None
    target = Path(output) if output and output != "-" else None
    form = None if output_format == "text" else output_format
    output_format = format_of(target, form, {"markdown": ".md", "json": ".json"}, "text")
    if target:
        check_target(target, (before, after, *csv_before, *csv_after), force=force)
    workers = Workers(scheduler, reading)
    places = (before, csv_before), (after, csv_after)
    if taken := next((path for path, csv in places if csv and reports_at(path)), None):
        raise ConfigurationError(f"{taken} is a report, which holds its times", "Leave its --csv option out")
    sides = [load_runs(path, csv, tell, names, given, workers) for path, csv in places]
    if before.is_dir() and reports_at(before):  # a baseline may be of several machines
        same = {run.hardware for run in sides[1]}
        sides[0] = tuple(run for run in sides[0] if run.hardware in same) or sides[0]
    found = compare_runs(*sides, cpu_spread=cpu_spread, repeats=repeats, force=force, budgets=budgets)
    _write(found, DEFAULT_THRESHOLD if fail_above is None else fail_above, output_format, target)
    asked = [budget for pair in found.compared for budget in pair.budgets]
    of_budgets = {
        verdict: [one.what for one in asked if one.verdict == verdict] for verdict in ("exceeded", "not known")
    }
    for verdict, missed in of_budgets.items():
        if missed:
            tell(f"Budgets {verdict}: {', '.join(missed)}")
    is_slower = fail_above is not None and any(pair.is_slower_by(fail_above) for pair in found.compared)
    if is_slower or of_budgets["exceeded"]:
        ctx.exit(SLOWER)
    if (fail_above is not None and found.unmatched) or of_budgets["not known"]:
        ctx.exit(1)
    if fail_above is not None and found.refused:
        ctx.exit(
            DifferentConditionsError.exit_status if all(one.is_of_other_conditions for one in found.refused) else 1
        )
    if fail_above is not None:
        unclear = sum(pair.verdict(fail_above) == "unclear" for pair in found.compared)
        if unclear:
            tell(f"{unclear} of {len(found.compared)} comparisons are too uncertain for --fail-above: see the report.")


def _write(found: Comparisons, limit: float, output_format: str, target: Path | None) -> None:
    """Writes the comparisons where ``-o`` says, or prints them."""
    from nsys_analyzer.report.model import Report
    from nsys_analyzer.report.renderers import RENDERERS, markdown
    from nsys_analyzer.report.renderers.json_comparison import comparison_data
    from nsys_analyzer.report.renderers.json_report import in_json
    from nsys_analyzer.report.renderers.terminal import print_section
    from nsys_analyzer.report.screen import data_stream
    from nsys_analyzer.report.sections.comparison import answer_comparison
    from nsys_analyzer.system.atomic_write import write_text

    if output_format == "json":
        text = in_json(comparison_data(found, limit))
    elif output_format == "markdown" or target:
        section = answer_comparison(found, limit)
        text = markdown.render(Report(section.title, (replace(section, title=""),)), {})
    else:
        print_section(answer_comparison(found, limit, detailed=False))
        return
    if target is None:
        click.echo(text, nl=False, file=data_stream() if output_format == "json" else None)
        return
    mark = f"\n{RENDERERS['markdown'].mark}\n" if output_format != "json" else ""
    write_text(target, f"{text}{mark}")
    click.echo(str(target))
