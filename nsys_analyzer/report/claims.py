"""Whether a capture holds the figures that a text claims: true, false with the right figure, or not to be told.

A claim is a number with a unit. The words beside it, up to the next comma or the end of the sentence, name its figure:
a figure's own name (``gpu_busy_ms phase=forward``), or plain words for a phase, a kernel class and what is measured.
What they leave out is that of the sentence's start ("In forward, …"), or of the number before, of the same unit and
sentence ("13 ms in forward and 27 in backward"). Whatever a word leaves open is not told: a word that is not
understood, a condition ("With bf16, …"), or words that fit several figures, of which the claim holds for some.
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
from nsys_analyzer.report.named_figures import FIGURES, MEASURED, unit_of
from nsys_analyzer.report.renderers.json_report import GENERATOR, SCHEMA_VERSION

_S, _MS, _US, _COUNT = {"ms": 1e3, "us": 1e6}, {"ms": 1.0, "us": 1e3}, {"ms": 1e-3, "us": 1.0}, {"count": 1.0}
#: The units of a text, as parts of those of figures.
_UNITS = {
    **dict.fromkeys(("s", "seconds"), _S), **dict.fromkeys(("ms", "milliseconds"), _MS),
    **dict.fromkeys(("µs", "us", "microseconds"), _US),
    "%": {"fraction": 0.01}, "percent": {"fraction": 0.01}, "GiB": {"bytes": 2.0**30}, "GB": {"bytes": 1e9},
    "MiB": {"bytes": 2.0**20}, "MB": {"bytes": 1e6}, "tokens/s": {"tokens/s": 1.0},
    **dict.fromkeys(("kernels", "launches", "copies", "steps", "instances"), _COUNT),
}  # fmt: skip
_NUMBER = r"(?:\d{1,3}(?:[,\s]\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_CLAIM = re.compile(
    rf"(?<![\w.])(?<!\d,)(?P<low>{_NUMBER})(?:\s*(?:–|-|to)\s*(?P<high>{_NUMBER}))?(?:\s*±\s*{_NUMBER})?"
    rf"\s*(?P<noun>[a-z/]+\s+)??(?P<unit>{'|'.join(map(re.escape, _UNITS))})(?!\w|/(?!step\b))"
)
#: Where sentences end; words after which another clause begins, where they are between two numbers.
_SENTENCE, _JOINS = re.compile(r"\n|;|\.\s|\.$"), re.compile(r"\s(?:and|while|but)\s")
_IF = "if|unless|when|once|assuming|after|on"
#: Where the words about one number end. What begins with a condition, or takes something back, goes on.
_ENDS = re.compile(rf"[,:()](?!\s*(?:{_IF}|which|not|except|unlike|compared|instead)\b)")
#: How a sentence starts that says first of what all its numbers are: up to a comma, or with such a word.
_LEADS = re.compile(
    rf".*,\W*$|\W*(?:{_IF}|with|using|by|before|in|during|for|under|without)\b", re.IGNORECASE | re.DOTALL
)
_OF = r"\s+\w+=(?:'[^']*'|[^\s,;:]+)"
#: A figure's own name; one that is a plain word, too, says what it is of.
_NAMED = re.compile(
    rf"\b(?:{'|'.join(name for name in FIGURES if '_' in name)})\b(?:{_OF})*|\b(?:{'|'.join(FIGURES)})\b(?:{_OF})+"
)
_MORE, _LESS = r"(?:more than|over|above|at least)\s+$", r"(?:less than|under|below|at most)\s+$"
_CLOCK = r"\b(?:un)?profiled\b|(?:without|under|with) (?:the|a) profiler"
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
    keeps kept take takes took need needs time kernels gpu run runs spend spends spent during within
    long length lasts last each per share total profile estimated measured capture holds which finding
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
    text = re.sub(r"(?<=[^\n]{50})\n(?=[a-z\d])", " ", text)  # a line that is full goes on
    numbers, claims = list(_CLAIM.finditer(text)), []
    lead, last, unit = "", "", ""
    for place, number in enumerate(numbers):
        following = numbers[place + 1].start() if place + 1 < len(numbers) else None
        before = _SENTENCE.split(text[numbers[place - 1].end() if place else 0 : number.start()])
        after = _SENTENCE.split(text[number.end() : following])
        goes_on = place > 0 and len(before) == 1
        head, clause = _cut_last(before[-1], is_between=goes_on)
        if not goes_on:
            lead, last, unit = (head, "", "") if _LEADS.match(head) else ("", head, number["unit"])
        claim, last = _judged(
            evidence, number, lead, head, clause,
            _cut_first(after[0], is_between=following is not None and len(after) == 1),
            last if number["unit"] == unit else "",
        )  # fmt: skip
        claims.append(claim)
        unit = number["unit"]
    return Claims(tuple(claims))


def _cut_last(words: str, *, is_between: bool) -> tuple[str, str]:
    """Returns the words before a number, cut where the clause begins that the number is of."""
    ends, joins = list(_ENDS.finditer(words)), list(_JOINS.finditer(words))
    ends += joins if is_between and len(joins) == 1 else []
    cut = max((one.end() for one in ends), default=0)
    return words[:cut], words[cut:]


def _cut_first(words: str, *, is_between: bool) -> str:
    """Returns the words behind a number, up to where its clause ends."""
    joins = _JOINS.split(words)
    return _ENDS.split(joins[0] if is_between and len(joins) == 2 else words)[0]


def _judged(
    evidence: Evidence, number: re.Match[str], lead: str, head: str, clause: str, after: str, last: str
) -> tuple[Claim, str]:
    """Returns the claim of a number, and the words that name its figure.

    Args:
        evidence: what may hold it.
        number: with its unit.
        lead: words about all numbers of the sentence.
        head: what stands between the number before and ``clause``.
        clause: the words before the number.
        after: those behind it.
        last: those about the number before.
    """
    named, words = list(_NAMED.finditer(head + clause)), " ".join(f"{clause}{number[0]}{after}".split())
    before, behind = clause.lower(), f" {number['noun'] or ''}{after.lower()}"
    before = f"{_unless_said(evidence, lead.lower(), before + behind)} {before}"
    if named:
        name = named[-1]
        start = max((one.end() for one in _ENDS.finditer(head[: name.start()])), default=0)
        around = f"{lead if start else ''} {head[start:] + clause}".replace(name[0], " ").lower()
        questions, is_clear = [] if _unknown(_bare(around) + behind) else [name[0]], True
        words = " ".join(f"{name[0]} {number[0]}{after}".split())
    else:
        questions, is_clear = _questions(evidence, before, behind, number["unit"])
    if not questions and not named and (left_out := _left_out(evidence, last.lower(), before + behind)):
        before = f"{left_out} {before}"
        questions, is_clear = _questions(evidence, before, behind, number["unit"])
    asked = [_asked(evidence, question) for question in questions]
    answers = tuple(one for one in asked if one.cannot_answer is None)
    lacks = [one.cannot_answer for one in asked if one.cannot_answer and one.cannot_answer.why != MEASURED]
    verdicts = {_holds(number, before, one) for one in answers}
    if verdicts == {True} or (verdicts == {False} and is_clear and not lacks):
        return Claim(words, True in verdicts, answers), before + behind
    said = "The figures of these words differ, or are not known so closely" if answers else "These words name no figure"
    why = CannotAnswer(said, "nsys-analyze ask --list, and one of its names in the text")
    return Claim(words, None, answers, lacks[0] if lacks else why), before + behind


def _left_out(evidence: Evidence, last: str, words: str) -> str:
    """Returns the words about the number before, less what the words about this one say anew."""
    left = _unless_said(evidence, last, words)
    return left if left != last or not re.sub(_CLOCK, "", words).split() or "of which" in words else ""


def _unless_said(evidence: Evidence, before: str, words: str) -> str:
    """Returns what words said before, less what others say anew: another phase, another clock."""
    values = [*_values(evidence), ("clock", "", _CLOCK)]
    anew = {key for key, _, pattern in values if re.search(pattern, words)}
    for key, _, pattern in values:
        before = re.sub(pattern, " ", before) if key in anew else before
    return before


def _bare(words: str) -> str:
    """Returns words without those that compare a number with a figure."""
    return re.sub(f"{_MORE}|{_LESS}", " ", words)


def _unknown(words: str) -> set[str]:
    """Returns the words that are not understood."""
    return set(re.findall(r"[a-z][\w/-]*", re.sub(_CLOCK, "", words))) - _EMPTY


def _asked(evidence: Evidence, question: str) -> Answer:
    try:
        return ask(evidence, question)
    except ConfigurationError as error:
        return Answer(question, RestsOn(""), cannot_answer=CannotAnswer(error.message, error.hint))


def _questions(evidence: Evidence, before: str, behind: str, unit: str) -> tuple[list[str], bool]:
    """Returns the questions that words may mean, and whether they say of which part of the capture."""
    before, behind = before.replace("'s ", " "), behind.replace("'s ", " ")
    words = f"{before} {unit} {behind}"
    rest = re.sub(r"\b(?:kernel time|makes? up|accounts? for)\b", " ", _bare(before) + behind)
    said: dict[str, str] = {}
    for key, value, pattern in _values(evidence):
        if re.search(pattern, rest) and (key != "cause" or "idl" in words):
            if key in said:
                return [], False
            said[key], rest = value, re.sub(pattern, " ", rest)
    if re.search(r"\bmfu\b", words):  # of a training that of its step
        said.setdefault("phase", STEP)
    profiled = re.search(r"\bprofiled|with the profiler|under the profiler", words)
    unprofiled = re.search("unprofiled|without (?:the|a) profiler", words)
    found = []
    for name, named in FIGURES.items():
        says, without = re.compile(rf"\b(?:{named.says})\b"), "unprofiled" in name or "estimated" in name
        is_named = bool(named.says and unit_of(name) in _UNITS[unit] and says.search(words))
        is_named = is_named and not _unknown(says.sub(" ", rest))
        if not is_named or (profiled and without) or (unprofiled and not without):
            continue
        is_other = name in _ON_CPU and ("on the gpu" in words or "kernels" in rest)
        is_other = is_other or (unit == "copies" and "memcpy" not in named.kinds)
        if is_other or ("kernel time" in words and named.path.startswith("step")):
            continue
        keys = {key.strip("[]"): key[0] != "[" for key in keys_of(name)}  # and whether it is required
        pairs = dict(said)
        if named.path.startswith(("step", "findings")) and pairs.get("phase") == "step":
            del pairs["phase"]
        if not {key for key, required in keys.items() if required and key != "phase"} <= pairs.keys() <= keys.keys():
            continue
        if not said and "phase" in keys:  # "it takes 5 ms": what does?
            continue
        parts = [""] if "phase" in pairs or "phase" not in keys else ["step"] if keys["phase"] else ["", "step"]
        for part in parts:
            asked = {**pairs, **({"phase": part} if part else {})}
            found.append(" ".join((name, *(f"{key}={shlex.quote(value)}" for key, value in asked.items()))))
    # Of "1,300 kernels a step" the text before may say whose they are; of "30% of the step" it does not.
    of_step = re.search(rf"(?:{_WORDS['step']}|mfu)\b.*\n|of (?:the|a|each|every) (?:\w+ )?step", f"{before}\n{behind}")
    whose = "class" in said or said.get("phase") != "step" or of_step is not None
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
    ends = [re.sub(r"[,\s]", "", text) for text in (number["low"], number["high"] or number["low"])]
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
