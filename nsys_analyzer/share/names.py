"""Decides which texts of a trace may leave the machine, and replaces every other text by an alias.

Only allowed names remain: names of PyTorch, kernels that match a rule, spellings of phases and steps, calls of modules
of ``torch.nn``, and names that the caller allows. Every other name gets an alias; names are not searched for secrets.
An alias contains the facts that the analysis needs: the phase with its number, the class and precision of a kernel, or
the layer.
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
    MAX_SEARCHED_CHARACTERS,
    Alias,
    demangle,
    find_built_in_rule,
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

#: Replaces removed text.
REMOVED_MARK = "…"

#: The roles of a string, which say what the string names. A string remains only if each of its roles allows the string.
KERNEL, CALL, RANGE, OPERATOR, THREAD, PROFILER_EVENT = "kernel", "call", "range", "operator", "thread", "noted"

# --- PyTorch's names

#: The classes of torch.nn.
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
#: The attributes of torch.nn's transformer modules, which occur in module paths.
_PART = re.compile(
    r"(?:en|de)coder|layers?|self_attn|multihead_attn|out_proj|(?:linear|norm|dropout|conv|bn|fc|act)\d{0,2}|relu"
)
#: A node of autograd. Names of nodes that PyTorch generates end with a number. Names of nodes of the program's own
#: Functions do not.
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
#: The words in the step names of serving engines, and the names of numbered requests.
_OF_ENGINE = re.compile(
    r"(?:[\W\d_]|execute|executeStep|model|context|generation|step|sq|sk|sqsq|sqsk|EXTEND|DECODE|MIXED|TARGET|VERIFY|DRAFT"
    r"|SPLIT|PREFILL|bs|toks?|c|g|p|d|spec|tbo|ctx|tokens|reqs|gen|eager|prefill|decode|Executor|forward|inferred)+"
)
_REQUEST = re.compile(r"(?:first token of )?request \d{1,6}")

# --- other names

#: The API functions of libraries and drivers.
_API = re.compile(r"(?:cuda|cu|hip|hsa|nccl|rccl|cublas|cudnn)[A-Z]\w{0,80}|runFunction")
#: The names of profilers' own events: "CUPTI Buffer flush", "CUDA profiling data flush on cudaProfilerStop".
_PROFILER_EVENT = re.compile(
    r"(?i:(?:activity|allocation|buffer|chunk|command|compiler|context|created|cudaprofilerstop|cuinit|cupti|cuda|data|"
    r"driver|early|exit|finished|flush|full|function|init|initialization|instrumentation|lazy|loading|management|memory|"
    r"module|nvtx|on|process|profiler|profiling|pytorch|request|resource|runtime|tls|triggered|unknown|unrecognized|uvm)"
    r"(?: |$))+(?:\(\d{1,3}\))?"
)
#: Matches the names of threads that libraries, Python and PyTorch start.
_THREAD = re.compile(
    r"python[\d.]{0,6}|pt_(?:autograd|data|main|nccl|elastic|tcpstore)\w{0,12}|cuda-EvtHandlr|cuda\d{8,14}"
    r"|\[NSys(?: Comms)?\]|CUPTI worker thread"
)
#: The characters of C++ names and mangled names. No path, quotation or mail address consists of these characters alone.
_CODE = re.compile(r"[\w\s:<>(){}\[\],.*&~#$=+\-!|?^%]+", re.ASCII)
#: Matches the outermost namespaces in a readable name, including the namespaces in template arguments.
_NAMESPACE = re.compile(r"(?<![\w:.-])([\w.-]+)::(?!\()")
#: The name of a kernel without C++ arguments: an identifier, or a name in the style of Triton or rocBLAS.
_IDENTIFIER = re.compile(r"[\w.:$-]+", re.ASCII)
#: The namespaces of libraries.
_LIBRARIES = re.compile(
    r"at|aten|at_cuda_detail|c10d?|mkldnn|const|cub|cuda|std|thrust|torch|cute|cutlass\w*|cask\w*|xmma\w*|cu(?:sparse|solver|fft|dnn|blas|blasLt|tensor|te|pti)\w*|nv\w{2,8}"
    r"|T\d{1,2}|_INTERNAL_[0-9a-f]{8}_\d{1,3}_[A-Z][A-Za-z]{1,30}_cu_[0-9a-f]{8}|CUTENSOR_NAMESPACE|PyTorchMemEffAttention"
    r"|layer_norm|moe|vision|genericReformat|aiter|sgl_hip|tensorrt_llm|dali|vllm|flash|flashinfer|fbgemm_gpu"
    r"|transformer_engine|deep_ep|dpsk|grouped_gemm|stream_executor|ck|ck_tile|hip\w*|roc\w*|rocblas|internal|epilogue|detail|native|pytorch_(?:flash|fmha)|caffe2|flash_\w*|triton|xla|jax"
)
#: The range of a numbered layer.
_BLOCK = re.compile(r"(?i)(?P<before>\w*?)(?P<block>(?:block|layer|stage|decoder|encoder|h)s?[\s._-]*\d{1,4})")
_OUR_BLOCKS = ("", "transformer_", "transformer")

# --- the parts of names

#: The numbers after an autograd annotation. A trace may contain a million different numbers, and the numbers are not
#: private.
_ANNOTATION = r", *(?:seq|op_id|sizes|input_op_ids) *="
_NUMBERS = re.compile(rf"(?:{_ANNOTATION}(?:[\d\[\](),]|(?<![\d-])[ -])*)+")
#: A number with more digits than any counter or size, which may be a key or a card number.
_LONG_NUMBER = re.compile(r"\d(?:[ -]*\d){12,}")
#: Personal ID numbers and telephone numbers, which are written in groups.
_PERSONAL = re.compile(r"(?<!\d)\d{3}(?P<dash>[ -])\d{2,4}(?P=dash)\d{4}(?!\d)")
_ADDRESS_OR_CARD = re.compile(r"(?<!\d)(?:\d{1,3}(?:\.\d{1,3}){3}|\d(?:[ .-]?\d){11,18})(?!\d)")
#: Matches a name that ends with the counter of a loop or of layers. A longer number does not match, because it may be
#: an address, a telephone number or a card number.
_NAME_WITH_COUNTER = re.compile(r"(?P<stem>.*?[\s_\-\[a-z])(?P<number>#?\d{1,5}(?:(?:/| of )\d{1,5})?)", re.DOTALL)
_OTHER_NUMBER = re.compile(r"\d{6}|\d{3}\D+\d")
_MAX_PHASE_CHARACTERS = 100
#: Prefixes of names that tell the role of the name. The rest of the name gets an alias.
_ROLE_PREFIX = re.compile(
    rf"{re.escape(MODULE_RANGE_PREFIX)}|Optimizer\.(?:step|zero_grad)#|ProfilerStep#"
    r"|torch\.(?:nn\.modules|nn|optim\.(?:lr_scheduler|swa_utils)|optim|autograd|Tensor)\."
    r"|autograd::engine::evaluate_function: |torch::autograd::"
)
_WORD = re.compile(
    r"(?P<stem>.*?)(?P<suffix>(?:Attention|Backward)?(?:(?:[_#]|(?<=[a-z]))\d{1,5})?"
    r"(?:\.(?:step|zero_grad|forward|__call__))?)",
    re.DOTALL,
)
#: Matches a word of a module path. Several successive numbers count as one word, because they may be an address or an
#: account.
_WORD_OF_PATH = re.compile(r"\d+(?:[/.]\d+){3,}|\d{3,}(?:[/.]\d{3,})+|[^/.]+")
_OPERATOR_PREFIX = "aten::"
#: A number with at least this many digits is too long to be the index of a layer or the counter of a step.
_TOO_LONG_FOR_INDEX, _TOO_LONG_FOR_COUNTER = 5, 7
_CONSONANTS = "bcdfghjklmnpqrstvwxz"  # letters without vowels cannot form words by chance


def is_public(text: str, role: str) -> bool:
    """Returns whether a name with a role may leave the machine unchanged."""
    if "\0" in text or _PERSONAL.search(text):
        return False
    alias = read_alias(text)
    if alias and (not alias.kernel_class or {alias.kernel_class, *alias.part_of} <= CLASSES.keys()):
        return True
    if not text or _TORCH.fullmatch(text) or CLOCK_RANGE.fullmatch(text) or _is_phase(text):
        return True
    if role == KERNEL:
        return not _ADDRESS_OR_CARD.search(text) and _is_of_a_library(text)
    if role == CALL:
        return bool(_API.fullmatch(text))
    if role == THREAD:
        return bool(_THREAD.fullmatch(text))
    if role == PROFILER_EVENT:
        return bool(_PROFILER_EVENT.fullmatch(text))
    block = _BLOCK.fullmatch(text)
    return block is not None and block["before"].lower() in _OUR_BLOCKS


def _is_phase(text: str) -> bool:
    """Returns whether a text is only the spelling of a phase or of a serving step, with small numbers."""
    if len(text) > _MAX_PHASE_CHARACTERS:
        return False
    is_shortened = "," in text or text.startswith("Optimizer.")  # ``normalize_name`` ignores the end of such a text
    has_small_numbers = all(len(number) < _TOO_LONG_FOR_COUNTER for number in re.findall(r"\d+", text))
    is_phase = not is_shortened and has_small_numbers and normalize_name(text) in _spellings()
    is_served_step = (
        parse_served_step(text) is not None and _OF_ENGINE.fullmatch(text) and not _LONG_NUMBER.search(text)
    )
    return is_phase or bool(is_served_step or _REQUEST.fullmatch(text))


@cache
def _spellings() -> frozenset[str]:
    return frozenset(spelling for spellings in DEFAULT_NAMES.values() for spelling in spellings)


def _is_of_a_library(kernel: str) -> bool:
    """Returns whether a kernel matches a rule or is PyTorch's, and its name contains only namespaces of libraries."""
    if kernel.startswith(UNNAMED_KERNEL):
        return kernel[len(UNNAMED_KERNEL) :].strip().isdigit()
    if not (_IDENTIFIER if not {"(", "<"} & set(kernel) else _CODE).fullmatch(kernel):
        return False
    spaces = _NAMESPACE.findall(demangle(kernel[:MAX_SEARCHED_CHARACTERS]))
    are_public = all(map(_LIBRARIES.fullmatch, spaces))
    return are_public and (find_built_in_rule(kernel) is not None or spaces[:1] in (["at"], ["c10"]))


@dataclass(frozen=True)
class Renaming:
    """A name, or a word of a module path, and the alias that replaces it."""

    text: str
    alias: str


class Scrubber:
    """Replaces the private names of a trace by aliases. Different names get different aliases.

    Args:
        keep: patterns of names that remain unchanged. A pattern must match the whole name.

    Attributes:
        renamed: the replaced names with their aliases, in the order of the export. If names differ only in their
            counter, only the first of these names is listed.
    """

    def __init__(self, keep: Sequence[re.Pattern[str]] = ()) -> None:
        self._keep = keep
        self._public_names: dict[tuple[str, frozenset[str]], str] = {}
        self._codes: dict[str, str] = {}
        self._text_of: dict[str, str] = {}
        self.renamed: list[Renaming] = []

    def scrub_name(self, text: str, *roles: str) -> str:
        """Returns a name if its roles allow the name, else the alias of the name."""
        numbers = re.search(_ANNOTATION, text)
        head = text[: numbers.start()] if numbers and _NUMBERS.fullmatch(text, numbers.start()) else text
        key = (head, frozenset(roles))
        if key not in self._public_names:
            is_allowed = "\0" not in head and any(pattern.fullmatch(head) for pattern in self._keep)
            is_kept = is_allowed or all(is_public(head, role) for role in roles)
            self._public_names[key] = self._make_unique(head, head if is_kept else self._alias(head))
        return self._public_names[key] + _LONG_NUMBER.sub("0", text[len(head) :])

    def scrub_message(self, text: str) -> str:
        """Returns a message of the profiler, reduced to the known sentences of profilers."""
        sentences = [match[0] for match in _SENTENCE.finditer(text)]
        if sentences and not _SENTENCE.sub("", text).strip(" .\t\n"):
            return text
        reduced = f"{'. '.join(sentences)} {REMOVED_MARK}{' about sampling' * is_irrelevant_message(text)}".strip()
        return self._make_unique(text, reduced)  # a report lists equal messages only once

    def scrub_property(self, text: str) -> str:
        """Returns a property of the machine or the recording, reduced to product names and versions."""
        if find_peaks(text):
            return text
        reduced = " ".join(word if _PRODUCT.fullmatch(word) else REMOVED_MARK for word in text.split(" "))
        return re.sub(f"{REMOVED_MARK}(?: {REMOVED_MARK})+", REMOVED_MARK, reduced)

    def _make_unique(self, text: str, replacement: str) -> str:
        """Returns the replacement of a text. A number is added if the replacement already stands for another text."""
        unique, number = replacement, 1
        while self._text_of.setdefault(unique, text) != text:
            number += 1
            unique = f"{replacement} ({number})"
        return unique

    def _alias(self, name: str) -> str:
        if module := MODULE_RANGE_WITH_PATH.fullmatch(normalize_module_name(name)):
            path = _WORD_OF_PATH.sub(lambda word: self._word(word[0]), module["path"])
            return f"{MODULE_RANGE_PREFIX}{path}: {self._word(module['kind'])}"
        if prefix := _ROLE_PREFIX.match(name):
            return prefix[0] + self._word(name[prefix.end() :])
        if block := _BLOCK.fullmatch(name):
            loading = f"_{LOADING_MARK}" if is_loading(name) else ""
            return f"{self._word(block['before'].rstrip('_'))}{loading}_{block['block']}"
        rule = find_built_in_rule(name)
        if rule is None and name.isidentifier() and name.endswith("Backward"):
            return self._word(name)
        alias = Alias(rule.kernel_class, rule.part_of, find_precision(name)) if rule else Alias()
        if phase_prefix := _phase_prefix(name):
            return phase_prefix + alias.make_name(self._code(name, "alias "))
        match = None if _OTHER_NUMBER.search(name) else _NAME_WITH_COUNTER.fullmatch(name)
        stem, number = match.groups() if match else (name, "")
        loading = f" {LOADING_MARK}" if is_loading(name) else ""
        return f"{alias.make_name(self._code(stem, 'alias ', name))}{loading} {number}".rstrip()

    def _word(self, word: str) -> str:
        """Returns a word of a name, or its alias. An alias keeps the suffix, which shows the role in the model."""
        match = _WORD.fullmatch(word)
        assert match is not None  # the pattern matches any text
        stem, suffix = match.groups()
        if (word.isdigit() and len(word) < _TOO_LONG_FOR_INDEX) or any(map(_is_word_of_torch, (word, stem))):
            return word
        return f"alias_{self._code(stem, 'alias_')}{suffix}"

    def _code(self, text: str, prefix: str, name: str = "") -> str:
        """Returns the letters that replace a text, and adds a new text to ``renamed``.

        Args:
            text: the text.
            prefix: the text that precedes the letters in the alias, for the entry in ``renamed``.
            name: the name that contains the text, for the entry in ``renamed``.
        """
        if text not in self._codes:
            quotient, code = len(self._codes), ""
            while quotient or not code:
                quotient, letter = divmod(quotient, len(_CONSONANTS))
                code = _CONSONANTS[letter] + code
            self._codes[text] = code
            self.renamed.append(Renaming(name or text, prefix + code))
        return self._codes[text]


def _is_word_of_torch(word: str) -> bool:
    return bool(_MODULE.fullmatch(word) or _PART.fullmatch(word)) or (_is_phase(word) and word.isidentifier())


def _phase_prefix(name: str) -> str:
    """Returns the prefix of a phase's alias: its spelling, and its number if the name has no other number."""
    if name.startswith((_OPERATOR_PREFIX, UNNAMED_KERNEL)):
        return _OPERATOR_PREFIX if name.startswith(_OPERATOR_PREFIX) else f"{UNNAMED_KERNEL}, "
    phase = PhaseNames().find_role(name)
    if phase is None:
        return ""
    spelling = normalize_name(name)
    numbers = re.findall(r"\d+", name)
    number = f" {numbers[0]}" if len(numbers) == 1 and len(numbers[0]) < _TOO_LONG_FOR_COUNTER else ""
    return f"{spelling if spelling in _spellings() else DEFAULT_NAMES[phase][0]}{number}, "


# --- messages and properties

_OF = r"(?:CUDA|NVTX|CUPTI|OpenGL|Vulkan|OS runtime libraries|cuDNN|cuBLAS|cuSPARSE|MPI|UCX|OpenMP|OpenACC|NCCL|Python)"
#: Matches the sentences that nsys and this package's reader of PyTorch's traces write about a recording.
_SENTENCE = re.compile(
    rf"Not all {_OF} events might have been collected|No {_OF} events collected\. Does the process use {_OF}\?"
    rf"|{_OF} profiling might have not been started correctly|{_OF} injection initialization failed"
    rf"|Some (?:{_OF} )?events might be missing|Some events \(\s*\d{{1,12}}\) were lost"
    r"|Installed CUDA driver version \([\d.]{1,12}\) is not supported by this build of Nsight Systems"
    r"|CUDA trace will be collected using libraries for driver version \d{1,3}\.\d{1,3}"
    r"|CUDA tracing is not supported|Unified Memory trace is not supported"
    r"|The machine has a GPU, but the trace contains no GPU work: all times are CPU times"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
#: The words in names of GPUs, CPUs, operating systems and profilers: models, sizes and versions, but no IP addresses.
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

#: The words in the names of options and variables that contain secrets.
_SECRET = r"key|token(?!s|iz)|secret|pass|cred|auth|cookie|sign|pwd"
_SECRET_NAME = re.compile(rf"(?i)[\w.+-]*(?:{_SECRET}|sig|bearer)(?:word|wd|phrase|s|entials?|orization|nature)?:?")
#: Login data in a URL, and keys that have a known prefix.
_LOGIN = re.compile(
    r"(?<=://)[^\s/@]+@|[^\s/@:]+:[^\s/@]+@|\b(?:sk|hf|gh[a-z]|github_pat|glpat|nvapi|xox[a-z])[-_](?=\S*\d)[\w-]{8,}"
)
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z0-9_.-]{0,40}")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line without keys and passwords. Paths remain."""
    safe_words = []
    for option, word in pairwise(("", *words)):
        name, equals_sign, value = word.partition("=")
        parts = re.split(r"([\s,;?&'\"]+)", word)
        if equals_sign and re.fullmatch(r"[\w.+-]+", name):
            is_secret = _SECRET_NAME.fullmatch(name)
            safe_words.append(f"{name}={REMOVED_MARK if is_secret else ''.join(without_secrets([value]))}")
        elif _SECRET_NAME.fullmatch(option) and not _OPTION.fullmatch(word):
            safe_words.append(REMOVED_MARK)
        elif len(parts) > 1:
            parts[::2] = without_secrets(parts[::2])
            safe_words.append("".join(parts))
        else:
            safe_words.append(
                _LOGIN.sub(lambda match: f"{REMOVED_MARK}@" if match[0].endswith("@") else REMOVED_MARK, word)
            )
    return safe_words
