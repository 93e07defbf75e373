"""The permission of ``share``: PyTorch's names, kernels that a rule knows and phases stay; all else has an alias."""

from __future__ import annotations

import csv
import lzma
import random
import re
import shlex
import string
from collections.abc import Callable

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
    without_secrets,
)
from nsys_analyzer.trace.metadata import _NO_CUDA, is_irrelevant_message
from nsys_analyzer.trace.phase_names import (
    DEFAULT_NAMES,
    PhaseNames,
    find_module_role,
    is_framework_name,
    normalize_name,
)
from tests.conftest import DATA

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


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (
            RANGE,
            ["", "ProfilerStep#3", "nccl:all_reduce", "ncclCommInitRankConfig", "layer_3", "Block 4", "h.0",
             "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "DistributedDataParallel.forward",
             "step[DECODE bs=32]", "execute_context_1(80)_generation_31(31)", "cub::DeviceScan::InclusiveScan",
             "nn.Module: Sequential/0.layers.1.linear1: Linear", "torch.optim.adamw.AdamW.step"],
        ),
        (
            OPERATOR,
            ["aten::mm", "AddmmBackward0", "autograd::engine::evaluate_function: MulBackward0", "c10d::allreduce_",
             "torch::autograd::AccumulateGrad", "CompiledFunctionBackward", "Torch-Compiled Region: 0/0"],
        ),
        (
            KERNEL,
            ["unknown kernel 17", "void at::native::(anonymous namespace)::unheard_of<float>(float)",
             "triton_poi_fused_0", "_ZN2at6native13reduce_kernelILi512EEEvT_",
             "void f_gemm<(int)4, true>(float const*, unsigned long) [clone .kd]"],
        ),
        (CALL, ["cudaLaunchKernel_v7000", "cuLaunchKernelEx", "hipMemcpyWithStream", "aten::copy_"]),
        (THREAD, ["python3", "pt_autograd_0", "cuda-EvtHandlr"]),
        (
            PROFILER_EVENT,
            ["CUPTI Buffer flush", "CUDA profiling data flush on cudaProfilerStop", "PyTorch Profiler (0)"],
        ),
    ],
)  # fmt: skip
def test_names_that_stay(role: str, names: list[str]) -> None:
    assert [name for name in names if shown(name, role) != name] == []


def test_a_string_with_two_roles_stays_where_both_allow_it() -> None:
    scrubber = Scrubber()
    assert scrubber.scrub_name("cudaFree", CALL) == "cudaFree"
    assert scrubber.scrub_name("cudaFree", CALL, RANGE) == "alias b"


def test_the_numbers_behind_an_operator_stay_but_long_ones() -> None:
    assert shown("aten::mm, seq = 4111111111111111, op_id = 12", OPERATOR) == "aten::mm, seq = 0, op_id = 12"


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


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("forward of ann", "alias b"),  # a name of the program's own, and no phase
        ("Backward_Pass #3, lr=s3cr3t", "backward pass, alias b"),
        ("Iteration 3, of ann", "iteration 3, alias b"),
        ("step, 4 of /data/ann/x7.bin", "step, alias b"),  # which number counts steps is not known
        ("step[DECODE of ann]", "step, alias b"),
        ("load, sizes of /data/ann/x.bin, seq = 12", "alias b, seq = 12"),
        ("fetch batch of ann 17", "alias b loading 17"),
        ("of ann 3/10", "alias b 3/10"),
        ("ann #3", "alias b #3"),
        ("192.168.17.4", "alias b"),
        ("pin 123456", "alias b"),
        ("step 1234567", "step, alias b"),
        ("call 555-936-0087", "alias b"),
        ("ann_block 3", "alias_b_block 3"),
        ("prefetch_ann_stage_4", "alias_b_loading_stage_4"),
        ("nn.Module: AnnAttention_12", "nn.Module: alias_bAttention_12"),
        ("nn.Module: Ann/h.11.ann_1: Conv1D", "nn.Module: alias_b/alias_c.11.alias_d_1: alias_f"),
        ("nn.Module: Ann/0.layers.3.self_attn: Identity", "nn.Module: alias_b/0.layers.3.self_attn: Identity"),
        ("nn.Module: /ann/10.21.33.44/Conv: Conv2d", "nn.Module: /alias_b/alias_c/alias_d: Conv2d"),
        ("nn.Module: 0.4111.1111.1111.1111: Linear", "nn.Module: alias_b: Linear"),
        ("nn.Module: layers.3.1.0.5550.9360: Linear", "nn.Module: layers.alias_b: Linear"),
        ("nn.Module: experts.3.w_123456: Linear_12345", "nn.Module: alias_b.3.alias_c: Linear_12345"),
        ("torch.optim.lr_scheduler.AnnsLR.step", "torch.optim.lr_scheduler.alias_b.step"),  # it is no optimizer
        ("torch.optim.ann.AnnsAdam.step", "torch.optim.alias_b.step"),
        ("Optimizer.step#AnnsAdam.step", "Optimizer.step#alias_b.step"),
        ("torch.nn.modules.AnnNet.forward", "torch.nn.modules.alias_b.forward"),
        ("autograd::engine::evaluate_function: AnnFnBackward", "autograd::engine::evaluate_function: alias_bBackward"),
        ("AnnFnBackward", "alias_bBackward"),
    ],
)  # fmt: skip
def test_an_alias_has_the_role_of_its_name(name: str, alias: str) -> None:
    text = shown(name)
    assert text == alias
    assert PhaseNames().find_role(text) == PhaseNames().find_role(name)
    for role in (
        is_framework_name,
        is_loading,
        find_module_role,
        _NUMBERED_BLOCK.fullmatch,
        _FUNCTION_RANGES["optimizer"].fullmatch,
    ):
        assert bool(role(text)) == bool(role(name)), role
    assert shown(text) == text  # a copy of the copy is the same


@pytest.mark.parametrize("number", ["10.21.33.44", "4111-1111-1111-1111", "4111111111111111", "5550.9360.8700"])
def test_a_kernel_that_holds_an_address_or_a_card_is_renamed(number: str) -> None:
    assert shown(f"my_softmax_{number}_kernel", KERNEL) == "alias b (softmax)"


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


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("CUDA profiling might have not been started correctly.", None),
        ("CUDA injection initialization failed.", None),
        (
            "Installed CUDA driver version (13.0) is not supported by this build of Nsight Systems. "
            "CUDA trace will be collected using libraries for driver version 12.4",
            None,
        ),
        ("CUDA tracing is not supported.", None),
        ("Some CUPTI events might be missing, see /home/ann/run.log", "Some CUPTI events might be missing …"),
        ("CPU sampling is not allowed to ann", "… about sampling"),
        ("password: 1234", "…"),
    ],
)
def test_the_sentences_of_a_message(text: str, left: str | None) -> None:
    message = Scrubber().scrub_message(text)
    assert message == (left or text)
    assert is_irrelevant_message(message) is is_irrelevant_message(text)
    for pattern, _ in _NO_CUDA:
        assert bool(pattern.search(message)) is bool(pattern.search(text))


def test_messages_that_differ_stay_different() -> None:
    """A report says the same message once."""
    scrubber = Scrubber()
    assert [scrubber.scrub_message(text) for text in ("of ann", "of zelda", "of ann")] == ["…", "… (2)", "…"]


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3", None),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("AMD Instinct MI300X", None),
        ("Intel(R) Xeon(R) Platinum 8480C", None),
        ("12th Gen Intel(R) Core(TM) i7-12700F", None),
        ("AMD EPYC 7763 64-Core Processor", None),
        ("Ubuntu 24.04.3 LTS", None),
        ("2025.3.2.0", None),
        ("535.104.05.01", None),
        (".pt.trace.json.gz", None),
        ("GPU-a7d00f32-64fa-041e-83fb-5546b548f523", "…"),
        ("Rocky Linux 8.9 (Green Obsidian)", "Rocky Linux 8.9 …"),
        ("Linux 5.4 at 10.0.0.7 of ann", "Linux 5.4 …"),
    ],
)
def test_the_words_of_a_machine(text: str, readable: str | None) -> None:
    assert Scrubber().scrub_property(text) == (readable or text)


def test_every_gpu_whose_peaks_are_known_stays() -> None:
    names = [f"{maker}{peaks.name}" for peaks in PEAKS for maker in ("", "NVIDIA ")]
    assert [Scrubber().scrub_property(name) for name in names] == names


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("python src/train.py --data data/a --lr 0.1 lr=0.1 --n 1,2", None),
        ("--max-tokens 512 --tokenizer gpt2 --num-key-value-heads 8 --passes 3 --author ann", None),
        ("--api-key SECRET --password=a,SECRET --hf_token SECRET", "--api-key … --password=… --hf_token …"),
        ("HF_TOKEN=SECRET wandb.api_key=SECRET --api-key --verbose", "HF_TOKEN=… wandb.api_key=… --api-key --verbose"),
        ("s3://ann:SECRET@host/b ann:SECRET@host hf_0SECRET0", "s3://…@host/b …@host …"),
        ("'https://host/x?token=SECRET&a=1' user@host:/path", "'https://host/x?token=…&a=1' user@host:/path"),
        ("bash -c 'train --api-key SECRET --lr 3'", "bash -c 'train --api-key … --lr 3'"),
        ("--nsys-option=--env-var=A=1,HF_TOKEN=SECRET", "--nsys-option=--env-var=A=1,HF_TOKEN=…"),
        ("-H 'Authorization: Bearer SECRET'", "-H 'Authorization: … …'"),
    ],
)
def test_a_command_of_ones_own_is_kept_without_its_secrets(typed: str, shown: str | None) -> None:
    assert without_secrets(shlex.split(typed)) == shlex.split(shown or typed)
