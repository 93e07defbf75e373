"""Reports what fills the memory of a GPU at its peak, which memory grows, and why an allocation failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsys_analyzer.analysis.memory.account import (
    MemoryAccount,
    MemoryCategory,
    MemoryGrowth,
    MemoryLine,
    MemoryMoment,
    MemoryPart,
    MemoryPlace,
    MemoryRemedy,
    OutOfMemory,
)
from nsys_analyzer.report.model import Answer, Block, Field, Listing, Paragraph, Section, make_table
from nsys_analyzer.report.units import format_bytes, format_count, format_ms
from nsys_analyzer.text import StrOrText, join_names, join_texts, phrase

#: The largest number of lines in the tables of a report. The JSON contains all lines.
_MOST_LINES, _MOST_GROWING_LINES = 12, 5
#: Lines with less than this share of the peak are left out.
_LEAST_SHARE = 0.002
#: The words for the categories.
_CATEGORY_WORDS: dict[MemoryCategory, str] = {
    "kept": "leftovers",
    "held": "older memory",
    "unknown": "use unknown",
}
#: The sentences that define categories whose names do not explain themselves.
_LEGEND: dict[MemoryCategory, str] = {
    "optimizer state": "Memory from before the recording counts as weights and optimizer state if it has the sizes of "
    "gradients.",
    "kept": "Leftovers are what a forward or backward pass allocated and the program did not release after its step.",
    "held": "Older memory was allocated before the recording or the first step, for example by cuBLAS.",
}
_REST_WORDS = "unused, in pieces"
_CACHED_WORDS = "unused, whole segments"


def memory_section(account: MemoryAccount, title: str, *, show_all: bool = False) -> Section:
    """Returns the section on the memory of a GPU. ``show_all`` also shows the lines with little memory."""
    return Section("memory", "What fills the memory of the GPU?", (*answer_memory(account, title, show_all=show_all),))


def answer_memory(account: MemoryAccount, title: str, *, show_all: bool = False) -> Iterator[Block]:
    """Yields the failed allocations, the peak and its parts, and the memory that grows from step to step."""
    for failure in account.out_of_memory:
        yield Answer(
            phrase(
                "An allocation of {} failed, {}.", format_bytes(failure.requested_bytes), _say_moment(failure.moment)
            ),
            title,
        )
        yield Paragraph(_say_failure(failure), title)
        yield Listing(tuple(_say_remedy(remedy) for remedy in failure.remedies), capture=title)
    yield Answer(_say_peak(account), title)
    yield Paragraph(_say_rest(account), title)
    yield _tabulate_parts(account.parts, account.peak, title)
    legend = [_LEGEND[part.category] for part in account.parts if part.category in _LEGEND]
    if legend:
        yield Paragraph(" ".join(legend), title)
    if account.phases_from is None:
        yield Paragraph(
            "The snapshot has no stacks, so its memory cannot be told apart. "
            "Record it with torch.cuda.memory._record_memory_history(stacks='python')."
        )
    if account.growth:
        yield Answer(_say_growth(account.growth), title)
        yield _tabulate_growth(account.growth[: None if show_all else _MOST_GROWING_LINES], title)
    lines = account.lines
    if not show_all:
        lines = tuple(line for line in lines if line.bytes >= _LEAST_SHARE * account.peak.allocated_bytes)[:_MOST_LINES]
    caller = _find_only_caller([line.place for line in lines])
    yield make_table(
        (
            Field("line", "text", lambda line: _format_line(line.place, line.category)),
            Field("called from", "text", lambda line: None if caller else line.place.called_from or None),
            Field("use", "text", lambda line: _name_category(line.category)),
            Field("memory", "bytes", lambda line: line.bytes),
            Field("blocks", "count", lambda line: line.blocks),
            Field("largest", "bytes", lambda line: line.largest_bytes if show_all else None),
        ),
        lines,
        f"The lines that allocated the memory at the peak{f', called from {caller}' if caller else ''}:",
        capture=title,
    )


def _find_only_caller(places: Sequence[MemoryPlace]) -> str:
    """Returns the user's line that all known lines are called from; an empty text if there are several."""
    callers = {place.called_from for place in places if place.line}
    return callers.pop() if len(callers) == 1 else ""


def _say_peak(account: MemoryAccount) -> StrOrText:
    largest = sorted(account.parts, key=lambda part: -part.bytes)[:2]
    names = join_names([f"{_name_category(part.category)} ({format_bytes(part.bytes)})" for part in largest])
    return phrase(
        "The peak is {}, {}. The largest {} {}.",
        format_bytes(account.peak.allocated_bytes), _say_moment(account.peak),
        "parts are" if len(largest) > 1 else "part is", names,
    )  # fmt: skip


def _say_rest(account: MemoryAccount) -> str:
    """Returns sentences on the memory that PyTorch, CUDA, NCCL and other processes hold."""
    held_text = f"PyTorch then holds {format_bytes(account.peak.reserved_bytes)} of the GPU. "
    if account.outside_bytes is None:
        return f"{held_text}What other processes, CUDA and NCCL hold is not part of a snapshot."
    return f"{held_text}CUDA, NCCL and other processes hold {format_bytes(account.outside_bytes)}."


def _say_moment(moment: MemoryMoment) -> StrOrText:
    """Returns the moment as the end of a sentence: ``in backward of step 2, 204 ms after the first event``."""
    parts: list[StrOrText] = []
    if moment.phase is not None:
        step = "" if moment.step is None else f" of step {moment.step + 1}"
        parts.append(f"in {moment.phase}{step}")
    if moment.place.line:
        parts.append(phrase("at `{}`", moment.place.line))
    parts.append(f"{format_ms(moment.time_ms)} after the first event of the recording")
    return join_texts(", ", parts)


def _tabulate_parts(parts: Sequence[MemoryPart], peak: MemoryMoment, title: str) -> Block:
    rows: list[tuple[str, int, int | None]] = [
        (_name_category(part.category), part.bytes, part.blocks) for part in sorted(parts, key=lambda part: -part.bytes)
    ]
    unused_rows = ((_REST_WORDS, peak.fragmented_bytes, None), (_CACHED_WORDS, peak.cached_bytes, None))
    rows += [row for row in unused_rows if row[1] > 0]
    total = max(peak.reserved_bytes, peak.allocated_bytes)
    return make_table(
        (
            Field("what PyTorch holds at the peak", "text", lambda row: row[0]),
            Field("memory", "bytes", lambda row: row[1]),
            Field("share", "percent", lambda row: row[1] / total),
            Field("", "bar", lambda row: row[1] / total),
            Field("blocks", "count", lambda row: row[2]),
        ),
        rows,
        capture=title,
    )


def _say_growth(growth: Sequence[MemoryGrowth]) -> StrOrText:
    per_step = sum(row.bytes_per_step for row in growth)
    held_bytes = sum(row.held_bytes for row in growth)
    steps = max(row.steps for row in growth)
    caller = _find_only_caller([row.place for row in growth])
    where = phrase(" It is allocated in calls at `{}`.", caller) if caller else ""
    return join_texts(
        "",
        [
            phrase("Memory grows by {} per step.", format_bytes(per_step)),
            f" {format_bytes(held_bytes)} of {format_count(steps, 'earlier step')} are still in use at the end.",
            where,
            " A snapshot tells which line allocates memory, not which variable keeps it.",
        ],
    )


def _tabulate_growth(growth: Sequence[MemoryGrowth], title: str) -> Block:
    caller = _find_only_caller([row.place for row in growth])
    return make_table(
        (
            Field("line", "text", lambda row: _format_line(row.place, "kept")),
            Field("called from", "text", lambda row: None if caller else row.place.called_from or None),
            Field("per step", "bytes", lambda row: row.bytes_per_step),
            Field("steps", "count", lambda row: row.steps),
            Field("in use", "bytes", lambda row: row.held_bytes),
        ),
        growth,
        "The lines whose memory stays in use:",
        capture=title,
    )


def _say_failure(failure: OutOfMemory) -> StrOrText:
    moment = failure.moment
    unused = moment.fragmented_bytes + moment.cached_bytes
    sentences: list[StrOrText] = [
        f"PyTorch held {format_bytes(moment.reserved_bytes)}, of which {format_bytes(moment.allocated_bytes)} were in "
        "use.",
    ]
    if unused:
        largest = format_bytes(moment.largest_free_bytes)
        sentences.append(
            f"The unused {format_bytes(unused)} are in pieces of at most {largest}"
            f"{', too small for the allocation' if moment.largest_free_bytes < failure.requested_bytes else ''}."
        )
    free = format_bytes(failure.device_free_bytes)
    if failure.is_limited:
        sentences.append(
            phrase(
                "The GPU had {} free, so a limit of the process stopped the allocation, such as the one that "
                "`torch.cuda.set_per_process_memory_fraction` sets.",
                free,
            )
        )
    else:
        sentences.append(f"The GPU had {free} free.")
    names = [f"{_name_category(part.category)} {format_bytes(part.bytes)}" for part in
             sorted(failure.parts, key=lambda part: -part.bytes)[:4]]  # fmt: skip
    sentences.append(f"In use were: {join_names(names)}.")
    return join_texts(" ", sentences)


def _say_remedy(remedy: MemoryRemedy) -> StrOrText:
    freed = "" if remedy.bytes is None else format_bytes(remedy.bytes)
    verdict = "would have been enough" if remedy.is_enough else "would not have been enough alone"
    lines = join_names([place.line or "an unknown line" for place in remedy.places]) if remedy.places else ""
    if remedy.kind == "growth":
        return phrase(
            "Release what every step leaves behind: {} {}. Look for a list, an attribute or a logger that keeps a loss "
            "or an output with its graph; `loss.item()` and `loss.detach()` keep none.",
            freed, verdict,
        )  # fmt: skip
    if remedy.kind == "expandable_segments":
        return phrase(
            "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, which joins unused pieces: {} {}.", freed, verdict
        )
    if remedy.kind == "batch":
        return f"Halve the batch: {freed} of activations {verdict}."
    if remedy.kind == "checkpointing":
        return phrase("Checkpoint the modules around `{}`: at most {}, which {}.", lines, freed, verdict)
    return "Raise the limit of the process."


def _name_category(category: MemoryCategory) -> str:
    return _CATEGORY_WORDS.get(category, category)


def _format_line(place: MemoryPlace, category: MemoryCategory) -> str:
    """Returns the line of a place, or why it is unknown."""
    if place.line:
        return place.line
    is_old = category in ("weights", "optimizer state", "held")
    return "(before the recording)" if is_old else "(backward, no line of Python)"


def list_line_rows(lines: Sequence[MemoryLine]) -> list[dict[str, str | int]]:
    """Returns the lines as rows of CSV."""
    return [
        {
            "category": line.category,
            "line": line.place.line,
            "called_from": line.place.called_from,
            "bytes": line.bytes,
            "blocks": line.blocks,
            "largest_bytes": line.largest_bytes,
        }
        for line in lines
    ]
