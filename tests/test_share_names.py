"""The allow-list of ``share``: real names stay, and no secret reads as one."""

from __future__ import annotations

import csv
import lzma
import random
import re
import string
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nsys_analyzer.share.names import is_name, readable_words
from nsys_analyzer.share.private import PrivateValues
from nsys_analyzer.share.scrub import Scrubber
from nsys_analyzer.share.secrets import may_be_secret
from nsys_analyzer.trace.diagnostics import _NO_CUDA
from nsys_analyzer.trace.phase_names import DEFAULT_NAMES
from tests.conftest import DATA

Draw = Callable[[random.Random], str]
_ALNUM = string.ascii_letters + string.digits
_URL = _ALNUM + "_-"
_BASE64 = _ALNUM + "+/"
_HEX = "0123456789abcdef"
_BECH32 = "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"


def drawn(letters: str, length: int) -> Draw:
    return lambda random: "".join(random.choices(letters, k=length))


def joined(*parts: str | Draw) -> Draw:
    return lambda random: "".join(part if isinstance(part, str) else part(random) for part in parts)


#: How the keys of well-known services look, and keys without a mark of their own.
FAMILIES: dict[str, Draw] = {
    "stripe": joined("sk_live_", drawn(_ALNUM, 24)),
    "stripe restricted": joined("rk_test_", drawn(_ALNUM, 24)),
    "groq": joined("gsk_", drawn(_ALNUM, 52)),
    "replicate": joined("r8_", drawn(_ALNUM, 37)),
    "google client": joined("GOCSPX-", drawn(_URL, 28)),
    "google api": joined("AIza", drawn(_URL, 35)),
    "sendgrid": joined("SG.", drawn(_URL, 22), ".", drawn(_URL, 43)),
    "telegram": joined(drawn("123456789", 10), ":AA", drawn(_URL, 33)),
    "discord": joined("M", drawn(_ALNUM, 25), ".G", drawn(_ALNUM, 5), ".", drawn(_URL, 38)),
    "age": joined("AGE-SECRET-KEY-1", drawn(_BECH32, 58)),
    "hugging face": joined("hf_", drawn(string.ascii_letters, 34)),
    "openai": joined("sk-proj-", drawn(_URL, 48)),
    "github": joined("ghp_", drawn(_ALNUM, 36)),
    "gitlab": joined("glpat-", drawn(_URL, 20)),
    "aws": joined("AKIA", drawn(string.ascii_uppercase + "234567", 16)),
    "aws secret": drawn(_BASE64, 40),
    "npm": joined("npm_", drawn(_ALNUM, 36)),
    "jwt": joined("eyJ", drawn(_URL, 30), ".eyJ", drawn(_URL, 40), ".", drawn(_URL, 43)),
    "azure": joined("sv=2024-01-01&sig=", drawn(_BASE64, 43), "%3D"),
    "basic": joined("Basic ", drawn(_BASE64, 24), "=="),
    "wandb": drawn(_HEX, 40),
    "md5": drawn(_HEX, 32),
    "uuid": joined(drawn(_HEX, 8), "-", drawn(_HEX, 4), "-41a2-", drawn(_HEX, 4), "-", drawn(_HEX, 12)),
    "letters and digits": drawn(_ALNUM, 20),
    "letters": drawn(string.ascii_letters, 24),
    "base32": drawn(string.ascii_uppercase + "234567", 32),
    "card": drawn("123456789", 16),
    "pass": joined("pass=", drawn(_ALNUM, 8)),
    "password": joined("password_", drawn(string.ascii_lowercase, 8)),
    "cookie": joined("Cookie: session", drawn(_HEX, 6), "=1"),
    "git": joined("git@", drawn(string.ascii_lowercase, 6), ":", drawn(string.ascii_lowercase, 6), "/repo"),
    "registry": joined("registry:5000/", drawn(string.ascii_lowercase, 6), "/img"),
    "home": joined("/home/", drawn(string.ascii_lowercase, 6), "/run.py"),
    "home with a blank": joined("/home/", drawn(string.ascii_lowercase, 4), " smith/run.py"),
    "encoded home": joined("file%3A%2F%2Fhome%2F", drawn(string.ascii_lowercase, 6)),
    "mount": joined("/mnt/data/users/", drawn(string.ascii_lowercase, 5)),
    "address": joined("10.", drawn("12", 2), ".3.4"),
    "mail": joined(drawn(string.ascii_lowercase, 6), "@hyrule.org"),
    "domain": joined("db-", drawn(string.ascii_lowercase, 5), ".hyrule.internal"),
}  # fmt: skip
#: Where a secret may stand in a name.
PLACES = (
    "{}",
    "forward {}",
    "upload_{}",
    "step 3 ({})",
    "load: {}",
    "void f<{}>(int)",
    "aten::mm {}",
    "models.{}.forward",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_secret_reads_as_a_name(family: str) -> None:
    """300 of each family, in each place: 11,000 secrets."""
    numbers = random.Random(f"2025 {family}")
    secrets = [FAMILIES[family](numbers) for _ in range(300)]
    assert [secret for secret in secrets for place in PLACES if is_name(place.format(secret))] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_secret_is_left_in_a_message(family: str) -> None:
    numbers = random.Random(f"2026 {family}")
    secrets = [FAMILIES[family](numbers) for _ in range(300)]
    assert [secret for secret in secrets if secret in readable_words(f"Profiling failed at {secret} twice")] == []


def test_every_kernel_and_operator_of_the_corpus_is_a_name() -> None:
    with lzma.open(DATA / "kernel_pairs.tsv.xz", "rt", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    names = {row["name"] for row in rows} | {row["operator"] for row in rows}
    assert len(names) > 4000
    assert [name for name in names if not is_name(name)] == []


def test_every_spelling_of_a_phase_is_a_name() -> None:
    spellings = [text for texts in DEFAULT_NAMES.values() for text in texts]
    written = [
        form
        for text in spellings
        for form in (text, text.title(), text.replace(" ", "_"), f"{text} #3", f"{text} 3/10")
    ]
    assert [text for text in written if not is_name(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "forward", "scaled dot product attention", "step 12 of 30", "forward/backward 1/2", "LayerNorm 3", "batch=4",
        "c10::BFloat16", "ScaledDotProductFlashAttentionBackward0", "transformer.h.3.attn.c_proj", "ProfilerStep#3",
        "train_small256_ctx1024_bs4_fp32_warmup2_steps10", "Optimizer.step#AdamW.step", "nccl:all_reduce", "…_step",
        "autograd::engine::evaluate_function: AddBackward0", "nn.Module: Linear_0", "Memcpy HtoD (Pinned -> Device)",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "DistributedDataParallel.forward",
        "XlaModule:#hlo_module=jit_f,program_id=9#", "Torch-Compiled Region: 0/0", "attn_fwd.kd", "cuLaunchKernelEx",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32", "triton_poi_fused__to_copy_add_mul_3",
        "void f<(int)4, true>(float const*, unsigned long) [clone .kd]", "_Z10add_kernelPfi", "kernel_0d1d2d3de4",
        "at::native::(anonymous namespace)::f(at::Tensor&)::{lambda(float)#2}::operator()(float) const",
        "/conv1/Conv + /relu/Relu", "/layer1/layer1.0/conv1/Conv_output_0", "{ForeignNode[/h.0/Cast.../head/MatMul]}",
        "PWN(/act/Sigmoid, /act/Mul_1)", "Reformatting CopyNode for Input Tensor 0 to /conv1/Conv", "/Concat_3",
        "layer 3 attention", "warm-up", "prefill 1024 tokens", "decode token 7", "pt_autograd_0", "alias 3",
    ],
)  # fmt: skip
def test_names(text: str) -> None:
    assert is_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "/home/x/y/train.py:12", "/data2/runs/Conv", "/falcon/run7/weights", "/falcon/MatMulSecret/x", "~/runs/x",
        r"D:\\runs\\train.py", "load --set=data/a.bin", "secret/x=1/train.py", "-I/home/ann/include", "of Ann's net",
        "torch/nn/modules/linear.py(114): forward", "Authorization: Token abc", "user%3Dann%26token%3Dtr1force",
        "to node17x.hyrule.org", "key=128", "token: embedding", "12:30:45", "0a:1b:2c:3d:4e:5f", "0000:8a:00.0",
        "fe80::1ff:fe23:4567:890a", "hunter2 swordfish", "two\\nlines", "A=b\\0C=d", "f(pass=1)", "4111 1111 1111 1111",
        "_Z24sk_live_4eC39HqLyjWDarjtv", "X:#password=hunter2#", "Zelda's run", "in bluefalcon", "1" * 5000 + ".1.1.1",
    ],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    assert not is_name(text)


def test_names_of_pythons_own_modules_hold_few_that_look_like_keys() -> None:
    """Identifiers that nobody here chose; the model of names has seen none of them."""
    modules = [__import__(name) for name in ("asyncio", "ctypes", "email", "http", "logging", "numpy", "unittest")]
    names = {name for module in modules for member in dir(module) for name in (member, *dir(getattr(module, member)))}
    assert len(names) > 2000
    assert len([name for name in names if may_be_secret(name)]) < len(names) / 1000


def test_messages_that_explain_a_missing_trace_stay() -> None:
    for text in (
        "CUDA profiling might have not been started correctly.",
        "CUDA injection initialization failed.",
        "Installed CUDA driver version (13.0) is not supported by this build of Nsight Systems.",
        "CUDA tracing is not supported.",
    ):
        assert readable_words(text) == text
        assert any(pattern.search(text) for pattern, _ in _NO_CUDA)


@pytest.mark.parametrize(
    "unit",
    [
        "\\\\",
        "/",
        "A1",
        ", seq = ",
        "::",
        "a ",
        "_Z9",
        "tower-9",
        "9",
        "{<(",
        "key 1",
        "0:",
        "_INTERNAL_1",
        "a-",
        "a.b-",
    ],
)
def test_the_time_grows_with_the_text_and_no_faster(unit: str) -> None:
    """Ten times the text takes forty times as long at most; where time grew with the square it would take a hundred."""

    def seconds(length: int) -> float:
        text = (unit * length)[:length].encode() + b"!"
        best = float("inf")
        for _ in range(3):
            scrubber = Scrubber(PrivateValues.of({"tower-9", "zelda"}, {"tower-9"}, 2))
            start = time.process_time()
            scrubber.name(text)
            scrubber.message(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(200_000) < 40 * max(seconds(20_000), 0.002)


@given(st.one_of(st.text(), st.text("=/~…-_Z9aE0.:<>() ,#\\\"'", max_size=40)))
@example("=5")
@example("a =1")
def test_any_text_is_judged(text: str) -> None:
    """A message of words that are kept is kept again, as is an alias."""
    readable = readable_words(text)
    assert readable_words(readable) == readable
    shown = Scrubber(PrivateValues()).name(text.encode("utf-8", errors="replace"))
    assert shown is not None
    assert is_name(shown) or ", " in shown  # a phase before an alias, or numbers behind a name


#: Shapes of machines, people and accounts, each with what would give it away.
SHAPES: dict[str, Draw] = {
    "aws host": joined("ip-10-", drawn("12", 2), "-3-", drawn("123", 2)),
    "ipv6": joined("fe80::", drawn("123456789", 4)),
    "node": joined("node", drawn("0123456789", 3)),
    "node of a domain": joined("node", drawn("123456789", 2), ".", drawn(string.ascii_lowercase, 6)),
    "nodes": joined("node[", drawn("123456789", 1), "-", drawn("123456789", 2), "]"),
    "network card": joined(*[part for _ in range(5) for part in (drawn(_HEX, 2), "-")], drawn(_HEX, 2)),
    "phone": joined("call 555-", drawn("123456789", 3), "-", drawn("123456789", 4)),
    "card": joined("data ", *[part for _ in range(3) for part in (drawn("123456789", 4), "-")], drawn("123456789", 4)),
    "card of one word": joined("batch", *[part for _ in range(4) for part in ("_", drawn("123456789", 4))]),
    "iban": joined("DE", drawn("123456789", 2), *[part for _ in range(3) for part in (" ", drawn("123456789", 4))]),
    "key": joined("api key ", drawn("123456789", 8)),
    "user": joined("user ", drawn("123456789", 8)),
    "account": joined("account ", drawn("123456789", 4)),
    "home": joined("_home_", drawn(string.ascii_lowercase, 6), "_train"),
    "home with dots": joined("home.", drawn(string.ascii_lowercase, 6), ".train"),
    "date of birth": joined("date 198", drawn("123456789", 1), "-05-06"),
    "arguments": joined("f(", drawn("123456789", 10), ",", drawn("123456789", 10), ")"),
    "long argument": joined("f(", drawn("123456789", 20), "UL)"),
    "mangled": joined("_Z", *[part for _ in range(3) for part in ("6", drawn(string.ascii_letters, 6))], "v"),
    "mangled letters": joined("_Z1fI", drawn(string.ascii_uppercase, 24)),
    "mangled number": joined("_Z1fILi", drawn("123456789", 18), "EEv"),
    "XLA": joined("X:#a=", drawn("123456789", 10), ",b=", drawn("123456789", 10), "#"),
    "XLA's domain": joined("X:#a=", drawn(string.ascii_lowercase, 6), ".hyrule.org#"),
    "key with dots": joined(*[part for _ in range(6) for part in (".x", drawn(_ALNUM, 5))]),
}  # fmt: skip


@pytest.mark.parametrize("family", SHAPES)
def test_no_machine_person_or_account_reads_as_a_name(family: str) -> None:
    numbers = random.Random(f"2027 {family}")
    shapes = [SHAPES[family](numbers) for _ in range(300)]
    assert [shape for shape in shapes if is_name(shape)] == []


@pytest.mark.parametrize(
    "shape",
    ["ip-10-22-3-22", "node682", "555-936-0087", "9651-2558-8565-9471", "key 94964992", "user 12345678", "682-39-1259"],
)
def test_no_machine_person_or_account_is_left_in_a_message(shape: str) -> None:
    digits = [part for part in re.findall(r"\d+", shape) if len(part) > 1]
    assert not [part for part in digits if part in readable_words(f"Profiling failed at {shape}, twice")]


@pytest.mark.parametrize("parts", [(5, "_"), (5, "::"), (6, "_")])
def test_a_key_that_was_cut_reads_as_one(parts: tuple[int, str]) -> None:
    """Of 300 keys of six pieces, few have only pieces that words might be."""
    length, mark = parts
    numbers = random.Random(f"2028 {parts}")
    keys = [mark.join("x" + "".join(numbers.choices(_ALNUM, k=length)) for _ in range(6)) for _ in range(300)]
    assert [key for key in keys if is_name(key)] == []


@pytest.mark.parametrize(
    "name",
    [
        "void indexSelectLargeIndex<float, unsigned int, (int)2, (int)-2, (bool)1>(T1)", "gemm_kernel<1e-05f>(int)",
        "void marlin::Marlin<(long)1125899906909960, (long)1125899907892224, 128, 1, false>(int4 const*)",
    ],
)  # fmt: skip
def test_numbers_of_template_arguments_are_ordinary(name: str) -> None:
    assert is_name(name)
