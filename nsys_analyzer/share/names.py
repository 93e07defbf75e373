"""Decides which texts of a trace may leave the machine, and gives every other one an alias that keeps its role.

A name stays by permission alone: it is PyTorch's or a kernel's that a rule knows, the spelling of a phase or a step, a
call of a module of ``torch.nn``, or one that the caller allows. Nothing else is searched for
secrets: it gets an alias. An alias tells what the analysis needs of its name: the phase with its number, the class and
precision of a kernel, the place of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from nsys_analyzer.analysis.kernels.class_rules import CLASSES
from nsys_analyzer.analysis.kernels.classes import (
    LOADING_MARK,
    LONGEST_NAME,
    Alias,
    demangle,
    find_package_rule,
    find_precision,
    read_alias,
)
from nsys_analyzer.analysis.steps.process import is_loading
from nsys_analyzer.analysis.transformer.peaks import find_peaks
from nsys_analyzer.trace.columns import UNNAMED_KERNEL
from nsys_analyzer.trace.metadata import is_irrelevant_message
from nsys_analyzer.trace.phase_names import (
    DEFAULT_NAMES,
    MODULE_RANGE_PREFIX,
    MODULE_RANGE_WITH_PATH,
    PhaseNames,
    normalize_module_name,
    normalize_name,
    parse_served_step,
)
from nsys_analyzer.trace.stacks import CLOCK_RANGE

#: Stands where something was taken out.
REMOVED_MARK = "…"

#: What a string of a trace is the name of; it stays where each of its roles allows it.
KERNEL, CALL, RANGE, OPERATOR, THREAD, PROFILER_EVENT = "kernel", "call", "range", "operator", "thread", "noted"

# --- PyTorch's names

#: The classes of torch.nn, those of one, two and three dimensions as one.
_MODULE = re.compile(
    r"(?:Lazy)?(?:Conv(?:Transpose)?|BatchNorm|InstanceNorm)[123]d|(?:Adaptive)?(?:Avg|Max)Pool[123]d|LPPool[123]d"
    r"|MaxUnpool[123]d|FractionalMaxPool[23]d|(?:Circular|Constant|Reflection|Replication|Zero)Pad[123]d|Dropout[123]d"
    r"|(?:Lazy)?Linear|(?:Feature)?(?:Alpha)?Dropout|(?:RNN|LSTM|GRU)(?:Cell)?|RNN(?:Cell)?Base"
    r"|(?:Layer|RMS|Group|SyncBatch|LocalResponse|CrossMapLR)Norm|CrossMapLRN2d"
    r"|Upsample|Upsampling(?:Bilinear|Nearest)2d|(?:Module|Parameter)(?:List|Dict)|Transformer(?:(?:En|De)coder(?:Layer)?)?"
    r"|Pixel(?:Un)?[Ss]huffle|ChannelShuffle|AdaptiveLogSoftmaxWithLoss|(?:Log)?Softmax|Softmax2d|(?:Log)?Sigmoid"
    r"|(?:BCE|BCEWithLogits|CTC|CosineEmbedding|(?:Linear)?CrossEntropy|GaussianNLL|HingeEmbedding|Huber|KLDiv|L1|MSE"
    r"|MarginRanking|MultiLabel(?:Soft)?Margin|MultiMargin|NLL|PoissonNLL|Smooth(?:L1)|SoftMargin|TripletMargin"
    r"|TripletMarginWithDistance)Loss|NLLLoss2d|C?ELU|GELU|GLU|[LPRS]?ReLU6?|LeakyReLU|RReLU|SELU|SiLU|Mish|Tanh(?:shrink)?"
    r"|Hard(?:shrink|sigmoid|swish|tanh)|Soft(?:min|plus|shrink|sign)|Threshold|Bilinear|Container|CosineSimilarity"
    r"|PairwiseDistance|(?:Distributed)?DataParallel|Embedding(?:Bag)?|(?:Unf|F)latten|(?:Unf|F)old|Identity|Module"
    r"|MultiheadAttention|Sequential"
)
_OPTIMIZER = r"(?:ASGD|Ada(?:delta|factor|grad|m|mW|max)|LBFGS|Muon|NAdam|Optimizer|RAdam|RMSprop|Rprop|SGD|SparseAdam)"
#: The parts of torch.nn's own transformer, as a path of modules holds them.
_PART = re.compile(
    r"(?:en|de)coder|layers?|self_attn|multihead_attn|out_proj|(?:linear|norm|dropout|conv|bn|fc|act)\d{0,2}|relu"
)
#: A node of autograd; one that PyTorch generates has a number behind it, a Function of a program has none.
_NODE = (
    r"(?:torch::autograd::)?(?:[A-Z]\w{0,80}Backward\d|AccumulateGrad|CopySlices|GraphRoot|Error"
    r"|(?:Checkpoint|Compiled)Function(?:Backward)?)"
)
_TORCH = re.compile(
    r"(?:aten|prims?|_?c10d(?:_functional)?|_dtensor|symm_mem|quantized|mkldnn|onednn|inductor|torchvision|fbgemm)"
    r"::[a-z_]\w{0,80}(?:\.\w{1,40})?"
    rf"|(?:autograd::engine::evaluate_function: )?{_NODE}"
    r"|torch\.(?:nn\.functional|Tensor|autograd|cuda|distributed|linalg)\.[a-z_]{1,40}"
    rf"|torch\.optim\.(?:[a-z_]{{1,20}}\.)?{_OPTIMIZER}\.(?:step|zero_grad)"
    rf"|torch\.nn\.modules\.(?:[a-z_]{{1,20}}\.)?(?:{_MODULE.pattern})\.(?:forward|__call__)"
    rf"|{re.escape(MODULE_RANGE_PREFIX)}(?:{_MODULE.pattern})_\d{{1,6}}|DistributedDataParallel\.forward"
    rf"|Optimizer\.(?P<does>step|zero_grad)#{_OPTIMIZER}\.(?P=does)|ProfilerStep#\d{{1,7}}"
    r"|enumerate\(DataLoader\)#_(?:SingleProcess|MultiProcessing)DataLoaderIter\.__next__"
    r"|Torch-Compiled Region: \d{1,4}/\d{1,4}|TorchDynamo Cache Lookup|Pregraph bytecode|detach_?|record_param_comms"
    r"|AOTDispatcher Runtime Wrapper Prologue|triton_(?:poi|red|per|tem|for)_fused_[a-z0-9_]{0,200}"
    r"|(?:nccl|gloo|mpi|ucc|xccl):_?(?:all|reduce|gather|scatter|broadcast|send|recv|barrier|coalesced)[a-z_]{0,24}"
    r"|nccl[A-Z][A-Za-z]{2,40}|cub::Device\w{3,30}(?:::\w{3,30})?"
    r"|\[CUDA mem(?:set|cpy [A-Z][a-z]{3,5}-to-[A-Z][a-z]{3,5})\]"
    r"|Mem(?:cpy \w{1,6} \((?:Pinned|Pageable|Device|Array|Unknown|Managed) -> \w{1,10}\)|set \(\w{1,10}\))"
)
#: The words of the steps of engines that serve models, and of requests by their numbers.
_OF_ENGINE = re.compile(
    r"(?:[\W\d_]|execute|executeStep|model|context|generation|step|sq|sk|sqsq|sqsk|EXTEND|DECODE|MIXED|TARGET|VERIFY|DRAFT"
    r"|SPLIT|PREFILL|bs|toks?|c|g|p|d|spec|tbo|ctx|tokens|reqs|gen|eager|prefill|decode|Executor|forward|inferred)+"
)
_REQUEST = re.compile(r"(?:first token of )?request \d{1,6}")

# --- other names

#: The functions of libraries and drivers, and the threads that they, Python and PyTorch start.
_API = re.compile(r"(?:cuda|cu|hip|hsa|nccl|rccl|cublas|cudnn)[A-Z]\w{0,80}|runFunction")
#: What profilers say of their own work: "CUPTI Buffer flush", "CUDA profiling data flush on cudaProfilerStop".
_NOTED = re.compile(
    r"(?i:(?:activity|allocation|buffer|chunk|command|compiler|context|created|cudaprofilerstop|cuinit|cupti|cuda|data|"
    r"driver|early|exit|finished|flush|full|function|init|initialization|instrumentation|lazy|loading|management|memory|"
    r"module|nvtx|on|process|profiler|profiling|pytorch|request|resource|runtime|tls|triggered|unknown|unrecognized|uvm)"
    r"(?: |$))+(?:\(\d{1,3}\))?"
)
_THREAD = re.compile(
    r"python[\d.]{0,6}|pt_(?:autograd|data|main|nccl|elastic|tcpstore)\w{0,12}|cuda-EvtHandlr|cuda\d{8,14}"
    r"|\[NSys(?: Comms)?\]|CUPTI worker thread"
)
#: What code is written with, C++ or mangled: no path, no quote, no address of a person.
_CODE = re.compile(r"[\w\s:<>(){}\[\],.*&~#$=+\-!|?^%]+", re.ASCII)
#: The outermost namespaces in a readable name; of templates' arguments, too.
_NAMESPACE = re.compile(r"(?<![\w:.-])([\w.-]+)::(?!\()")
#: A whole name of a kernel that is no C++ with arguments: one identifier, or as Triton and rocBLAS write theirs.
_IDENTIFIER = re.compile(r"[\w.:$-]+", re.ASCII)
#: The libraries whose namespaces no example of a rule has.
_LIBRARIES = re.compile(
    r"at|aten|at_cuda_detail|c10d?|mkldnn|const|cub|cuda|std|thrust|torch|cute|cutlass\w*|cask\w*|xmma\w*|cu(?:sparse|solver|fft|dnn|blas|blasLt|tensor|te|pti)\w*|nv\w{2,8}"
    r"|T\d{1,2}|_INTERNAL_[0-9a-f]{8}_\d{1,3}_[A-Z][A-Za-z]{1,30}_cu_[0-9a-f]{8}|CUTENSOR_NAMESPACE|PyTorchMemEffAttention"
    r"|layer_norm|moe|vision|genericReformat|aiter|sgl_hip|tensorrt_llm|dali|vllm|flash|flashinfer|fbgemm_gpu"
    r"|transformer_engine|deep_ep|dpsk|grouped_gemm|stream_executor|ck|ck_tile|hip\w*|roc\w*|rocblas|internal|epilogue|detail|native|pytorch_(?:flash|fmha)|caffe2|flash_\w*|triton|xla|jax"
)
#: A range of one of several layers.
_BLOCK = re.compile(r"(?i)(?P<before>\w*?)(?P<block>(?:block|layer|stage|decoder|encoder|h)s?[\s._-]*\d{1,4})")
_OUR_BLOCKS = ("", "transformer_", "transformer")

# --- the parts of names

#: The numbers behind an autograd annotation: a trace has a million of them, and they tell nothing.
_ANNOTATION = r", *(?:seq|op_id|sizes|input_op_ids) *="
_NUMBERS = re.compile(rf"(?:{_ANNOTATION}(?:[\d\[\](),]|(?<![\d-])[ -])*)+")
#: No counter and no size has more digits in a row; keys and cards have.
_LONG_NUMBER = re.compile(r"\d(?:[ -]*\d){12,}")
#: Numbers of people and of telephones, as they are written in groups.
_PERSONAL = re.compile(r"(?<!\d)\d{3}(?P<dash>[ -])\d{2,4}(?P=dash)\d{4}(?!\d)")
_ADDRESS_OR_CARD = re.compile(r"(?<!\d)(?:\d{1,3}(?:\.\d{1,3}){3}|\d(?:[ .-]?\d){11,18})(?!\d)")
#: The number at the end that tells the names of one loop or of one row of layers apart, and what stands before it. A
#: name with a longer number is no such one: it may be an address, a telephone, a card.
_COUNTED = re.compile(r"(?P<stem>.*?[\s_\-\[a-z])(?P<number>#?\d{1,5}(?:(?:/| of )\d{1,5})?)", re.DOTALL)
_OTHER_NUMBER = re.compile(r"\d{6}|\d{3}\D+\d")
_LONGEST_PHASE = 100
#: Names that begin so have a role by that beginning, and by what follows the rest.
_BEGINS = re.compile(
    rf"{re.escape(MODULE_RANGE_PREFIX)}|Optimizer\.(?:step|zero_grad)#|ProfilerStep#"
    r"|torch\.(?:nn\.modules|nn|optim\.(?:lr_scheduler|swa_utils)|optim|autograd|Tensor)\."
    r"|autograd::engine::evaluate_function: |torch::autograd::"
)
_WORD = re.compile(
    r"(?P<stem>.*?)(?P<behind>(?:Attention|Backward)?(?:(?:[_#]|(?<=[a-z]))\d{1,5})?"
    r"(?:\.(?:step|zero_grad|forward|__call__))?)",
    re.DOTALL,
)
#: Numbers behind each other that are no places of layers but an address or an account, and any other word.
_WORD_OF_PATH = re.compile(r"\d+(?:[/.]\d+){3,}|\d{3,}(?:[/.]\d{3,})+|[^/.]+")
_OPERATORS = "aten::"
#: The length of a number that is the place of no layer, and of one that counts no steps.
_LEAST_NO_PLACE, _LEAST_NO_COUNTER = 5, 7
_CONSONANTS = "bcdfghjklmnpqrstvwxz"  # no word comes of them


def is_public(text: str, role: str) -> bool:
    """Returns whether a name of a role stays as it is."""
    if "\0" in text or _PERSONAL.search(text):
        return False
    if not text or _is_alias(text) or _TORCH.fullmatch(text) or CLOCK_RANGE.fullmatch(text) or _is_phase(text):
        return True
    if role == KERNEL:
        return not _ADDRESS_OR_CARD.search(text) and _is_of_a_library(text)
    if role == CALL:
        return bool(_API.fullmatch(text))
    if role == THREAD:
        return bool(_THREAD.fullmatch(text))
    if role == PROFILER_EVENT:
        return bool(_NOTED.fullmatch(text))
    block = _BLOCK.fullmatch(text)
    return block is not None and block["before"].lower() in _OUR_BLOCKS


def _is_alias(text: str) -> bool:
    alias = read_alias(text)
    return alias is not None and (not alias.kernel_class or {alias.kernel_class, *alias.part_of} <= CLASSES.keys())


def _is_phase(text: str) -> bool:
    """Returns whether a text is the spelling of a phase and a small number, with nothing behind them."""
    if len(text) > _LONGEST_PHASE:
        return False
    is_cut = "," in text or text.startswith("Optimizer.")  # what stands behind is not looked at
    is_counted = all(len(number) < _LEAST_NO_COUNTER for number in re.findall(r"\d+", text))
    is_spelled = not is_cut and is_counted and normalize_name(text) in _spellings()
    by_engine = parse_served_step(text) is not None and _OF_ENGINE.fullmatch(text) and not _LONG_NUMBER.search(text)
    return is_spelled or bool(by_engine or _REQUEST.fullmatch(text))


@cache
def _spellings() -> frozenset[str]:
    return frozenset(spelling for spellings in DEFAULT_NAMES.values() for spelling in spellings)


def _is_of_a_library(kernel: str) -> bool:
    """Returns whether a kernel is known by a rule or PyTorch's, and all of its namespaces are those of libraries."""
    if kernel.startswith(UNNAMED_KERNEL):
        return kernel[len(UNNAMED_KERNEL) :].strip().isdigit()
    if not (_IDENTIFIER if not {"(", "<"} & set(kernel) else _CODE).fullmatch(kernel):
        return False
    spaces = _NAMESPACE.findall(demangle(kernel[:LONGEST_NAME]))
    known = all(map(_LIBRARIES.fullmatch, spaces))
    return known and (find_package_rule(kernel) is not None or spaces[:1] in (["at"], ["c10"]))


@dataclass(frozen=True)
class Renaming:
    """A name, or a word of a module's path, that has an alias: the text, and the alias in its place."""

    text: str
    alias: str


class Scrubber:
    """Gives the names of one trace their aliases. Names that differ stay different.

    Args:
        keep: names that match one of these as a whole stay as they are.

    Attributes:
        renamed: what has an alias, in the order of the export; of names that differ in their number the first.
    """

    def __init__(self, keep: Sequence[re.Pattern[str]] = ()) -> None:
        self._keep = keep
        self._shown: dict[tuple[str, frozenset[str]], str] = {}
        self._codes: dict[str, str] = {}
        self._used: dict[str, str] = {}
        self.renamed: list[Renaming] = []

    def scrub_name(self, text: str, *roles: str) -> str:
        """Returns a name of some roles, or its alias."""
        numbers = re.search(_ANNOTATION, text)
        head = text[: numbers.start()] if numbers and _NUMBERS.fullmatch(text, numbers.start()) else text
        key = (head, frozenset(roles))
        if key not in self._shown:
            allowed = "\0" not in head and any(pattern.fullmatch(head) for pattern in self._keep)
            stays = allowed or all(is_public(head, role) for role in roles)
            self._shown[key] = self._distinct(head, head if stays else self._alias(head))
        return self._shown[key] + _LONG_NUMBER.sub("0", text[len(head) :])

    def scrub_message(self, text: str) -> str:
        """Returns a message of the profiler: those sentences that profilers are known to write."""
        sentences = [match[0] for match in _SENTENCE.finditer(text)]
        if sentences and not _SENTENCE.sub("", text).strip(" .\t\n"):
            return text
        shown = f"{'. '.join(sentences)} {REMOVED_MARK}{' about sampling' * is_irrelevant_message(text)}".strip()
        return self._distinct(text, shown)  # the same message twice is said once

    def scrub_property(self, text: str) -> str:
        """Returns a property of the machine or the recording: names of products, and versions."""
        if find_peaks(text):
            return text
        shown = " ".join(word if _PRODUCT.fullmatch(word) else REMOVED_MARK for word in text.split(" "))
        return re.sub(f"{REMOVED_MARK}(?: {REMOVED_MARK})+", REMOVED_MARK, shown)

    def _distinct(self, text: str, shown: str) -> str:
        """Returns what is shown, numbered where it already stands for another name."""
        alias, times = shown, 1
        while self._used.setdefault(alias, text) != text:
            times += 1
            alias = f"{shown} ({times})"
        return alias

    def _alias(self, name: str) -> str:
        if module := MODULE_RANGE_WITH_PATH.fullmatch(normalize_module_name(name)):
            path = _WORD_OF_PATH.sub(lambda word: self._word(word[0]), module["path"])
            return f"{MODULE_RANGE_PREFIX}{path}: {self._word(module['kind'])}"
        if begins := _BEGINS.match(name):
            return begins[0] + self._word(name[begins.end() :])
        if block := _BLOCK.fullmatch(name):
            loading = f"_{LOADING_MARK}" if is_loading(name) else ""
            return f"{self._word(block['before'].rstrip('_'))}{loading}_{block['block']}"
        rule = find_package_rule(name)
        if rule is None and name.isidentifier() and name.endswith("Backward"):
            return self._word(name)
        told = Alias(rule.kernel_class, rule.part_of, find_precision(name)) if rule else Alias()
        if before := _phase_of(name):
            return before + told.text(self._code(name, "alias "))
        counted = None if _OTHER_NUMBER.search(name) else _COUNTED.fullmatch(name)
        stem, number = counted.groups() if counted else (name, "")
        loading = f" {LOADING_MARK}" if is_loading(name) else ""
        return f"{told.text(self._code(stem, 'alias ', name))}{loading} {number}".rstrip()

    def _word(self, word: str) -> str:
        """Returns a word of a name, or an alias in its place that keeps what the word says of its part in the model."""
        match = _WORD.fullmatch(word)
        assert match is not None  # its stem takes any text
        stem, behind = match.groups()
        if (word.isdigit() and len(word) < _LEAST_NO_PLACE) or any(map(_is_word_of_torch, (word, stem))):
            return word
        return f"alias_{self._code(stem, 'alias_')}{behind}"

    def _code(self, text: str, before: str, name: str = "") -> str:
        """Returns the letters that stand for a text; a new one is listed, with the name that it is of."""
        if text not in self._codes:
            left, code = len(self._codes), ""
            while left or not code:
                left, letter = divmod(left, len(_CONSONANTS))
                code = _CONSONANTS[letter] + code
            self._codes[text] = code
            self.renamed.append(Renaming(name or text, before + code))
        return self._codes[text]


def _is_word_of_torch(word: str) -> bool:
    return bool(_MODULE.fullmatch(word) or _PART.fullmatch(word)) or (_is_phase(word) and word.isidentifier())


def _phase_of(name: str) -> str:
    """Returns what stands before the alias of a phase: its spelling, and its number where the name has no other."""
    if name.startswith((_OPERATORS, UNNAMED_KERNEL)):
        return _OPERATORS if name.startswith(_OPERATORS) else f"{UNNAMED_KERNEL}, "
    phase = PhaseNames().find_role(name)
    if phase is None:
        return ""
    spelling = normalize_name(name)
    numbers = re.findall(r"\d+", name)
    number = f" {numbers[0]}" if len(numbers) == 1 and len(numbers[0]) < _LEAST_NO_COUNTER else ""
    return f"{spelling if spelling in _spellings() else DEFAULT_NAMES[phase][0]}{number}, "


# --- messages and properties

_OF = r"(?:CUDA|NVTX|CUPTI|OpenGL|Vulkan|OS runtime libraries|cuDNN|cuBLAS|cuSPARSE|MPI|UCX|OpenMP|OpenACC|NCCL|Python)"
#: What nsys writes of a recording, and our own converter of PyTorch's traces.
_SENTENCE = re.compile(
    rf"Not all {_OF} events might have been collected|No {_OF} events collected\. Does the process use {_OF}\?"
    rf"|{_OF} profiling might have not been started correctly|{_OF} injection initialization failed"
    rf"|Some (?:{_OF} )?events might be missing|Some events \(\s*\d{{1,12}}\) were lost"
    r"|Installed CUDA driver version \([\d.]{1,12}\) is not supported by this build of Nsight Systems"
    r"|CUDA trace will be collected using libraries for driver version \d{1,3}\.\d{1,3}"
    r"|CUDA tracing is not supported|Unified Memory trace is not supported"
    r"|[\d.]{1,6}\s?% of the operators' own time lies between the operators that they call, outside each one's longest "
    r"stretch, and is not counted"
    r"|The machine has a GPU, and the trace holds nothing that ran there: the times are those of the CPU"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
#: The words of what vendors call GPUs, CPUs, systems and profilers; models, sizes and versions, but no address.
_PRODUCT = re.compile(
    r"NVIDIA|AMD|INTEL\(R\)|Intel\(R\)|Microsoft|Tesla|Quadro|GeForce|GRID|TITAN|RTX|GTX|SUPER|Ti|Laptop|GPU|CPU|Ada"
    r"|Generation|PCIe|NVL|MIG|VF|Max-Q|Instinct|Radeon|Graphics|Iris\(R\)|Xe|MTIA|unnamed|unknown|Graphics|Orin|Thor"
    r"|(?i:Xeon\(R\)|Core\(TM\)|Platinum|Gold|Silver|Bronze|Processor|Ultra|Gen|EPYC|Ryzen|Threadripper|PRO|@)|V"
    r"|Neoverse(?:-\w\d)?|Apple|Grace|Max|Ubuntu|LTS|Debian|GNU/Linux|CentOS|Fedora|Rocky|AlmaLinux|SUSE|Red|Hat"
    r"|Enterprise|Server|Stream|Amazon|Linux|Windows|Nsight|Systems|torch\.profiler|CUDA|HIP|XPU|Intel|GpuCtxSw"
    r"|Cuda|NvtxEvents|CuBLAS|CuDNN|CpuCycles|OSRuntime|(?i:graph|node)|(?:\.(?:pt|trace|json|gz))+"
    rf"|(?!{_OCTET}(?:\.{_OCTET}){{3}}$)\d{{1,8}}(?:\.\d{{1,8}}){{0,3}}(?:\+[a-z]{{2,4}}\d{{0,3}}|GHz|gb|GB|th)?"
    r"|\d{1,3}-Core|(?:(?:[A-Zivw]|[A-Z]{2,3})\d{1,5}[A-Za-z]{0,2}|\d{1,5}[A-Za-z]{1,2})"
    r"(?:[-.](?:[A-Z]{1,4}\d{0,4}|\d{1,5}[A-Za-z]{0,2})){0,2}"
)

# --- command lines

#: What an option or a variable is called that gives a secret, in its name and at its end.
_SECRET = r"key|token(?!s|iz)|secret|pass|cred|auth|cookie|sign|pwd"
_OF_A_SECRET = re.compile(rf"(?i)[\w.+-]*(?:{_SECRET}|sig|bearer)(?:word|wd|phrase|s|entials?|orization|nature)?:?")
#: Who logs in at an address, and keys that are known by how they begin.
_LOGIN = re.compile(
    r"(?<=://)[^\s/@]+@|[^\s/@:]+:[^\s/@]+@|\b(?:sk|hf|gh[a-z]|github_pat|glpat|nvapi|xox[a-z])[-_](?=\S*\d)[\w-]{8,}"
)
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z0-9_.-]{0,40}")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line of one's own: its paths stay, keys and passwords do not."""
    shown = []
    for option, word in pairwise(("", *words)):
        name, given, value = word.partition("=")
        parts = re.split(r"([\s,;?&'\"]+)", word)
        if given and re.fullmatch(r"[\w.+-]+", name):
            shown.append(
                f"{name}={REMOVED_MARK if _OF_A_SECRET.fullmatch(name) else ''.join(without_secrets([value]))}"
            )
        elif _OF_A_SECRET.fullmatch(option) and not _OPTION.fullmatch(word):
            shown.append(REMOVED_MARK)
        elif len(parts) > 1:
            parts[::2] = without_secrets(parts[::2])
            shown.append("".join(parts))
        else:
            shown.append(_LOGIN.sub(lambda found: f"{REMOVED_MARK}@" if found[0].endswith("@") else REMOVED_MARK, word))
    return shown
