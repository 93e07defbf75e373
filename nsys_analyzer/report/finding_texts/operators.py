"""Writes the sentences of findings about operators that take longer than they should, or that a step does not need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nsys_analyzer.analysis.findings.fewer_operators import (
    COPY_SAVINGS,
    CopiesFigures,
    FusedFunction,
    SplitOperatorsFigures,
    UnfusedChainsFigures,
)
from nsys_analyzer.analysis.findings.finding import FindingFigures, FindingTexts
from nsys_analyzer.analysis.findings.operators import (
    CausalMaskFigures,
    Fp32OperatorsFigures,
    MemoryFormatFigures,
    MisalignedFigures,
    OperatorsFigures,
    SlowOperatorsFigures,
)
from nsys_analyzer.analysis.findings.padding import PaddingFigures
from nsys_analyzer.analysis.findings.redundant_work import (
    ZERO_WORK_SAVINGS,
    RedundantWorkFigures,
    WorkOnZerosFigures,
)
from nsys_analyzer.analysis.operators.redundancy import Redundancy
from nsys_analyzer.analysis.operators.shape_reasons import ALIGNMENT_BYTES, MEMORY_FORMAT_SAVINGS, Reason
from nsys_analyzer.report.finding_texts.waits import list_lines
from nsys_analyzer.report.units import format_count, format_ms, rounded, rounded_percent, shorten_shapes
from nsys_analyzer.text import Text, format_bytes, phrase

#: The most operators of a chain in a sentence.
_MAX_OPERATORS_OF_CHAIN = 8


def _say_time(figures: OperatorsFigures) -> str:
    """Returns the calls, their time, and their attainable time if it is known, as sentences."""
    calls = format_count(figures.calls, "operator call")
    take = "takes" if figures.calls == 1 else "take"
    time = f"In each step, {calls} {take} {format_ms(figures.ms)} ({rounded_percent(figures.share)} of the step)"
    if math.isnan(figures.attainable_ms):
        return f"{time}."
    return f"{time}. The attainable time of these operators on this GPU is {format_ms(figures.attainable_ms)}."


def _say_operators(figures: OperatorsFigures) -> tuple[str, ...]:
    """Returns a sentence for each named operator."""
    return tuple(
        f"{time.operator} ({shorten_shapes(time.shapes)}, {format_count(time.calls, 'call')}) "
        f"takes {format_ms(time.ms)}"
        + ("." if math.isnan(time.attainable_ms) else f"; its attainable time is {format_ms(time.attainable_ms)}.")
        for time in figures.operators
    )


class _RedundancyWords(NamedTuple):
    """The words for one kind of redundant work."""

    title: str
    cause: str
    remedy: tuple[str, ...]
    disproof: str


_REDUNDANCY: Mapping[Redundancy, _RedundancyWords] = {
    "recomputed": _RedundancyWords(
        "Activations are recomputed in the backward pass",
        "The backward pass runs parts of the forward pass again, because their activations were not kept. "
        "Recomputation saves {memory}: keep the checkpoints if the activations do not fit.",
        (
            "x = block(x)  # instead of checkpoint(block, x); model.gradient_checkpointing_disable() in transformers",
            "x = checkpoint(block, x) if i % 2 else block(x)  # if only a part of the activations fits",
        ),
        "Leave out the checkpoints in a run with a small batch: if the step is no shorter, the recomputation does not "
        "limit it.",
    ),
    "no_backward": _RedundancyWords(
        "A forward pass keeps activations that nothing uses",
        "Autograd records the graph of a forward pass, but no backward pass reads its activations.",
        (
            "with torch.no_grad():              # keeps no activations",
            "    loss = evaluate(model, batch)  # and run it every N steps, not in each step",
        ),
        "Leave the pass out of a run: if the step is no shorter, the pass does not limit it.",
    ),
    "unused": _RedundancyWords(
        "Results are computed that nothing uses",
        "No later operator, no parameter and no value that the program keeps depends on the results.",
        ("# delete the lines that compute these results, or compute them only in the steps that use them",),
        "Delete the lines for one run: if the loss changes, the results are used.",
    ),
    "repeated": _RedundancyWords(
        "Operators run again with the same inputs",
        "The same operators already ran on the same values in this step.",
        ("y = f(x)  # compute it once per step, keep it in a variable, and use it at each place",),
        "Compare both results in one run: if they differ, the operators do not repeat each other.",
    ),
    "undone": _RedundancyWords(
        "Conversions are undone",
        "A tensor is converted to another type or memory format, and converted back without a use in between.",
        ("# delete the conversion and the conversion back, or keep the tensor in one type between both",),
        "Delete both conversions for one run: if the output changes, they are not redundant.",
    ),
    "monitoring": _RedundancyWords(
        "Each step computes values that the training does not need",
        "Neither the backward pass nor the optimizer depends on these values. The program computes them for metrics, "
        "for an evaluation or for a log.",
        ("if step % 50 == 0:  # not in each step\n    log(metrics(logits, targets))",),
        "Leave the values out of a run: if the step is no shorter, computing them does not limit it.",
    ),
}


def describe_redundant_work(figures: RedundantWorkFigures) -> FindingTexts:
    """Returns the sentences of the finding on work that a step does not need."""
    words = _REDUNDANCY[figures.kind]
    calls, take = format_count(figures.calls, "operator call"), "takes" if figures.calls == 1 else "take"
    where = f" in {format_count(figures.modules, 'module')}" if figures.modules > 1 else ""
    where += f" of the class {figures.module}" if where and figures.module else ""
    pauses = "" if figures.kind == "recomputed" else "pauses between these launches and still "
    memory = f"about {format_bytes(figures.kept_bytes)} of memory" if figures.kept_bytes else "memory"
    return FindingTexts(
        title=words.title,
        evidence=(
            words.cause.format(memory=memory),
            f"In each step, {calls}{where} {take} {format_ms(figures.ms)} ({rounded_percent(figures.share)} of the "
            f"step). The operator with the most time is {figures.operators[0].operator}.",
        ),
        derivation="The step is replayed without this work, its launches and the CPU's time between these launches. "
        f"The lower bound assumes that the program still {pauses}spends the CPU's time before the first launch. The "
        "upper bound assumes that this time is saved as well.",
        remedy=words.remedy,
        disproof=words.disproof,
    )


def describe_work_on_zeros(figures: WorkOnZerosFigures) -> FindingTexts:
    """Returns the sentences of the finding on operators that work on tensors which are mostly zeros."""
    share, what = rounded_percent(figures.zero_share), "rows" if figures.in_rows else "elements"
    least, most = map(rounded_percent, ZERO_WORK_SAVINGS)
    return FindingTexts(
        title=f"Operators work on tensors with {share} zeros",
        evidence=(
            _say_time(figures),
            f"The program fills a tensor with zeros and writes only some of its {what} at the named line. Other "
            "operators then work on the whole tensor, or on values that are multiplied by it.",
            *_say_operators(figures)[:2],
        ),
        derivation=f"The step is replayed without {least} to {most} of the work on zeros. The rest is assumed to "
        "remain, because a fix moves rows by their index, or keeps some spare rows.",
        remedy=(
            "rows = x.index_select(0, token)  # only the rows that are used, instead of all rows",
            "capacity = math.ceil(1.25 * tokens / experts)  # rows of a buffer; torch._grouped_mm needs no padding",
        ),
        disproof="Make the tensor smaller for one run: if the step is no shorter, the zeros do not limit it.",
    )


def describe_padding(figures: PaddingFigures) -> FindingTexts:
    """Returns the sentences of the finding on padding in batches."""
    behind = figures.share_behind_longest
    remedy = (
        "loader = DataLoader(data, collate_fn=DataCollatorWithPadding(tokenizer))  # pads to the longest row",
        "args = TrainingArguments(..., group_by_length=True)  # batches of rows with similar lengths",
        "# or no padding: several rows in one row (packing), with attention that takes cu_seqlens or position_ids",
    )
    return FindingTexts(
        title=f"{rounded_percent(figures.share)} of the tokens are padding",
        evidence=(
            f"In one step, {format_count(figures.batches, 'batch')} with {format_count(figures.tokens, 'token')} "
            f"{'was' if figures.batches == 1 else 'were'} examined. Rows have up to {figures.length} tokens, of which "
            f"up to {figures.longest} are no padding. Operators on these tokens take {format_ms(figures.ms)}.",
            f"{rounded_percent(behind)} of the tokens are behind the end of the longest row of their batch."
            if behind
            else "Each batch is padded to its longest row.",
        ),
        derivation="The step is replayed with less work on the tokens. The lower bound removes the padding behind the "
        "longest row of each batch. The upper bound removes all padding, and the time of attention shrinks with the "
        "square of the length of a row. The optimizer's work remains.",
        remedy=remedy if behind else remedy[1:],
        disproof="Cut the batches to their longest row for one run, or use rows of equal lengths: if the step is no "
        "shorter, the padding does not limit it.",
    )


def describe_misaligned(figures: MisalignedFigures) -> FindingTexts:
    """Returns the sentences of the finding on sizes that do not suit tensor cores."""
    padded = " and ".join(f"{size} padded to {larger}" for size, larger in figures.sizes)
    sizes = ", ".join(str(size) for size, _ in figures.sizes)
    noun = "The size" if len(figures.sizes) == 1 else "The sizes"
    return FindingTexts(
        title=f"{noun} {sizes} {'does' if len(figures.sizes) == 1 else 'do'} not suit tensor cores",
        evidence=(
            _say_time(figures),
            f"The matrices of these operators have rows of {sizes} elements, whose size is not a multiple of "
            f"{ALIGNMENT_BYTES} bytes. Tensor cores and the fastest loads of kernels need such a multiple.",
            *_say_operators(figures)[:1],
        ),
        derivation=f"The step is replayed with {padded}. The attainable time is then "
        f"{format_ms(figures.padded_ms)}. The lower bound assumes that the padded operators exceed this time by "
        "the same ratio as the other matmuls of the step exceed their attainable times.",
        remedy=tuple(
            f"{size} -> {larger}  # pad this size: vocabulary, features or tokens; ignore the padding in the loss"
            for size, larger in figures.sizes
        ),
        disproof="Pad the sizes for one run: if the step is no shorter, the alignment does not limit it.",
    )


def describe_memory_format(figures: MemoryFormatFigures) -> FindingTexts:
    """Returns the sentences of the finding on images that are stored by channel."""
    bounds, origin = " to ".join(map(rounded_percent, MEMORY_FORMAT_SAVINGS)), figures.origin
    title = "Images are stored by channel (NCHW), not as channels_last"
    reason = (
        "The strides of the tensors show that each channel is stored separately. Convolutions on tensor cores "
        "transpose such tensors, and norms of channels read them in small pieces."
    )
    compared = "above their attainable time"
    remedy: tuple[str, ...] = (
        "model = model.to(memory_format=torch.channels_last)",
        "images = images.to(memory_format=torch.channels_last)",
    )
    if origin:
        title = f"Images are stored by channel (NCHW) after {origin}, although convolutions use channels_last"
        reason = (
            "Most convolutions of the step have tensors in channels_last. From the named line on, the strides show "
            "images that are stored by channel. Later operators copy them into the other format, or read them in small "
            "pieces."
        )
        compared = "above that of the same operators in channels_last in this step, or else above the attainable time"
        remedy = (
            "x = x.contiguous(memory_format=torch.channels_last)  # or leave .contiguous() out",
            "y = torch.zeros_like(x)  # keeps the format of x, unlike torch.zeros(x.shape)",
            remedy[1],
        )
    return FindingTexts(
        title=title,
        evidence=(_say_time(figures), reason, *_say_operators(figures)[:2]),
        derivation=f"The step is replayed without {bounds} of the time of these operators {compared}. "
        + (
            "Copies between both formats count as a whole."
            if origin
            else "A ResNet-50 in bf16 on an H100 saved 87 % of this time."
        ),
        remedy=remedy,
        disproof="After the change, no kernel is named nchwToNhwc. If the step is no shorter then, the memory format "
        "does not limit it.",
    )


def describe_fp32_operators(figures: Fp32OperatorsFigures) -> FindingTexts:
    """Returns the sentences of the finding on operators that multiply in fp32."""
    return FindingTexts(
        title="Operators multiply in fp32, without tensor cores",
        evidence=(_say_time(figures), *_say_operators(figures)[:2]),
        derivation=f"The step is replayed with the attainable time of these operators in TF32, "
        f"{format_ms(figures.tf32_ms)}, and in bf16, {format_ms(figures.bf16_ms)}.",
        remedy=(
            'torch.set_float32_matmul_precision("high")  # TF32: 10 bits of mantissa in the factors',
            "# or, with 7 bits: with torch.autocast('cuda', torch.bfloat16): ...",
        ),
        disproof="After the change, the names of the kernels contain tf32 or bf16. If the step is no shorter then, "
        "these operators do not limit it.",
    )


def describe_causal_mask(figures: CausalMaskFigures) -> FindingTexts:
    """Returns the sentences of the finding on attention with a causal mask."""
    return FindingTexts(
        title="Attention reads a causal mask",
        evidence=(
            _say_time(figures),
            "The program makes a mask from one triangle of a matrix, and attention reads it. So attention computes all "
            "scores. If attention knows that it is causal, its kernels skip half of them and read no mask.",
            *_say_operators(figures)[:2],
        ),
        derivation="The step is replayed without the operators that make the mask. The time of attention that remains "
        "is its attainable time with all scores, or half of it.",
        remedy=("y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # and no attn_mask",),
        disproof="Compare the outputs of both calls in one run: if they differ, the mask hides other tokens as well.",
    )


#: The name of each function of PyTorch that replaces a chain, and a line to type.
_FUSED_FUNCTIONS: Mapping[FusedFunction, tuple[str, str]] = {
    "log_softmax": (
        "A log-softmax",
        "loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())  # or F.log_softmax(logits, -1)",
    ),
    "softmax": ("A softmax", "y = x.softmax(-1)"),
    "rms_norm": ("A norm", "y = F.rms_norm(x, x.shape[-1:], weight)  # or F.layer_norm"),
    "gelu": ("GELU", 'y = F.gelu(x, approximate="tanh")'),
}


def describe_unfused_chains(figures: UnfusedChainsFigures) -> FindingTexts:
    """Returns the sentences of the finding on chains of operators that one kernel could replace."""
    names = figures.longest_chain
    named_operators = ", ".join(names[:_MAX_OPERATORS_OF_CHAIN])
    hidden = len(names) - _MAX_OPERATORS_OF_CHAIN
    hidden_count = f" and {hidden} more" if hidden > 0 else ""
    moved_gb, needed_gb = figures.moved_bytes / 1e9, figures.needed_bytes / 1e9
    title, remedy = "Chains of operators are not fused", list[str]()
    if figures.function:
        name, line = _FUSED_FUNCTIONS[figures.function]
        title, remedy = f"{name} is computed by separate operators", [line]
    if figures.module:
        remedy.append("model = torch.compile(model)  # or block.compile() for each block: it compiles faster")
    else:
        remedy.append(f"{figures.place or 'f'} = torch.compile({figures.place or 'f'})  # fuses the function")
    recompiled: tuple[Text, ...] = ()
    if figures.recompiles:
        title = "torch.compile recompiles a function, and its chains of operators are not fused"
        sentence = "torch.compile compiled this function, but its guards failed in later steps (recompilations)"
        limit = "After 8 recompilations, torch.compile runs the function without compiling it."
        recompiled = (phrase("{} {}", list_lines(sentence, figures.recompiles), limit),)
        remedy = [
            "self.step = torch.zeros((), device='cuda')  # a tensor, updated in place: no guard on its value",
            "torch._dynamo.config.error_on_recompile = True  # raises an error at the first recompilation",
        ]
    least_time = "attainable time of that function" if figures.function else "time of the longest operator"
    launches = "" if figures.saves_launches else " Launching limits the step, so no launch is saved."
    return FindingTexts(
        title=f"{title} in {figures.place}" if figures.place else title,
        evidence=(
            *recompiled,
            f"In each step, {format_count(figures.calls, 'operator call')} in {format_count(figures.chains, 'chain')} "
            f"take {format_ms(figures.ms)} ({rounded_percent(figures.share)} of the step). Each chain reads what it "
            "has just written.",
            f"The chain with the most time consists of {named_operators}{hidden_count}.",
            f"The operators read and write {rounded(moved_gb)} GB. Without the values that only the chains read, "
            f"{rounded(needed_gb)} GB remain.",
        ),
        derivation=f"The step is replayed with one kernel for each chain. The kernel takes between the {least_time} "
        "and the time of the two longest operators of the chain, but at least the time to read and write the "
        f"remaining bytes: {format_ms(figures.least_ms)} to {format_ms(figures.two_longest_ms)} for all "
        f"chains.{launches}",
        remedy=tuple(remedy),
        disproof="After the change, fewer kernels replace the chains. If the step is no shorter then, the chains do "
        "not limit it.",
    )


def describe_copies(figures: CopiesFigures) -> FindingTexts:
    """Returns the sentences of the finding on copies of tensors."""
    least, most = COPY_SAVINGS
    return FindingTexts(
        title="Tensors are copied" + (f" in {figures.place}" if figures.place else ""),
        evidence=(_say_time(figures), *_say_operators(figures)),
        derivation=f"The step is replayed without {rounded_percent(least)} to {rounded_percent(most)} of the copies. "
        "At most one of several consecutive copies remains.",
        remedy=(
            "x = x.transpose(1, 2)  # a view: leave .contiguous() out until a kernel asks for it",
            "x = x.expand(n, -1)    # instead of x.repeat(n, 1), and write into a buffer instead of torch.cat",
        ),
        disproof="Leave the copies out for one run: if the step is no shorter, or an operator then fails, they are "
        "necessary.",
    )


def describe_split_operators(figures: SplitOperatorsFigures) -> FindingTexts:
    """Returns the sentences of the finding on operators that run on many parts of their data."""
    return FindingTexts(
        title=f"Operators run {figures.parts} times on parts of their data",
        evidence=(
            f"{_say_time(figures)} If each of them ran once on all of its data, the attainable time would be "
            f"{format_ms(figures.merged_ms)}.",
            f"Each group of {figures.parts} calls is at one line, and no call needs the result of another call.",
            *_say_operators(figures),
        ),
        derivation=f"The step is replayed with one launch instead of {figures.parts}, and with the time of the "
        "operators reduced by the same factor as their attainable time. The lower bound assumes that each removed "
        "launch saves the usual time of a launch. The upper bound assumes that the program's own time before the next "
        "launch is saved as well.",
        remedy=(
            "# one call for all parts: torch.bmm or torch.stack, torch._foreach_*, torch.vmap",
            "# or, for gradient accumulation: fewer and larger micro-batches, if the memory suffices",
        ),
        disproof="Merge two parts into one: if the step is no shorter, the number of parts does not limit it.",
    )


#: The sentence on each reason why operators are slow, and a line to type.
_SLOW_REASONS: Mapping[Reason | None, tuple[str, str]] = {
    None: ("", "# compare with: torch.utils.benchmark.Timer of this operator with contiguous inputs"),
    "efficient_attention": (
        "This is PyTorch's memory-efficient attention. PyTorch chooses it instead of FlashAttention if a mask is a "
        "tensor, or if the operands are in fp32.",
        "out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # in bf16, without attn_mask",
    ),
    "reduction": (
        "The operator reduces over elements that are not adjacent in memory.",
        "x = x.transpose(0, 1).contiguous()  # store the reduced dimension last, where x is made",
    ),
    "many_kernels": (
        "Each call launches {kernels:.0f} kernels on average.",
        "# use one operator that computes the same result, or torch.compile for the function that calls the operator",
    ),
}


def describe_slow_operators(figures: SlowOperatorsFigures) -> FindingTexts:
    """Returns the sentences of the finding on operators that take longer than attainable."""
    first = figures.operators[0]
    reason, remedy = _SLOW_REASONS[figures.reason]
    reasons = (reason.format(kernels=figures.kernels_per_call),) if reason else ()
    least, most = figures.savings
    return FindingTexts(
        title=f"{first.operator} takes longer than attainable",
        evidence=(_say_time(figures), *_say_operators(figures), *reasons),
        derivation=f"The step is replayed without {rounded_percent(least)} to {rounded_percent(most)} of the time "
        "above the attainable time. The attainable time follows from times of similar operators that were measured on "
        f"the {figures.gpu}, or on another GPU and scaled by the peaks.",
        remedy=(remedy,),
        disproof="Time the operator alone with these shapes: if it takes as long, PyTorch's kernel is the limit.",
    )


TEXTS: dict[type[FindingFigures], Callable[[Any], FindingTexts]] = {
    RedundantWorkFigures: describe_redundant_work,
    PaddingFigures: describe_padding,
    WorkOnZerosFigures: describe_work_on_zeros,
    CausalMaskFigures: describe_causal_mask,
    Fp32OperatorsFigures: describe_fp32_operators,
    MemoryFormatFigures: describe_memory_format,
    MisalignedFigures: describe_misaligned,
    UnfusedChainsFigures: describe_unfused_chains,
    CopiesFigures: describe_copies,
    SplitOperatorsFigures: describe_split_operators,
    SlowOperatorsFigures: describe_slow_operators,
}
