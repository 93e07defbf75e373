"""The words that everybody uses: those of settings, of this field, and of the names of kernels and layers."""

from __future__ import annotations

import re
from functools import cache

#: Words of settings that many machines share; those of phases and kernels come to them.
_COMMON_WORDS = """
    256color admin all amd auto boolean build capabilities color compute config container cpython cublas cuda debian
    default display docker driver en epyc float16 float64 fp16 fp32 fp8 generic gnome gnu graphics info intel iteration
    kernel latin linux loaded localhost lts model network nobody node none nvidia off on only process profile profiler
    pytest python query rank release rocm root runner self session shell spawn standard system terminal test text thread
    torch train truecolor ubuntu unknown us user utf utility value verbose version video warn warning x86 xeon xterm yes
"""
#: Words of names that people and frameworks give to ranges, and of the profiler's messages.
_FIELD_WORDS = """
    a abandoned about accelerator accumulate accumulation across action activation active ada adagrad adam adamw
    adapter adaptive adaptor after again agent aggregate align all allgather allocate allocation allow allreduce
    alpha also amazon american among amp ampere an analysis analyze annotate anonymous api apis application apply
    are area arg args arguments arm array as ascii assign async at attached attend attention attn attr audio
    autograd auxiliary average avg axis back backprop backtrace backtraces bar barrier base batch batches be beam
    because been before begin behavior behaviour being bench benchmark bert beta between bf bias bidirectional bin
    bind blackwell blank blk block blocks body bookworm both bottleneck bottom bound branch broadcast bronze bucket
    buckets buffer buffers build bulk bullseye busy but by byte cache calculate calibrate call called calls can
    capture category causal center centos centre certain cga chain change channel char check checkbox checkpoint
    child children chunk chunked class classifier clear clip clock clone close cluster code codebook cold collate
    collect collected collection collective column combine command common communicate communication compare compile
    compiled complete compress compute concat condition configuration connect context continue contrast control
    conversion convert converted convolution copy copynode core cores corner correct correctly corrupt corrupted
    cost could count counter counters cp cpp cpu cpus create created criterion cross cta ctx ctxsw cu cuda cudagraph
    cudaprofilerstart cudaprofilerstop cudnn cupti current cut daemon damaged data dataloader dataset date day ddp
    debian debug decode decoder deep default delay delayed delta denoise dense depth dequantize desktop detach
    detect detected device dgx did diffusion dim dimension dims direct disabled discriminator dispatch distill
    distribute distributed do does dot down downsample dpo draft drift drifted driver drop dropout dropped dtod dtoh
    due dummy duration during dx dynamic dynamo each early edge effective either elapsed else embed embedding
    embeddings empty enable enabled enabling encode encoder encountered end ended engine enterprise entropy ep
    episode epoch epyc error etc eval evaluate evaluation even event events example exceeded exception exchange exec
    execute exit expand expected expert experts export expression extend external extract factor failed fast feature
    features fedora fetch few field file files filter final find finish finished first flash flatten flow flush flux
    fmha focal fold following for foreignnode fork forward found fp frame free freeze frequency from fsdp ftrace
    full function fuse fused fx fxn gamma gate gather gb gd ge geforce geglu gelu gemm gemms gen generate generation
    generator ghz global gold gpt gpu gpus grace grad gradient gradients grads graph graphs gre greater greedy green
    grid group grow gru gtx guarantee guidance gz had half hand has hat have hbm head heads height helper her hgx
    hidden high hip hold hopper host hot how htod htoh idle idx if ignored image images import imported importer in
    incomplete index individual inductor inference info init initial initialization initialize inject injected
    injection inner input inputs insert inside installed instance instead instinct int intel intermediate internal
    interpolate interrupt interrupts interval into invalid invert invoke ioctl ip is it iter iteration its jammy jax
    jetson jit join json just k kb keep kept kernel kernels key keys kib kth kv label labels lamb language laptop
    large last late latent launch launched layer layers lazy leap learn learning least left length less let level
    lib libraries library lift limited linear linux lion list llama lm load loader loading local log logits logprobs
    long lookup loop lora loss losses lost low lr lstm lts made main make managed manual many map mapping mask
    masked master match matmul matmuls matrix max maximum maybe mb mean measure memcpy memory memset merge message
    metric metrics mha mib micro microbatch middle mig might millisecond milliseconds min mini minimum minutes
    missed missing mistral mix mixtral mixture mlp mma mode model modern module modules moe momentum more most move
    mpi ms mtia multi multimodal must myelin name narrow nccl neck needed negative neoverse nested network neural
    never next nginx nightly no noble node nodes noise none noop norm normalize norms not note noted ns nsight nsys
    null numa number nvidia nvl nvlink nvtx object obsidian occupancy occurred odd of offload offset older omitted
    on once one online only onyx open openacc opengl openmp opensuse operation operator opt optim optimize optimizer
    option options or order orin os osrt other others our out outer output outputs overflow overhead overlap own
    ownership pack padding page pageable paged pair parallel parameter parameters params paranoid parent parse part
    partial pass passed passes patch patches path pattern pcie peer peft penalty per perf period periodically
    permission permissions perplexity persistence persistent phase pid pinned pipeline pixel place plan platinum
    please plow point policy pool pooler position positional possible post postprocess pp ppo predict prediction
    prefetch prefill prefix prepare preprocess present previous primary prior privilege privileges pro problem
    process processes processor processors produced profile profiled profiler profiling program project projection
    prompt prop propagate properly proposal pt ptr pull push pwn python pytorch q qkv qlora quadro quantize query
    queue quit quits qwen radeon ram rand random range ranges rapids rate rather ratio reached read ready reason
    rebuild receive recompute record recorded recording records recurrent red reduce reduced ref refine reformatting
    region register regression regularize reinforce release relu remove render repeat replace replay reported
    request requested required rescale reset reshape residual resize resolve response restore result results resume
    retry return revision reward rhel right rlhf rms rmsnorm rnn rocky rocm rollout root rope rotary round route
    router routing row rtx run running runtime rx ryzen s same sample sampler samples sampling save scale scaler
    scatter schedule scheduler score scores search sec second seconds see segment select self send seq sequence
    serve session sessions set setting settings setup several sft sgd shape shard sharding shared shift short should
    shuffle shutdown side sigmoid signal silu silver simple since single size skip skipped slice sliding slot slow
    small smem smi so softmax softplus solve some sort sorted source sp space sparse spatial speculative split stack
    stage start started state static statistics stem step steps stop stopped store stream streams stride student
    style sub successful successfully such sum super support supported sure suse sw swap sweep swiglu switch
    switches swizzle sxm symbols sync synchronize syscall syscalls system systems table tables tactic tail tanh
    target task tcp teacher temporal tensor tensorrt tensors terminated tesla test text than that the their them
    then there these they this thor thread threadripper threads three through ti tile time times timestamp
    timestamps timestep titan tm tma to token tokenize tokens too tool toolchain toolkit top torch total tp trace
    traced traces tracing train trainer training transfer transform transformer transition translate transpose tree
    triggered triton trixie trtllm true truncated trunk try tune two tx types ubuntu ucx ultra unable unavailable
    unet unexpected unified unit unknown unless unmanaged unordered unpack unscale unsupported until up update
    upgrade upsample use used user users using utc v vae validate validation value values var variance vector
    velocity vendor verify version versions vgpu via video view vision vit vllm vocabulary vsync vulkan wait warmup
    warp warps was wave wddm we weight weights well were wgmma when whether which while whole width will window
    windows wise with within without word worker workers workspace workstation would write xavier xeon xla xpu xt
    xtx year yes yet your zen zero zone
"""
#: Operators of ONNX that layers are called after, as in ``/layer1/layer1.0/conv1/Conv_output_0``.
_LAYER_OPERATORS = """
    Abs Add And ArgMax ArgMin AveragePool BatchNormalization BiasGelu Cast Ceil Clip Concat Constant
    ConstantOfShape Conv ConvTranspose Cos CumSum DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf
    Exp Expand FastGelu Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool
    GlobalMaxPool Greater GridSample GroupNormalization HardSigmoid HardSwish Identity InstanceNormalization
    LSTM LayerNormalization LeakyRelu Less Log LogSoftmax MatMul Max MaxPool Mean Min Mod Mul Neg NonZero Not
    OneHot Or PRelu Pad Pow QuantizeLinear Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
    Relu Reshape Resize Round ScatterElements ScatterND Shape Sigmoid Sign Sin Slice Softmax Softplus
    SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh Tile TopK Transpose Trilu Unsqueeze Upsample Where
"""
_LAYER_NAME = re.compile(rf"(?:/[\w.-]+)+/(?:{'|'.join(_LAYER_OPERATORS.split())})(?:_[\w.]*)?")
#: The words of a name in CamelCase, and its numbers.
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_WORD = re.compile(r"[A-Za-z0-9]+")
_ORDINARY_MARKS = re.compile(r"[A-Za-z0-9\s_.,:;+/()-]*")
#: A number, a letter, or the short name of a GPU, an architecture or a type: ``9.0a``, ``sm90``, ``H200``.
_CODE = re.compile(r"\d+[A-Za-z]?|[A-Za-z]|[A-Za-z]{1,2}\d{2,4}")


@cache
def ordinary_words() -> frozenset[str]:
    """The words that say nothing of a machine's owner, in small letters.

    Those that the package itself knows among them, from the spellings of phases and from the rules that tell
    kernels apart, so that a variable ``MODE=forward`` takes no phase away and ``BACKEND=cutlass`` no kernel.
    """
    from nsys_analyzer.analysis.class_rules import RULES
    from nsys_analyzer.analysis.phases import DEFAULT_NAMES

    rules = (text for rule in RULES for text in (rule.pattern, rule.example, rule.kernel_class))
    phases = (text for spellings in DEFAULT_NAMES.values() for text in spellings)
    parts = re.compile(r"[A-Za-z]+\d*|[A-Z]?[a-z]{2,}")
    known = (word.lower() for text in (*rules, *phases, *DEFAULT_NAMES) for word in parts.findall(text))
    return frozenset(_COMMON_WORDS.split()).union(known)


def is_ordinary(value: str) -> bool:
    """Whether a value is made of numbers and of words that everybody uses: ``1``, ``C.UTF-8``, ``forward``."""
    words = _WORD.findall(value)
    return bool(words) and bool(_ORDINARY_MARKS.fullmatch(value)) and all(map(_is_ordinary_word, words))


def _is_ordinary_word(word: str) -> bool:
    spellings = (word.lower(), word.lower().rstrip("0123456789"))
    return bool(_CODE.fullmatch(word)) or not ordinary_words().isdisjoint(spellings)


@cache
def field_words() -> frozenset[str]:
    """The words that names of ranges, kernels and layers are made of, in small letters."""
    operators = (part.lower() for name in layer_operators() for part in _CAMEL.findall(name))
    return ordinary_words().union(_FIELD_WORDS.split(), operators)


def layer_operators() -> list[str]:
    """The operators of ONNX."""
    return _LAYER_OPERATORS.split()


def is_field_word(word: str) -> bool:
    """Whether a word, or each word of a name in CamelCase, is of this field: ``matmuls``, ``LayerNorm``, ``conv1``."""
    if not word.isalnum():
        return False
    parts = _CAMEL.findall(word)
    in_camel_case = len(parts) > 1 and len(parts[0]) > 1 and parts[0].isalpha() and all(map(_is_known_part, parts))
    return _is_known(word.lower()) or in_camel_case


def _is_known_part(part: str) -> bool:
    return part.isdigit() or part == "d" or (len(part) > 1 and _is_known(part.lower()))


def _is_known(word: str) -> bool:
    """Whether a word is in the list, or a form of one that is: ``steps``, ``computed``, ``loading``."""
    words = field_words()
    if word in words or word.rstrip("0123456789") in words:
        return True
    stems = [word[: -len(ending)] for ending in ("s", "es", "d", "ed", "ing", "er", "r") if word.endswith(ending)]
    return any(len(stem) > 2 and not words.isdisjoint((stem, f"{stem}e")) for stem in stems)


def is_layer_name(path: str) -> bool:
    """Whether what looks like a path is the name of a layer: ONNX ends it with its operator, ``/conv1/Conv``."""
    return bool(_LAYER_NAME.fullmatch(path))
