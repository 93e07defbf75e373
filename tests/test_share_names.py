"""The permission of ``share``: PyTorch's names, kernels that a rule knows and phases stay; all else has an alias."""

from __future__ import annotations

import csv
import lzma
import random
import re
import shlex
import string
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nsys_analyzer.analysis.kernels.class_rules import RULES, Rule
from nsys_analyzer.analysis.kernels.classes import classify, find_possible_classes, find_precision, find_rule
from nsys_analyzer.analysis.ranges.calls import _NUMBERED_BLOCK
from nsys_analyzer.analysis.ranges.inference import _FUNCTION_RANGES
from nsys_analyzer.analysis.steps.process import is_loading
from nsys_analyzer.analysis.transformer.peaks import PEAKS
from nsys_analyzer.share.names import (
    CALL,
    KERNEL,
    OPERATOR,
    PROFILER_EVENT,
    RANGE,
    THREAD,
    Renaming,
    Scrubber,
    is_public,
    remove_secrets,
)
from nsys_analyzer.trace.metadata import _CUDA_MESSAGES, is_irrelevant_message
from nsys_analyzer.trace.phase_names import (
    DEFAULT_NAMES,
    PhaseNames,
    find_module_role,
    is_framework_name,
    normalize_name,
)
from tests.conftest import DATA, ROOT

ROLES = (KERNEL, CALL, RANGE, OPERATOR, THREAD, PROFILER_EVENT)
Draw = Callable[[random.Random], str]
_ALNUM = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"


def shown(text: str, role: str = RANGE) -> str:
    return Scrubber().scrub_name(text, role)


# --- what stays


def test_every_kernel_and_operator_of_the_corpus_that_a_rule_knows_stays() -> None:
    """But those in namespaces that are no library's: 40 of 3,600."""
    with lzma.open(DATA / "kernel_pairs.tsv.xz", "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    known = {row["name"] for row in rows if find_rule(row["name"])}
    assert len(known) > 3000
    assert len([name for name in known if not is_public(name, KERNEL)]) < 0.015 * len(known)
    operators = {row["operator"] for row in rows if row["operator"].startswith(("aten::", "c10d::"))}
    assert [name for name in operators if not is_public(name, OPERATOR)] == []


def test_every_spelling_of_a_phase_stays() -> None:
    spellings = [text for texts in DEFAULT_NAMES.values() for text in texts]
    forms = "{}", "{} #3", "{} 3/10", "## {} ##"
    written = [form.format(text) for text in spellings for form in forms]
    written += [form for text in spellings for form in (text.title(), text.replace(" ", "_"))]
    assert [text for text in written if not is_public(text, RANGE)] == []


def test_every_class_of_torch_stays() -> None:
    """And no other: the list is that of the PyTorch that is installed."""
    modules = [name for name, of in vars(torch.nn).items() if isinstance(of, type) and issubclass(of, torch.nn.Module)]
    optimizers = [name for name, of in vars(torch.optim).items() if isinstance(of, type)]
    names = [f"nn.Module: {name}_3" for name in modules]
    names += [f"torch.nn.modules.{name}.forward" for name in modules]
    names += [f"Optimizer.step#{name}.step" for name in optimizers] + [
        f"torch.optim.{name}.step" for name in optimizers
    ]
    assert len(names) > 300
    assert [name for name in names if shown(name) != name] == []


SHOWN: dict[str, Callable[[str], str]] = {
    **{
        kind: partial(shown, role=role)
        for kind, role in (
            ("ranges", RANGE), ("operators", OPERATOR), ("kernels", KERNEL), ("calls", CALL), ("threads", THREAD),
            ("events of the profiler", PROFILER_EVENT),
        )
    },
    "messages": lambda text: Scrubber().scrub_message(text),
    "machines": lambda text: Scrubber().scrub_property(text),
}  # fmt: skip


def read_shown() -> Iterator[tuple[str, str, str]]:
    """Yields the kind of each text of the case file, the text, and what is shown of it."""
    kind = ""
    for line in (ROOT / "tests/cases/shared_names.txt").read_text(encoding="utf-8").splitlines():
        if not line.strip().startswith("#") and line.strip():
            text, _, instead = line.strip().partition(" → ")
            if line.startswith(" "):
                yield kind, text, instead or text
            else:
                kind = text


@pytest.mark.parametrize(("kind", "text", "instead"), read_shown())
def test_what_is_shown(kind: str, text: str, instead: str) -> None:
    """It keeps its role, and a copy of the copy is the same."""
    if kind == "commands":
        assert remove_secrets(shlex.split(text)) == shlex.split(instead)
        return
    found = SHOWN[kind](text)
    assert found == instead
    assert SHOWN[kind](found) == found
    if kind == "ranges":
        assert PhaseNames().find_role(found) == PhaseNames().find_role(text)
        block, optimizer = _NUMBERED_BLOCK.fullmatch, _FUNCTION_RANGES["optimizer"].fullmatch
        for role in (is_framework_name, is_loading, find_module_role, block, optimizer):
            assert bool(role(found)) == bool(role(text)), role
    if kind == "messages":
        assert is_irrelevant_message(found) is is_irrelevant_message(text)
        for pattern, _ in _CUDA_MESSAGES:
            assert bool(pattern.search(found)) is bool(pattern.search(text))


def test_a_range_without_a_name_stays_without_one() -> None:
    assert shown("") == ""


def test_a_string_with_two_roles_stays_where_both_allow_it() -> None:
    scrubber = Scrubber()
    assert scrubber.scrub_name("cudaFree", CALL) == "cudaFree"
    assert scrubber.scrub_name("cudaFree", CALL, RANGE) == "alias b"


@pytest.mark.parametrize(
    ("text", "kept"),
    [("/srv/x", "/srv/x"), ("/srv/x\nof ann", "/srv/x\nof ann"), ("see /srv/x", "alias b"), ("/srv/x\0A=b", "alias b")],
)
def test_names_that_are_allowed(text: str, kept: str) -> None:
    """As a whole; what holds variables of an environment never."""
    assert Scrubber([re.compile("/srv/.*", re.DOTALL)]).scrub_name(text, RANGE) == kept


# --- what leaves


def drawn(letters: str, length: int) -> Draw:
    return lambda random: "".join(random.choices(letters, k=length))


def joined(*parts: str | Draw) -> Draw:
    return lambda random: "".join(part if isinstance(part, str) else part(random) for part in parts)


#: Keys, people, machines and places.
FAMILIES: dict[str, Draw] = {
    "hugging face": joined("hf_", drawn(string.ascii_letters, 34)),
    "aws secret": drawn(f"{_ALNUM}+/", 40),
    "uuid": joined(drawn(_HEX, 8), "-", drawn(_HEX, 4), "-41a2-", drawn(_HEX, 4), "-", drawn(_HEX, 12)),
    "small words": joined(drawn(string.ascii_lowercase, 7), "_", drawn(string.ascii_lowercase, 6)),
    "phone": joined("555-", drawn("123456789", 3), "-", drawn("123456789", 4)),
    "home": joined("/home/", drawn(string.ascii_lowercase, 6), "/run.py"),
    "mail": joined(drawn(string.ascii_lowercase, 6), "@hyrule.org"),
    "address": joined("10.1", drawn("123456789", 2), ".1", drawn("123456789", 2), ".", drawn("123456789", 2)),
    "card": drawn("123456789", 16),
    "class": joined(drawn(string.ascii_uppercase, 1), drawn(string.ascii_lowercase, 8), "Net"),
}
#: Where one may stand in a name.
PLACES = (
    "{}", "forward {}", "forward, {}", "upload_{}", "step 3 ({})", "load: {}", "step[{}]", "models.{}.forward",
    "execute_context_1({})_generation_1(",
    "aten::mm {}", "aten::mm, seq = 3, {}", "nn.Module: {}_3", "nn.Module: Net/{}.0: Linear",
    "nn.Module: Linear/0: {}", "Optimizer.step#{}.step", "torch.nn.modules.{}.forward", "ProfilerStep#{}", "{}Backward",
    "autograd::engine::evaluate_function: {}Backward", "{}_block 3", "unknown kernel {}", "{}\0A=b", "[[{}]]", "{} 17",
    "void {}::softmax_kernel<float>(int)", "void at::native::softmax<{}::T>(int)", "forward" + 500 * " " + "{}",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_owner_is_left_in_a_name(family: str) -> None:
    """20 of each family, in each place and role; the number at the end of a name may stay, five digits at most."""
    numbers = random.Random(f"2025 {family}")
    left = []
    for _ in range(20):
        secret = FAMILIES[family](numbers)
        parts = [part for part in re.split(r"[^A-Za-z0-9]+", secret) if len(part) > 3 and part != "home"] or [secret]
        for place in PLACES:
            for role in ROLES:
                name = shown(place.format(secret), role)
                left += [(place, role, name) for part in parts if part in name.removesuffix(secret[-4:])]
    assert left == []


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_owner_is_left_in_a_message(family: str) -> None:
    numbers = random.Random(f"2026 {family}")
    for _ in range(20):
        secret = FAMILIES[family](numbers)
        assert Scrubber().scrub_message(f"Profiling failed at {secret} twice") == "…"
        assert (
            Scrubber().scrub_message(f"CUDA tracing is not supported on {secret}.") == "CUDA tracing is not supported …"
        )
        assert secret not in Scrubber().scrub_property(f"NVIDIA {secret}")


# --- what an alias tells


@pytest.mark.parametrize("number", ["123-45-6789", "555-123-4567", "123 45 6789"])
@pytest.mark.parametrize("role", [KERNEL, RANGE, OPERATOR])
@pytest.mark.parametrize(
    "name",
    [
        "aten::mm, seq = {}", "aten::mm, seq = 1, op_id = {}", "aten::mm, sizes = [[{}]]", "ampere_sgemm_{}",
        "AddmmBackward0, seq={}, op_id=4", "step[DECODE bs={}]", "void at::native::foo<{}>()", "aten::{}",
    ],
)  # fmt: skip
def test_the_number_of_a_person_is_in_no_name(name: str, role: str, number: str) -> None:
    assert number not in Scrubber().scrub_name(name.format(number), role)


def test_names_of_one_loop_stay_names_of_one_loop() -> None:
    """They differ in the number at their end, by which the analysis takes them together."""
    scrubber = Scrubber()
    names = [f"{work} of ann {i}" for work in ("pack", "unpack") for i in range(3)]
    aliases = [scrubber.scrub_name(name, RANGE) for name in names]
    assert aliases == ["alias b 0", "alias b 1", "alias b 2", "alias c 0", "alias c 1", "alias c 2"]
    assert len(set(map(normalize_name, aliases))) == len(set(map(normalize_name, names))) == 2
    assert scrubber.renamed == [Renaming("pack of ann 0", "alias b"), Renaming("unpack of ann 0", "alias c")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kernel_class}-{rule.example[:30]}")
def test_an_alias_is_of_the_class_that_its_name_was(rule: Rule) -> None:
    """And in its precision; an operator may make of it what it might have of the name. A second copy is the same."""
    name = f"{rule.example} /home/ann"
    alias = shown(name, KERNEL)
    assert alias.startswith(("alias b", "aten::alias b"))
    assert (classify(alias), find_possible_classes(alias)) == (classify(name), find_possible_classes(name))
    assert find_precision(alias) == find_precision(name)
    assert shown(alias, KERNEL) == alias


@pytest.mark.parametrize(
    "name", ["of /home/ann", "unknown kernel /home/ann", "softmax, /home/ann", "forward, /home/ann"]
)
def test_an_alias_is_of_no_class_where_its_name_was_of_none(name: str) -> None:
    alias = shown(name, KERNEL)
    assert alias != name
    assert (classify(alias), find_possible_classes(alias)) == (classify(name), find_possible_classes(name))


_PARTS = st.sampled_from(
    ["/home/ann/", "block 3", "forward", "step", ", ", " ", "ann", "_", " (2)", " 17", "alias b", "alias_b", "Backward",
     "nn.Module: ", "Optimizer.step#", ".step", "A/0.x: Linear", "aten::", "softmax", "…", "load batch", "\0",
     ", seq = 3"]
)  # fmt: skip


@given(
    st.lists(st.tuples(st.lists(_PARTS, max_size=5).map("".join), st.sampled_from(ROLES)), unique_by=lambda one: one[0])
)
def test_names_that_differ_stay_different(names: list[tuple[str, str]]) -> None:
    scrubber = Scrubber()
    assert len({scrubber.scrub_name(name, role) for name, role in names}) == len(names)


@given(st.one_of(st.text(), st.lists(_PARTS).map("".join)), st.sampled_from(ROLES))
@example("alias b (everything)", KERNEL)
@example("ann's, alias b", RANGE)
def test_what_is_shown_is_allowed(text: str, role: str) -> None:
    """A second copy of any name is the first one, whatever its role."""
    once = shown(text, role)
    again = shown(once, role)
    assert re.sub(r"alias[ _][b-z]+", "alias", again) == re.sub(r"alias[ _][b-z]+", "alias", once)


# --- messages, machines and commands


def test_messages_that_differ_stay_different() -> None:
    """A report says the same message once."""
    scrubber = Scrubber()
    assert [scrubber.scrub_message(text) for text in ("of ann", "of zelda", "of ann")] == ["…", "… (2)", "…"]


def test_every_gpu_whose_peaks_are_known_stays() -> None:
    names = [f"{maker}{peaks.name}" for peaks in PEAKS for maker in ("", "NVIDIA ")]
    assert [Scrubber().scrub_property(name) for name in names] == names
