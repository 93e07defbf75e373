"""Decides which texts of a trace may leave the machine, and replaces every other text by an alias.

Only these names remain: names of PyTorch, kernels that match a rule for kernel classes, spellings of phases and steps,
calls of modules of ``torch.nn``, and names that the caller allows. An alias replaces any other name, whether or not it
contains a secret. The alias contains the facts that the analysis needs: the phase with its number, the class and
precision of a kernel, or the layer.
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
from nsys_analyzer.trace.operator_calls import OPERATOR_RANGE, OPERATOR_STEP
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

#: The text in place of removed text.
REMOVED_MARK = "…"

#: The roles of a string: the kinds of things that it names. A string remains only if it is allowed in each of its
#: roles.
KERNEL, CALL, RANGE, OPERATOR, THREAD, PROFILER_EVENT = "kernel", "call", "range", "operator", "thread", "event"
ARGUMENTS = "arguments"

# --- PyTorch's names

#: Matches the names of the classes of torch.nn.
_MODULE_CLASS = re.compile(
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
#: Matches attributes of torch.nn's transformer modules, which occur in module paths.
_TORCH_ATTRIBUTE = re.compile(
    r"(?:en|de)coder|layers?|self_attn|multihead_attn|out_proj|(?:linear|norm|dropout|conv|bn|fc|act)\d{0,2}|relu"
)
#: Matches the names of PyTorch's own autograd nodes. Names that PyTorch generates end with a number, unlike the names
#: of nodes of the program's own Functions.
_AUTOGRAD_NODE = (
    r"(?:torch::autograd::)?(?:[A-Z]\w{0,80}Backward\d|AccumulateGrad|CopySlices|GraphRoot|Error"
    r"|(?:Checkpoint|Compiled)Function(?:Backward)?)"
)
_TORCH_NAME = re.compile(
    r"(?:aten|prims?|_?c10d(?:_functional)?|_dtensor|symm_mem|quantized|mkldnn|onednn|inductor|torchvision|fbgemm)"
    r"::[a-z_]\w{0,80}(?:\.\w{1,40})?"
    rf"|(?:autograd::engine::evaluate_function: )?{_AUTOGRAD_NODE}"
    r"|torch\.(?:nn\.functional|Tensor|autograd|cuda|distributed|linalg)\.[a-z_]{1,40}"
    rf"|torch\.optim\.(?:[a-z_]{{1,20}}\.)?{_OPTIMIZER}\.(?:step|zero_grad)"
    rf"|torch\.nn\.modules\.(?:[a-z_]{{1,20}}\.)?(?:{_MODULE_CLASS.pattern})\.(?:forward|__call__)"
    rf"|{re.escape(MODULE_RANGE_PREFIX)}(?:{_MODULE_CLASS.pattern})_\d{{1,6}}|DistributedDataParallel\.forward"
    rf"|Optimizer\.(?P<does>step|zero_grad)#{_OPTIMIZER}\.(?P=does)|ProfilerStep#\d{{1,7}}"
    r"|enumerate\(DataLoader\)#_(?:SingleProcess|MultiProcessing)DataLoaderIter\.__next__"
    r"|Torch-Compiled Region: \d{1,4}/\d{1,4}|TorchDynamo Cache Lookup|Pregraph bytecode|detach_?|record_param_comms"
    r"|AOTDispatcher Runtime Wrapper Prologue|triton_(?:poi|red|per|tem|for)_fused_[a-z0-9_]{0,200}"
    r"|(?:nccl|gloo|mpi|ucc|xccl):_?(?:all|reduce|gather|scatter|broadcast|send|recv|barrier|coalesced)[a-z_]{0,24}"
    r"|nccl[A-Z][A-Za-z]{2,40}|cub::Device\w{3,30}(?:::\w{3,30})?"
    r"|\[CUDA mem(?:set|cpy [A-Z][a-z]{3,5}-to-[A-Z][a-z]{3,5})\]"
    r"|Mem(?:cpy \w{1,6} \((?:Pinned|Pageable|Device|Array|Unknown|Managed) -> \w{1,10}\)|set \(\w{1,10}\))"
)
#: Matches step names of serving engines, which consist of these words and numbers.
_ENGINE_STEP_NAME = re.compile(
    r"(?:[\W\d_]|execute|executeStep|model|context|generation|step|sq|sk|sqsq|sqsk|EXTEND|DECODE|MIXED|TARGET|VERIFY|DRAFT"
    r"|SPLIT|PREFILL|bs|toks?|c|g|p|d|spec|tbo|ctx|tokens|reqs|gen|eager|prefill|decode|Executor|forward|inferred)+"
)
_REQUEST_NAME = re.compile(r"(?:first token of )?request \d{1,6}")

# --- other names

#: Matches the API functions of libraries and drivers.
_API_FUNCTION = re.compile(r"(?:cuda|cu|hip|hsa|nccl|rccl|cublas|cudnn)[A-Z]\w{0,80}|runFunction")
#: Matches the events of profilers themselves: "CUPTI Buffer flush", "CUDA profiling data flush on cudaProfilerStop".
_PROFILER_EVENT = re.compile(
    r"(?i:(?:activity|allocation|buffer|chunk|command|compiler|context|created|cudaprofilerstop|cuinit|cupti|cuda|data|"
    r"driver|early|exit|finished|flush|full|function|init|initialization|instrumentation|lazy|loading|management|memory|"
    r"module|nvtx|on|process|profiler|profiling|pytorch|request|resource|runtime|tls|triggered|unknown|unrecognized|uvm)"
    r"(?: |$))+(?:\(\d{1,3}\))?"
)
#: Matches the names of threads that libraries, Python and PyTorch start.
_THREAD_NAME = re.compile(
    r"python[\d.]{0,6}|pt_(?:autograd|data|main|nccl|elastic|tcpstore)\w{0,12}|cuda-EvtHandlr|cuda\d{8,14}"
    r"|\[NSys(?: Comms)?\]|CUPTI worker thread"
)
#: Matches C++ names, also mangled ones, by their characters. Paths, quotations and mail addresses contain other
#: characters.
_CPP_NAME = re.compile(r"[\w\s:<>(){}\[\],.*&~#$=+\-!|?^%]+", re.ASCII)
#: Matches the outermost namespaces in a demangled name, including those in template arguments.
_NAMESPACE = re.compile(r"(?<![\w:.-])([\w.-]+)::(?!\()")
#: Matches a kernel name without C++ arguments: an identifier, or a name in the style of Triton or rocBLAS.
_PLAIN_KERNEL_NAME = re.compile(r"[\w.:$-]+", re.ASCII)
#: Matches the namespaces of libraries.
_LIBRARY_NAMESPACE = re.compile(
    r"at|aten|at_cuda_detail|c10d?|mkldnn|const|cub|cuda|std|thrust|torch|cute|cutlass\w*|cask\w*|xmma\w*|cu(?:sparse|solver|fft|dnn|blas|blasLt|tensor|te|pti)\w*|nv\w{2,8}"
    r"|T\d{1,2}|_INTERNAL_[0-9a-f]{8}_\d{1,3}_[A-Z][A-Za-z]{1,30}_cu_[0-9a-f]{8}|CUTENSOR_NAMESPACE|PyTorchMemEffAttention"
    r"|layer_norm|moe|vision|genericReformat|aiter|sgl_hip|tensorrt_llm|dali|vllm|flash|flashinfer|fbgemm_gpu"
    r"|transformer_engine|deep_ep|dpsk|grouped_gemm|stream_executor|ck|ck_tile|hip\w*|roc\w*|rocblas|internal|epilogue|detail|native|pytorch_(?:flash|fmha)|caffe2|flash_\w*|triton|xla|jax"
)
#: Matches the name of a numbered layer's range.
_NUMBERED_LAYER = re.compile(r"(?i)(?P<before>\w*?)(?P<block>(?:block|layer|stage|decoder|encoder|h)s?[\s._-]*\d{1,4})")
_PUBLIC_LAYER_PREFIXES = ("", "transformer_", "transformer")

# --- the parts of names

#: Matches annotations of operators that consist of numbers, such as ``, seq = 7, op_id = 12``. They are kept, because
#: the numbers are not private, and because a trace may contain a million different ones.
_ANNOTATION = r", *(?:seq|op_id|sizes|input_op_ids) *="
_ANNOTATIONS = re.compile(rf"(?:{_ANNOTATION}(?:[\d\[\](),]|(?<![\d-])[ -])*)+")
#: Matches a text in JSON.
_QUOTED_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
#: Matches the type of an argument of an operator, and the value of an argument if it consists of numbers.
_PUBLIC_ARGUMENT = re.compile(
    r"(?:(?:un)?signed )?(?:char|short|int|long)(?: int)?|float|double|bool|Scalar(?:List)?|TensorList|True|False"
    r"|c10::(?:BFloat16|Half|Float[48]_\w{3,12}|complex<(?:float|double)>)|[\[\]\d ,.eE+-]*"
)
#: Matches a number with more digits than any counter or size. It may be a key or the number of a credit card.
_LONG_NUMBER = re.compile(r"\d(?:[ -]*\d){12,}")
#: Matches numbers in groups, such as personal ID numbers and telephone numbers.
_PERSONAL_NUMBER = re.compile(r"(?<!\d)\d{3}(?P<dash>[ -])\d{2,4}(?P=dash)\d{4}(?!\d)")
#: Matches IP addresses and the numbers of credit cards.
_ADDRESS_OR_CARD = re.compile(r"(?<!\d)(?:\d{1,3}(?:\.\d{1,3}){3}|\d(?:[ .-]?\d){11,18})(?!\d)")
#: Matches a name that ends with the counter of a loop or of layers. A longer number may be an address, or the number of
#: a telephone or a credit card.
_NAME_WITH_COUNTER = re.compile(r"(?P<stem>.*?[\s_\-\[a-z])(?P<number>#?\d{1,5}(?:(?:/| of )\d{1,5})?)", re.DOTALL)
_NUMBER_BESIDE_COUNTER = re.compile(r"\d{6}|\d{3}\D+\d")
_MAX_PHASE_CHARACTERS = 100
#: Matches prefixes that show what a name stands for. Only the rest of the name is replaced by an alias.
_ROLE_PREFIX = re.compile(
    rf"{re.escape(MODULE_RANGE_PREFIX)}|Optimizer\.(?:step|zero_grad)#|ProfilerStep#"
    r"|torch\.(?:nn\.modules|nn|optim\.(?:lr_scheduler|swa_utils)|optim|autograd|Tensor)\."
    r"|autograd::engine::evaluate_function: |torch::autograd::"
)
_STEM_AND_SUFFIX = re.compile(
    r"(?P<stem>.*?)(?P<suffix>(?:Attention|Backward)?(?:(?:[_#]|(?<=[a-z]))\d{1,5})?"
    r"(?:\.(?:step|zero_grad|forward|__call__))?)",
    re.DOTALL,
)
#: Matches a word of a module path. Successive numbers count as one word, because they may be an address or an account.
_MODULE_PATH_WORD = re.compile(r"\d+(?:[/.]\d+){3,}|\d{3,}(?:[/.]\d{3,})+|[^/.]+")
_OPERATOR_PREFIX = "aten::"
#: A number with at least this many digits cannot be the index of a layer, or the counter of a step.
_TOO_LONG_FOR_INDEX, _TOO_LONG_FOR_COUNTER = 5, 7
_ALIAS_LETTERS = "bcdfghjklmnpqrstvwxz"  # letters without vowels cannot form words by chance


def is_public(text: str, role: str) -> bool:
    """Returns whether a name may leave the machine unchanged in one of its roles."""
    if "\0" in text or _PERSONAL_NUMBER.search(text):
        return False
    alias = read_alias(text)
    if alias and (not alias.kernel_class or {alias.kernel_class, *alias.part_of} <= CLASSES.keys()):
        return True
    if not text or _TORCH_NAME.fullmatch(text) or CLOCK_RANGE.fullmatch(text) or _is_phase(text):
        return True
    if text == OPERATOR_STEP or OPERATOR_RANGE.fullmatch(text):  # kept, because figures exclude the step by these names
        return True
    if role == KERNEL:
        return not _ADDRESS_OR_CARD.search(text) and _is_library_kernel(text)
    if role == CALL:
        return bool(_API_FUNCTION.fullmatch(text))
    if role == THREAD:
        return bool(_THREAD_NAME.fullmatch(text))
    if role == PROFILER_EVENT:
        return bool(_PROFILER_EVENT.fullmatch(text))
    block = _NUMBERED_LAYER.fullmatch(text)
    return block is not None and block["before"].lower() in _PUBLIC_LAYER_PREFIXES


def _is_phase(text: str) -> bool:
    """Returns whether a text is the spelling of a phase or of a serving step, and contains only small numbers."""
    if len(text) > _MAX_PHASE_CHARACTERS:
        return False
    # Such a text is compared without the part that normalize_name drops.
    is_shortened = "," in text or text.startswith("Optimizer.")
    has_small_numbers = all(len(number) < _TOO_LONG_FOR_COUNTER for number in re.findall(r"\d+", text))
    is_phase = not is_shortened and has_small_numbers and normalize_name(text) in _list_phase_spellings()
    is_served_step = (
        parse_served_step(text) is not None and _ENGINE_STEP_NAME.fullmatch(text) and not _LONG_NUMBER.search(text)
    )
    return is_phase or bool(is_served_step or _REQUEST_NAME.fullmatch(text))


@cache
def _list_phase_spellings() -> frozenset[str]:
    """Returns the normalized spellings of all phases."""
    return frozenset(spelling for spellings in DEFAULT_NAMES.values() for spelling in spellings)


def _is_library_kernel(kernel: str) -> bool:
    """Returns whether a kernel matches a rule or is PyTorch's, and is only in namespaces of libraries."""
    if kernel.startswith(UNNAMED_KERNEL):
        return kernel[len(UNNAMED_KERNEL) :].strip().isdigit()
    if not (_PLAIN_KERNEL_NAME if not {"(", "<"} & set(kernel) else _CPP_NAME).fullmatch(kernel):
        return False
    namespaces = _NAMESPACE.findall(demangle(kernel[:MAX_SEARCHED_CHARACTERS]))
    are_public = all(map(_LIBRARY_NAMESPACE.fullmatch, namespaces))
    return are_public and (find_built_in_rule(kernel) is not None or namespaces[:1] in (["at"], ["c10"]))


@dataclass(frozen=True)
class Renaming:
    """A private name, or a private word of a module path, with the alias that replaces it."""

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
        """Returns a name unchanged if it is allowed in each of its roles; otherwise, returns its alias.

        A description of arguments keeps numbers and types; other texts in it are removed.
        """
        if ARGUMENTS in roles:
            kept_text = _QUOTED_TEXT.sub(lambda match: match[0] if _PUBLIC_ARGUMENT.fullmatch(match[1]) else '""', text)
            return _LONG_NUMBER.sub("0", kept_text)
        numbers = re.search(_ANNOTATION, text)
        head = text[: numbers.start()] if numbers and _ANNOTATIONS.fullmatch(text, numbers.start()) else text
        key = (head, frozenset(roles))
        if key not in self._public_names:
            is_allowed = "\0" not in head and any(pattern.fullmatch(head) for pattern in self._keep)
            is_kept = is_allowed or all(is_public(head, role) for role in roles)
            self._public_names[key] = self._make_unique(head, head if is_kept else self._make_alias(head))
        return self._public_names[key] + _LONG_NUMBER.sub("0", text[len(head) :])

    def scrub_message(self, text: str) -> str:
        """Returns a message of the profiler without sentences that are not known to come from profilers."""
        sentences = [match[0] for match in _PROFILER_SENTENCE.finditer(text)]
        if sentences and not _PROFILER_SENTENCE.sub("", text).strip(" .\t\n"):
            return text
        scrubbed_message = (
            f"{'. '.join(sentences)} {REMOVED_MARK}{' about sampling' * is_irrelevant_message(text)}".strip()
        )
        # Makes the message unique, because a report lists equal messages only once.
        return self._make_unique(text, scrubbed_message)

    def scrub_property(self, text: str) -> str:
        """Returns a property of the machine or the recording without words that are no product names or versions."""
        if find_peaks(text):
            return text
        scrubbed_words = " ".join(word if _PRODUCT_WORD.fullmatch(word) else REMOVED_MARK for word in text.split(" "))
        return re.sub(f"{REMOVED_MARK}(?: {REMOVED_MARK})+", REMOVED_MARK, scrubbed_words)

    def _make_unique(self, text: str, replacement: str) -> str:
        """Returns the replacement of a text, with a number if the replacement already stands for another text."""
        unique_name, number = replacement, 1
        while self._text_of.setdefault(unique_name, text) != text:
            number += 1
            unique_name = f"{replacement} ({number})"
        return unique_name

    def _make_alias(self, name: str) -> str:
        """Returns the alias of a private name."""
        if module := MODULE_RANGE_WITH_PATH.fullmatch(normalize_module_name(name)):
            path = _MODULE_PATH_WORD.sub(lambda word: self._replace_word(word[0]), module["path"])
            return f"{MODULE_RANGE_PREFIX}{path}: {self._replace_word(module['kind'])}"
        if prefix := _ROLE_PREFIX.match(name):
            return prefix[0] + self._replace_word(name[prefix.end() :])
        if block := _NUMBERED_LAYER.fullmatch(name):
            loading = f"_{LOADING_MARK}" if is_loading(name) else ""
            return f"{self._replace_word(block['before'].rstrip('_'))}{loading}_{block['block']}"
        rule = find_built_in_rule(name)
        if rule is None and name.isidentifier() and name.endswith("Backward"):
            return self._replace_word(name)
        alias = Alias(rule.kernel_class, rule.part_of, find_precision(name)) if rule else Alias()
        if phase_prefix := _make_phase_prefix(name):
            return phase_prefix + alias.make_name(self._find_letters(name, "alias "))
        match = None if _NUMBER_BESIDE_COUNTER.search(name) else _NAME_WITH_COUNTER.fullmatch(name)
        stem, number = match.groups() if match else (name, "")
        loading = f" {LOADING_MARK}" if is_loading(name) else ""
        return f"{alias.make_name(self._find_letters(stem, 'alias ', name))}{loading} {number}".rstrip()

    def _replace_word(self, word: str) -> str:
        """Returns a word of a name, or its alias. The alias keeps a suffix that shows what the word stands for."""
        match = _STEM_AND_SUFFIX.fullmatch(word)
        assert match is not None  # the pattern matches any text
        stem, suffix = match.groups()
        if (word.isdigit() and len(word) < _TOO_LONG_FOR_INDEX) or any(map(_is_word_of_torch, (word, stem))):
            return word
        return f"alias_{self._find_letters(stem, 'alias_')}{suffix}"

    def _find_letters(self, text: str, prefix: str, name: str = "") -> str:
        """Returns the letters that replace a text in aliases. A new text gets new letters, and an entry in ``renamed``.

        Args:
            text: the text.
            prefix: the part of the alias before the letters, for the entry in ``renamed``.
            name: the name that contains the text, for the entry in ``renamed``; empty if it is the text itself.
        """
        if text not in self._codes:
            quotient, code = len(self._codes), ""
            while quotient or not code:
                quotient, letter = divmod(quotient, len(_ALIAS_LETTERS))
                code = _ALIAS_LETTERS[letter] + code
            self._codes[text] = code
            self.renamed.append(Renaming(name or text, prefix + code))
        return self._codes[text]


def _is_word_of_torch(word: str) -> bool:
    """Returns whether a word is a class or an attribute of torch.nn, or the spelling of a phase."""
    is_of_torch = _MODULE_CLASS.fullmatch(word) or _TORCH_ATTRIBUTE.fullmatch(word)
    return bool(is_of_torch) or (_is_phase(word) and word.isidentifier())


def _make_phase_prefix(name: str) -> str:
    """Returns the first part of the alias of a phase's range: the spelling of the phase, and its number.

    It also returns the prefix of operators and of kernels without a name, and an empty text for any other name.
    """
    if name.startswith((_OPERATOR_PREFIX, UNNAMED_KERNEL)):
        return _OPERATOR_PREFIX if name.startswith(_OPERATOR_PREFIX) else f"{UNNAMED_KERNEL}, "
    phase = PhaseNames().find_role(name)
    if phase is None:
        return ""
    spelling = normalize_name(name)
    numbers = re.findall(r"\d+", name)
    number = f" {numbers[0]}" if len(numbers) == 1 and len(numbers[0]) < _TOO_LONG_FOR_COUNTER else ""
    return f"{spelling if spelling in _list_phase_spellings() else DEFAULT_NAMES[phase][0]}{number}, "


# --- messages and properties

_API = (
    r"(?:CUDA|NVTX|CUPTI|OpenGL|Vulkan|OS runtime libraries|cuDNN|cuBLAS|cuSPARSE|MPI|UCX|OpenMP|OpenACC|NCCL|Python)"
)
#: Matches the sentences about a recording that nsys writes, and that this package writes about PyTorch's traces.
_PROFILER_SENTENCE = re.compile(
    rf"Not all {_API} events might have been collected|No {_API} events collected\. Does the process use {_API}\?"
    rf"|{_API} profiling might have not been started correctly|{_API} injection initialization failed"
    rf"|Some (?:{_API} )?events might be missing|Some events \(\s*\d{{1,12}}\) were lost"
    r"|Installed CUDA driver version \([\d.]{1,12}\) is not supported by this build of Nsight Systems"
    r"|CUDA trace will be collected using libraries for driver version \d{1,3}\.\d{1,3}"
    r"|CUDA tracing is not supported|Unified Memory trace is not supported"
    r"|The machine has a GPU, but the trace contains no GPU work: all times are CPU times"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
#: Matches the words in names of GPUs, CPUs, operating systems and profilers, and versions, but no IP addresses.
_PRODUCT_WORD = re.compile(
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

#: Matches words that occur in the names of options and variables with secret values.
_SECRETS = r"key|token(?!s|iz)|secret|pass|cred|auth|cookie|sign|pwd"
_SECRET_NAME = re.compile(rf"(?i)[\w.+-]*(?:{_SECRETS}|sig|bearer)(?:word|wd|phrase|s|entials?|orization|nature)?:?")
#: Matches login data in a URL, and keys with a known prefix.
_LOGIN_OR_KEY = re.compile(
    r"(?<=://)[^\s/@]+@|[^\s/@:]+:[^\s/@]+@|\b(?:sk|hf|gh[a-z]|github_pat|glpat|nvapi|xox[a-z])[-_](?=\S*\d)[\w-]{8,}"
)
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z0-9_.-]{0,40}")


def remove_secrets(words: Sequence[str]) -> list[str]:
    """Replaces keys and passwords in the words of a command line. Paths remain."""
    safe_words = []
    for option, word in pairwise(("", *words)):
        name, equals_sign, value = word.partition("=")
        parts = re.split(r"([\s,;?&'\"]+)", word)
        if equals_sign and re.fullmatch(r"[\w.+-]+", name):
            is_secret = _SECRET_NAME.fullmatch(name)
            safe_words.append(f"{name}={REMOVED_MARK if is_secret else ''.join(remove_secrets([value]))}")
        elif _SECRET_NAME.fullmatch(option) and not _OPTION.fullmatch(word):
            safe_words.append(REMOVED_MARK)
        elif len(parts) > 1:
            parts[::2] = remove_secrets(parts[::2])
            safe_words.append("".join(parts))
        else:
            safe_words.append(
                _LOGIN_OR_KEY.sub(lambda match: f"{REMOVED_MARK}@" if match[0].endswith("@") else REMOVED_MARK, word)
            )
    return safe_words
