"""Whether a capture holds the figures that a text claims: true, false with the right figure, or not to be told.

A claim is a number with a unit. The words beside it, up to the next comma or the end of the sentence, name its figure:
a figure's own name (``gpu_busy_ms phase=forward``), or plain words for a phase, a kernel class and what is measured.
What they leave out is that of the number before, of the same unit and sentence ("13 ms in forward and 27 in backward").
Whatever a word leaves open is not told: a word that is not understood, or words that fit several figures, of which the
claim holds for some.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import msgspec

from nsys_analyzer.analysis.kernels.class_rules import COMPILED, OTHER, UNKNOWN
from nsys_analyzer.analysis.kernels.classes import known_classes
from nsys_analyzer.analysis.ranges.phases import LEAF_PHASES, STEP
from nsys_analyzer.analysis.steps.process import CAUSES
from nsys_analyzer.errors import ConfigurationError
from nsys_analyzer.report.ask import Answer, CannotAnswer, RestsOn, ask, keys_of
from nsys_analyzer.report.evidence import Evidence
from nsys_analyzer.report.named_figures import FIGURES, unit_of
from nsys_analyzer.report.renderers.json_report import GENERATOR, SCHEMA_VERSION

_US, _COUNT = {"ms": 1e-3, "us": 1.0}, {"count": 1.0}
#: The units of a text, as parts of those of figures.
_UNITS = {
    "ms": {"ms": 1.0, "us": 1e3}, "s": {"ms": 1e3, "us": 1e6}, **dict.fromkeys(("µs", "us"), _US),
    "%": {"fraction": 0.01}, "percent": {"fraction": 0.01}, "GiB": {"bytes": 2.0**30}, "GB": {"bytes": 1e9},
    "MiB": {"bytes": 2.0**20}, "MB": {"bytes": 1e6}, "tokens/s": {"tokens/s": 1.0},
    **dict.fromkeys(("kernels", "launches", "copies", "steps", "instances"), _COUNT),
}  # fmt: skip
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_CLAIM = re.compile(
    rf"(?<![\w.])(?P<low>{_NUMBER})(?:\s*(?:–|-|to)\s*(?P<high>{_NUMBER}))?(?:\s*±\s*{_NUMBER})?"
    rf"\s*(?P<noun>[a-z/]+\s+)??(?P<unit>{'|'.join(map(re.escape, _UNITS))})(?!\w|/(?!step\b))"
)
#: Where the words about one number end.
_ENDS = re.compile(r"[\n;,:()]|\.\s|\.$|\s(?:and|while|but)\s")
_NAMED = re.compile(rf"\b(?:{'|'.join(FIGURES)})\b(?:\s+\w+=(?:'[^']*'|[^\s,;:]+))*")
_MORE, _LESS = r"(?:more than|over|above|at least)\s+$", r"(?:less than|under|below|at most)\s+$"
_ABOUT = re.compile(r"(?:about|around|roughly|some|nearly|≈|~)\s*$")
#: What a number that is about right may be off by.
_NEAR = 0.05
#: Answers have six digits.
_ROUNDED = 1e-5
_WORDS = {
    "forward": "forward(?: pass)?|fwd", "backward": "backward(?: pass)?|bwd", "optimizer": "optimi[sz]er(?: step)?",
    "step": "(?:training )?steps?|iterations?",
    "matmul": "matmuls?|gemms?|matrix multiplications?", "elementwise": "element-?wise",
    "launch": "launch(?:es|ing)?", "sync": "waits? for the gpu|synchroni[sz]\\w+",
    "data": "loads? a batch|data loading", "allocator": "allocat\\w+", "host": "(?:other )?cpu work",
}  # fmt: skip
#: Words that change nothing of what is meant.
_EMPTY = set(
    """
    a an the of is are in on for to at there has have with about around roughly some nearly only keep
    keeps kept take takes took time kernel kernels gpu run runs spend spends spent during within long
    length lasts last each per share total profiled unprofiled under without profiler profile estimated
    measured capture holds which
    """.split()  # noqa: SIM905
)
#: What is not meant by a time on the GPU.
_ON_CPU = ("step_unprofiled_ms", "step_estimated_ms", "step_profiled_ms", "wall_ms", "unprofiled_ms")
#: Kernel classes whose names say something else in a text, too.
_OTHERWISE = (OTHER, UNKNOWN, COMPILED, "optimizer", "softmax", "random", "memset/memcpy")


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """A figure that a text claims.

    Attributes:
        text: the number, and the words beside it.
        holds: whether the capture holds it; null where that cannot be told.
        answers: the figures that these words name.
    """

    text: str
    holds: bool | None
    answers: tuple[Answer, ...] = ()
    cannot_answer: CannotAnswer | None = None


class Claims(msgspec.Struct, frozen=True):
    """What ``check`` writes: the claims of a text in order."""

    claims: tuple[Claim, ...]
    schema_version: int = SCHEMA_VERSION
    generator: str = GENERATOR


def check(evidence: Evidence, text: str) -> Claims:
    """Returns the claims of a text, each with whether the captures hold it."""
    numbers = list(_CLAIM.finditer(text))
    starts, ends = [0, *(one.end() for one in numbers)], [*(one.start() for one in numbers[1:]), len(text)]
    claims, last, unit = [], "", ""
    for number, start, end in zip(numbers, starts, ends, strict=False):
        goes_on = number["unit"] == unit and not re.search(r"\n|\.\s", text[start : number.start()])
        claim, last = _judged(evidence, text, number, start, end, last if goes_on else "")
        claims.append(claim)
        unit = number["unit"]
    return Claims(tuple(claims))


def _judged(evidence: Evidence, text: str, number: re.Match[str], start: int, end: int, last: str) -> tuple[Claim, str]:
    """Returns the claim of a number, and the words that name its figure; ``last`` are those of the number before."""
    named = _NAMED.findall(text, start, number.start())
    start = max([start, *(one.end() for one in _ENDS.finditer(text, start, number.start()))])
    after = _ENDS.search(text, number.end(), end)
    end = after.start() if after else end
    before, behind = text[start : number.start()].lower(), f" {number['noun'] or ''}{text[number.end() : end].lower()}"
    questions, is_clear = (named[-1:], True) if named else _questions(evidence, before, behind, number["unit"])
    if not questions and (left_out := _left_out(evidence, last, before + behind)):
        questions, is_clear = _questions(evidence, f"{left_out} {before}", behind, number["unit"])
    asked = [_asked(evidence, question) for question in questions]
    answers = tuple(one for one in asked if one.cannot_answer is None)
    missing = next((one.cannot_answer for one in asked if one.cannot_answer), None)
    verdicts = {_holds(number, before, one) for one in answers}
    words = " ".join((*named[-1:], *text[number.start() if named else start : end].split()))
    if verdicts == {True} or (verdicts == {False} and is_clear and not missing):
        return Claim(words, True in verdicts, answers), before + behind
    said = "The figures of these words differ, or are not known so closely" if answers else "These words name no figure"
    why = CannotAnswer(said, "nsys-analyze ask --list, and one of its names in the text")
    return Claim(words, None, answers, missing or why), before + behind


def _left_out(evidence: Evidence, last: str, words: str) -> str:
    """Returns the words about the number before, less what the words about this one say anew."""
    values = list(_values(evidence))
    anew = {key for key, _, pattern in values if re.search(pattern, words)}
    for key, _, pattern in values:
        last = re.sub(pattern, " ", last) if key in anew else last
    return last if anew or "of which" in words else ""


def _asked(evidence: Evidence, question: str) -> Answer:
    try:
        return ask(evidence, question)
    except ConfigurationError as error:
        return Answer(question, RestsOn(""), cannot_answer=CannotAnswer(error.message, error.hint))


def _questions(evidence: Evidence, before: str, behind: str, unit: str) -> tuple[list[str], bool]:
    """Returns the questions that words may mean, and whether they say of which part of the capture."""
    before, behind = before.replace("'s ", " "), behind.replace("'s ", " ")
    words, rest = f"{before} {unit} {behind}", re.sub(f"{_MORE}|{_LESS}", " ", before) + behind
    said: dict[str, str] = {}
    for key, value, pattern in _values(evidence):
        if re.search(pattern, rest) and (key != "cause" or "idl" in words):
            if key in said:
                return [], False
            said[key], rest = value, re.sub(pattern, " ", rest)
    profiled = re.search(r"\bprofiled|under the profiler", words)
    unprofiled = re.search("unprofiled|without (?:the|a) profiler", words)
    found = []
    for name, named in FIGURES.items():
        says, without = re.compile(rf"\b(?:{named.says})\b"), "unprofiled" in name or "estimated" in name
        left = set(re.findall(r"[a-z][\w/-]*", says.sub(" ", rest))) - _EMPTY
        is_named = named.says and unit_of(name) in _UNITS[unit] and says.search(words) and not left
        if not is_named or (profiled and without) or (unprofiled and not without):
            continue
        is_other = ("on the gpu" in words and name in _ON_CPU) or (unit == "copies" and "memcpy" not in named.kinds)
        if is_other or ("kernel time" in words and named.path.startswith("step")):
            continue
        keys = {key.strip("[]"): key[0] != "[" for key in keys_of(name)}  # and whether it is required
        pairs = dict(said)
        if named.path.startswith("step") and pairs.get("phase") == "step":
            del pairs["phase"]
        if not {key for key, required in keys.items() if required and key != "phase"} <= pairs.keys() <= keys.keys():
            continue
        if not said and "phase" in keys:  # "it takes 5 ms": what does?
            continue
        parts = [""] if "phase" in pairs or "phase" not in keys else ["step"] if keys["phase"] else ["", "step"]
        for part in parts:
            asked = {**pairs, **({"phase": part} if part else {})}
            found.append(" ".join((name, *(f"{key}={shlex.quote(value)}" for key, value in asked.items()))))
    # Of "1,300 kernels a step" the text before may say whose they are.
    whose = "class" in said or said.get("phase") != "step" or re.search(_WORDS["step"], before) is not None
    return found, ("phase" in said and whose) or "finding" in said or unit == "steps"


def _values(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    """Yields what words may name: a key of questions, its value, and the pattern of the words."""
    findings = {one.id for capture in evidence.captures for one in capture.findings or ()}
    phases = {one.phase: None for capture in evidence.captures for one in capture.phases}
    held = {
        "finding": sorted(findings),
        "class": [name for name in known_classes() if name not in _OTHERWISE],
        "phase": [*LEAF_PHASES, *phases, STEP],
        "cause": CAUSES,
    }
    for key, values in held.items():
        for value in dict.fromkeys(values):
            words = _WORDS.get(value, re.escape(value.lower()).replace("_", "[ _-]"))
            yield key, value, rf"(?<!\w)(?:{words})(?![\w/])"


def _holds(number: re.Match[str], before: str, answer: Answer) -> bool | None:
    """Tells whether a figure is the number as it is written, in its digits; None where its bounds are too wide.

    A number that is about right may be off by more; "more than" and "at most" mean what they say.
    """
    factor, value = _UNITS[number["unit"]].get(answer.unit), answer.value
    if factor is None or value is None or isinstance(value, str):
        return None
    ends = [text.replace(",", "") for text in (number["low"], number["high"] or number["low"])]
    low, high = (float(end) * factor for end in ends)
    within = max(0.5 * 10.0 ** -len(end.partition(".")[2]) for end in ends) * factor + _ROUNDED * high
    within = max(within, _NEAR * high) if _ABOUT.search(before) else within
    least, most = value if isinstance(value, tuple) else (value, value)
    if re.search(_MORE, before):
        return least >= low
    if re.search(_LESS, before):
        return most <= high
    if abs(low - least) <= within and abs(high - most) <= within:
        return True
    if most < low - within or least > high + within:
        return False
    return True if least == most else None
