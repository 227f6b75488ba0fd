"""GGUF files written by hand: headers that lie, values of other kinds, tokenizers, keys that change the computation."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.case import Case
from tests.hostile.honest import HIDDEN, INNER, VOCABULARY, weights

U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = 4, 5, 6, 7, 8, 9, 10, 11, 12
LAYOUTS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
LONG = "x" * 100_000

TENSORS = {
    "embed_tokens": "token_embd",
    **{f"layers.0.self_attn.{name}_proj": f"blk.0.attn_{name}" for name in "qkv"},
    "layers.0.self_attn.o_proj": "blk.0.attn_output",
    **{f"layers.0.mlp.{name}_proj": f"blk.0.ffn_{name}" for name in ("gate", "up", "down")},
    "layers.0.input_layernorm": "blk.0.attn_norm",
    "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "norm": "output_norm",
}
KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 16,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"],
    "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1, 1, 1, 1], "i4"),
    "tokenizer.ggml.merges": ["a b", "b c", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": np.zeros(VOCABULARY, "f4"),
    "tokenizer.ggml.unknown_token_id": 2,
}


def text(content: str | bytes) -> bytes:
    """A text with its length."""
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def array(kind: int, count: int, items: bytes) -> bytes:
    """An array and its type, whatever it declares."""
    return struct.pack("<IIQ", ARRAY, kind, count) + items


def value(content: Any) -> bytes:
    """A value and its type; bytes are both already."""
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return struct.pack("<I", TEXT) + text(content)
    if isinstance(content, list):
        return array(TEXT, len(content), b"".join(map(text, content)))
    if isinstance(content, np.ndarray):
        kind = next(kind for kind, code in LAYOUTS.items() if np.dtype(code) == content.dtype)
        return array(kind, len(content), content.tobytes())
    kind = BOOL if isinstance(content, bool) else F32 if isinstance(content, float) else U32 if content >= 0 else I32
    kind = U64 if kind == U32 and content >= 1 << 32 else kind
    return struct.pack("<I" + LAYOUTS[kind], kind, content)


def info(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """The entry of a tensor; `dims` begin with the innermost."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def arrays(more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The tensors of the honest model, and others; None: left out."""
    own = {
        f"{TENSORS[name.split('.', 1)[1][:-7]]}.weight": one.numpy()
        for name, one in weights().items()
        if "lm_" not in name
    }
    return {name: one for name, one in {**own, **(more or {})}.items() if one is not None}


def gguf(  # noqa: PLR0913 - a file has as many parts
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    *,
    count: int | None = None,
    key_count: int | None = None,
    infos: bytes = b"",
    extra: int = 0,
    pairs: bytes = b"",
    version: int = 3,
    align: int = 32,
    cut: int | None = None,
) -> bytes:
    """A file; `keys` replace honest ones (None: left out), `infos` and `pairs` are `extra` entries more."""
    metadata = {name: one for name, one in {**KEYS, **(keys or {})}.items() if one is not None}
    data, entries = b"", b""
    for name, one in arrays(tensors).items():
        data += bytes(-len(data) % align)
        kinds = {"float32": 0, "float16": 1, "int8": 24, "int32": 26, "float64": 28}
        entries += info(name, one.shape[::-1], kinds[one.dtype.name], len(data))
        data += one.tobytes()
    counts = len(arrays(tensors)) + extra if count is None else count, len(metadata) if key_count is None else key_count
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(name) + value(one) for name, one in metadata.items()) + pairs + entries + infos
    return (head + bytes(-len(head) % align) + data)[:cut]


def file(refused: str | None, make: Callable[[], bytes], name: str = "x.gguf") -> Case:
    """A file of these bytes."""

    def build(folder: Path) -> Path:
        (folder / name).write_bytes(make())
        return folder / name

    return Case(build, refused)


def case(refused: str | None, keys: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """A file with these keys; the other arguments are those of `gguf`."""
    return file(refused, lambda: gguf(keys, **more))


def own(refused: str | None, **keys: Any) -> Case:
    """A file with these keys of its architecture; `__` stands for a dot."""
    return case(refused, {f"llama.{name.replace('__', '.')}": one for name, one in keys.items()})


def token(refused: str | None, *, pieces: bool = False, **keys: Any) -> Case:
    """A file with these keys of its tokenizer, which is sentencepiece's with `pieces`."""
    return case(
        refused, {**(PIECES if pieces else {}), **{f"tokenizer.ggml.{name}": one for name, one in keys.items()}}
    )


def one_more(refused: str, dims: Sequence[int], kind: int = 0, offset: int = 0, name: str | bytes = "x") -> Case:
    """A file with one more tensor."""
    return case(refused, infos=info(name, dims, kind, offset), extra=1)


def parts(refused: str, names: Sequence[str], given: str) -> Case:
    """Several times the honest file; one is given."""

    def build(folder: Path) -> Path:
        for name in names:
            (folder / name).write_bytes(gguf())
        return folder / given

    return Case(build, refused)


def linked(folder: Path) -> Path:
    """The second of two parts is a link to a file that is none."""
    (folder / "x-00001-of-00002.gguf").write_bytes(gguf({"split.count": 2}))
    (folder / "x-00002-of-00002.gguf").symlink_to("/etc/passwd")
    return folder / "x-00001-of-00002.gguf"


def experts(refused: str, count: int, stored: int, **keys: Any) -> Case:
    """A Mixtral that declares `count` experts and stores `stored` of 1 x 1."""
    joined = {f"blk.0.ffn_{part}_exps.weight": np.zeros((stored, 1, 1), "f4") for part in ("gate", "up", "down")}
    return case(
        refused, {"llama.expert_count": count, "llama.expert_used_count": 1, **keys}, tensors={**joined, **dense(None)}
    )


def mixtral() -> dict[str, Any]:
    """The tensors of two experts, which replace the feed-forward part."""
    shapes = {"gate": (2, INNER, HIDDEN), "up": (2, INNER, HIDDEN), "down": (2, HIDDEN, INNER)}
    joined = {f"blk.0.ffn_{part}_exps.weight": np.ones(shape, "f4") for part, shape in shapes.items()}
    return {**joined, "blk.0.ffn_gate_inp.weight": np.ones((2, HIDDEN), "f4"), **dense(None)}


def dense(content: Any) -> dict[str, Any]:
    """The feed-forward part of the only layer."""
    return {f"blk.0.ffn_{part}.weight": content for part in ("gate", "up", "down")}


def other(refused: str, architecture: str, tensors: Mapping[str, Any] | None = None, **keys: Any) -> Case:
    """The honest file under the name of another architecture, with keys of it."""
    renamed = {name.replace("llama.", f"{architecture}."): one for name, one in KEYS.items() if "llama." in name}
    renamed |= {f"{architecture}.{name.replace('__', '.')}": one for name, one in keys.items()}
    return case(
        refused,
        {**dict.fromkeys(name for name in KEYS if "llama." in name), **renamed, "general.architecture": architecture},
        tensors=tensors,
    )


ALTERNATING = {"attention__sliding_window": 4, "expert_count": 2, "expert_used_count": 1}
LATENT = {
    "rope__dimension_count": 2,
    "attention__kv_lora_rank": 4,
    "attention__head_count_kv": 1,
    "attention__key_length": 6,
    "attention__value_length": 4,
    "attention__key_length_mla": 4,
    "attention__value_length_mla": 2,
    "expert_count": 4,
    "expert_used_count": 1,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 2,
}


def alternating(refused: str, tensors: Mapping[str, Any] | None = None, **keys: Any) -> Case:
    """The honest file as one of GPT-OSS."""
    return other(refused, "gpt-oss", tensors, **{**ALTERNATING, **keys})


def latent(refused: str, tensors: Mapping[str, Any] | None = None, **keys: Any) -> Case:
    """The honest file as one of DeepSeek V2."""
    return other(refused, "deepseek2", tensors, **{**LATENT, **keys})


K_B, V_B = np.ones((2, 4, 2), "f4"), np.ones((2, 2, 4), "f4")
PART = "x-{:05}-of-00002.gguf"
EMBEDDING = "token_embd.weight"
QKV = {f"blk.0.attn_{name}.weight": None for name in "qkv"}
FREQUENCIES = "rope_freqs.weight"
NAN, INF = float("nan"), float("inf")
HONEST = {
    "gpt2": case(None),
    "llama": token(None, pieces=True),
    "mixtral": case(None, {"llama.expert_count": 2, "llama.expert_used_count": 1}, tensors=mixtral()),
}
UNREAD = {
    "attention__causal": False,
    "attention__scale": 0.5,
    "attention__sliding_window": 4,
    "attention__max_alibi_bias": 8.0,
    "attention__clamp_kqv": 8.0,
    "attention__layer_norm_scale": 2.0,
    "logit_scale": 0.25,
    "residual_scale": 2.0,
    "embedding_scale": 2.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "use_parallel_residual": True,
    "pooling_type": 4,
    "rope__scaling__attn_factor": 1.2,
    "rope__scaling__yarn_ext_factor": 1.0,
    "rope__dimension_sections": np.array([1, 0, 0, 0], "i4"),
    "rope__freq_base_swa": 5.0,
    "embedding_length_out": 2,
}
"""Keys that change what a Llama computes, which transformers' cannot."""

CASES: dict[str, Case] = {
    **{f"honest: {name}": one for name, one in HONEST.items()},
    # the container
    "version 1": case("version 1", version=1),
    "version 2": case(None, version=2),
    "big-endian": case("big-endian", version=3 << 24),
    "empty": file("empty|not of a training format", lambda: b""),
    "magic alone": file("ends inside|needs", lambda: b"GGUF"),
    "an LFS pointer": file("Git LFS|not of a training format", lambda: b"version https://git-lfs.github.com/spec/v1\n"),
    **{f"cut at {at}": case("needs|ends|lies at|truncated", cut=at) for at in (5, 20, 30, 60, 300, 700, -1, -97)},
    "2^64 - 1 tensors": case("declares", count=(1 << 64) - 1),
    "2^40 keys": case("declares", key_count=1 << 40),
    "one tensor less": case("needs|text of|lies at|lacks|overlapping", count=9),
    "no tensors": case("no embedding|needs|declares", count=0),
    "no keys": case("needs|text of|name|dimensions|ends", key_count=0),
    "a key twice": case("twice", pairs=text("llama.block_count") + value(7), key_count=len(KEYS) + 1),
    "an empty key": case("name", {"": 1}),
    "a key of another alphabet": case("name", {"\x1b[2J": 1}),
    "a key of 100,000 letters": case("text of", {LONG: 1}),
    "a key that is not UTF-8": case("UTF-8", pairs=text(b"\xff\xfe") + value(7), key_count=len(KEYS) + 1),
    "a text that is not UTF-8": case("UTF-8", {"x": struct.pack("<I", TEXT) + text(b"\xed\xa0\x80")}),
    "a text of 2^64 - 1 bytes": case("text of", {"x": struct.pack("<IQ", TEXT, (1 << 64) - 1)}),
    "a text past the end": case("needs", {"x": struct.pack("<IQ", TEXT, 1 << 20)}),
    "an array of 2^64 - 1 numbers": case("items", {"x": array(U32, (1 << 64) - 1, b"")}),
    "an array of 2^61 numbers": case("items", {"x": array(U64, 1 << 61, b"")}),
    "an array past the end": case("needs", {"x": array(U64, 1 << 20, b"")}),
    "an array of arrays": case("unsupported type", {"x": array(ARRAY, 1, array(U32, 0, b""))}),
    "an array of an unknown type": case("unsupported type", {"x": array(77, 1, b"")}),
    "a value of an unknown type": case("unknown type", {"x": struct.pack("<I", 13)}),
    **{
        f"alignment {one!r}": case("alignment", {"general.alignment": one})
        for one in (0, 1, 3, 24, 1 << 31, (1 << 63) + 1, -32, 32.0, "32", True, np.array([32, 32], "u4"))
    },
    "alignment 64": case(None, {"general.alignment": 64}, align=64),
    "another alignment": case("lies at|overlapping", {"general.alignment": 64}),
    # tensors
    "rank 0": one_more("0 dimensions", ()),
    "rank 5": one_more("5 dimensions", (1, 1, 1, 1, 1)),
    "rank 2^31": case("dimensions", infos=text("x") + struct.pack("<I", 1 << 31), extra=1),
    "a dimension of 0": one_more("shape", (4, 0)),
    "dimensions that overflow 64 bits": one_more("shape", (1 << 32, 1 << 32)),
    "dimensions whose product is 0 in 64 bits": one_more("shape", (1 << 32, 1 << 16, 1 << 16)),
    "dimensions of 2^64 - 1": one_more("shape", ((1 << 64) - 1,) * 4),
    "2^47 elements": one_more("lies at", (1 << 47,)),
    "an offset of 2^64 - 32": one_more("lies at", (8,), offset=(1 << 64) - 32),
    "an offset past the end": one_more("lies at", (8,), offset=1 << 20),
    "an offset off the alignment": one_more("lies at", (1,), offset=4),
    "a tensor in another": one_more("overlapping", (8,), offset=32),
    "a tensor twice": one_more("twice", (8,), name=EMBEDDING),
    "a tensor of type 4": one_more("unsupported type 4", (8,), kind=4),
    "a tensor of type 2^32 - 1": one_more("unsupported type", (8,), kind=(1 << 32) - 1),
    "a tensor of Q8_K": one_more("Q8_K", (256,), kind=15),
    "half a block": one_more("multiple of 32", (16,), kind=8),
    "a tensor with no name": one_more("name", (8,), name=""),
    "a tensor whose name leads out": case("unexpected keys", tensors={"../../evil": np.ones(2, "f4")}),
    "a tensor whose name is not UTF-8": one_more("UTF-8", (8,), name=b"\xff"),
    "a tensor of 100,000 letters": one_more("text of", (8,), name=LONG),
    "a layer of 400 digits": case("text of", tensors={f"blk.{'9' * 400}.attn_q.weight": np.ones(2, "f4")}),
    "a layer too many": case("unexpected|layers", tensors={"blk.1.attn_norm.weight": np.ones(4, "f4")}),
    "a layer twice": case(
        "unexpected|both|lacks|shape", tensors={"blk.00.attn_norm.weight": np.ones(4, "f4")}
    ),
    "no embedding": case("no embedding", tensors={EMBEDDING: None}),
    "an embedding of one axis": case("no embedding", tensors={EMBEDDING: np.ones(32, "f4")}),
    "a norm that is missing": case("missing|lacks", tensors={"output_norm.weight": None}),
    "a norm of whole numbers": case("int8", tensors={"output_norm.weight": np.ones(HIDDEN, "i1")}),
    "a matrix of another shape": case("shape|rows", tensors={"blk.0.attn_q.weight": np.ones((6, 4), "f4")}),
    "a matrix of one axis": case("shape|rows", tensors={"blk.0.attn_q.weight": np.ones(16, "f4")}),
    # kinds of values
    **{
        f"architecture {one!r}"[:60]: case("architecture", {"general.architecture": one})
        for one in (None, 7, "", "x\x1b[2J", LONG, "../../evil", ["llama"], np.array([1, 2], "u4"))
    },
    "of no model": case("no model", {"general.type": "adapter"}),
    "a type that is an array": case("no model", {"general.type": np.array([1, 2], "u4")}),
    **{
        f"block_count {one!r}": own("block_count", block_count=one)
        for one in ("1", -1, 0, 1 << 40, True, 1.0, np.array([1, 2], "u4"), np.array([], "u4"), NAN)
    },
    "2^31 - 1 layers": own("layers", block_count=(1 << 31) - 1),
    "two layers of one": own("missing|lacks|layers", block_count=2),
    **{
        f"{name} {one!r}": own(name.rpartition("__")[2], **{name: one})
        for name in ("attention__head_count", "embedding_length", "feed_forward_length", "attention__head_count_kv")
        for one in (0, "2", 1 << 40, np.array([1, 2], "u4"))
    },
    "other heads": own("head_count_kv", attention__head_count=1, attention__head_count_kv=3),
    "more heads of keys than heads": own("head_count_kv", attention__head_count_kv=4, attention__key_length=1),
    "groups that divide no heads": case(
        "head_count_kv",
        {f"llama.attention.{name}": one for name, one in (("head_count", 1), ("head_count_kv", 2))},
        tensors={f"blk.0.attn_{name}.weight": np.ones((8, 4), "f4") for name in "kv"},
    ),
    "key_length 10^9": own("values of another|rows|head", attention__key_length=10**9),
    "both lengths 10^9": own("rows|head", attention__key_length=10**9, attention__value_length=10**9),
    "both lengths 10^9 and frequencies": case(
        "rope_freqs",
        {f"llama.attention.{name}_length": 10**9 for name in ("key", "value")},
        tensors={FREQUENCIES: np.ones(1, "f4")},
    ),
    **{
        f"{name} {one!r}": own(name.rpartition("__")[2], **{name: one})
        for name in ("attention__layer_norm_rms_epsilon", "rope__freq_base")
        for one in (0.0, -1.0, NAN, INF, struct.pack("<Id", F64, 1e300), "1", True, np.array([1, 2], "f4"))
    },
    "no epsilon": own("epsilon", attention__layer_norm_rms_epsilon=None),
    # keys that change the computation
    **{f"{name} of a Llama": own(name.rpartition("__")[2], **{name: one}) for name, one in UNREAD.items()},
    "keys that change nothing": own(
        None,
        attention__causal=True,
        attention__sliding_window=0,
        expert_gating_func=1,
        expert_weights_scale=0.0,
        leading_dense_block_count=0,
        rope__scaling__finetuned=True,
        rope__scaling__type="none",
        tensor_data_layout="Meta AI original pth",
        vocab_size=VOCABULARY,
    ),
    "keys of another architecture": case(None, {"qwen2.attention.scale": 7.0, "llama2.logit_scale": 3.0}),
    "sliding window of Qwen 2": other("sliding_window", "qwen2", attention__sliding_window=4),
    "soft capping of Qwen 3": other("final_logit_softcapping", "qwen3", final_logit_softcapping=30.0),
    "a scale of Granite that is NaN": other(
        "logit_scale", "granite", embedding_scale=1.0, residual_scale=1.0, attention__scale=1.0, logit_scale=NAN
    ),
    "soft capping of Gemma 3 that is NaN": other(
        "final_logit_softcapping", "gemma3", attention__sliding_window=4, final_logit_softcapping=NAN
    ),
    "soft capping of Gemma 3 that is a text": other(
        "final_logit_softcapping", "gemma3", attention__sliding_window=4, final_logit_softcapping="30"
    ),
    "half of a head": own("turns 1 of 2", rope__dimension_count=1),
    "more than a head": own("turns 4 of 2", rope__dimension_count=4),
    "a factor without its kind": own(None, rope__scaling__factor=4.0),
    "an old factor": own(None, rope__scale_linear=4.0),
    "a factor of 0": own("factor", rope__scaling__type="linear", rope__scaling__factor=0.0),
    "a factor that is NaN": own("factor", rope__scaling__factor=NAN),
    "another scaling": own("longrope", rope__scaling__type="longrope"),
    "a scaling that is a number": own("scaling.type", rope__scaling__type=2),
    "a scaling of 100,000 letters": own("scales rotary", rope__scaling__type=LONG),
    "yarn of another scale": own(
        "YaRN",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=4,
        rope__scaling__yarn_attn_factor=2.0,
    ),
    "yarn and frequencies": case(
        "and by", {"llama.rope.scaling.type": "yarn"}, tensors={FREQUENCIES: np.ones(1, "f4")}
    ),
    **{
        f"frequencies {name}": case("rope_freqs", tensors={FREQUENCIES: one})
        for name, one in {
            "that are NaN": np.array([NAN], "f4"),
            "that are infinite": np.array([INF], "f4"),
            "of 0": np.zeros(1, "f4"),
            "of another shape": np.ones(2, "f4"),
            "of two axes": np.ones((1, 1), "f4"),
            "of Llama 3 by no rule": np.array([3], "f4"),
        }.items()
    },
    "factors of Phi 3": case("unexpected keys", tensors={"rope_factors_long.weight": np.ones(1, "f4")}),
    "half of the factors of Phi 3": other("rope_factors_short", "phi3", {"rope_factors_long.weight": np.ones(1, "f4")}),
    "the other half": other("rope_factors_long", "phi3", {"rope_factors_short.weight": np.ones(1, "f4")}),
    "a head of Phi 3 without elements": other("unexpected keys|dimension_count", "phi3", attention__head_count=9),
    "groups of Falcon": other(
        "rows of queries|match",
        "falcon",
        {**QKV, "blk.0.attn_qkv.weight": np.ones((20, 4), "f4"), **dense(None)},
        attention__head_count_kv=4,
        attention__layer_norm_epsilon=1e-5,
    ),
    "alibi of MPT of 8.5": other("ALiBi", "mpt", attention__max_alibi_bias=8.5, attention__layer_norm_epsilon=1e-5),
    # experts
    "a billion experts": experts("experts", 10**9, 1),
    "a billion experts of 2^31 - 1 layers": experts("experts", 10**9, 1, **{"llama.block_count": (1 << 31) - 1}),
    "more experts in use than there are": experts("expert_used_count", 2, 2, **{"llama.expert_used_count": 3}),
    "other experts": experts("not 2 experts", 2, 3),
    "2^31 - 1 experts": experts("more than any model", (1 << 31) - 1, 1),
    "experts that are a text": experts("expert_count", "2", 2),  # type: ignore[arg-type]
    "experts that are flat": case(
        "experts",
        {"llama.expert_count": 2, "llama.expert_used_count": 1},
        tensors={"blk.0.ffn_up_exps.weight": np.ones((2, 2), "f4")},
    ),
    # GPT-OSS and DeepSeek
    "a gate without up": alternating("lacks a part", {"blk.0.ffn_gate_exps.weight": np.ones((2, 3, 4), "f4")}),
    "gate and up of other shapes": alternating(
        "match.*gate and up",
        {f"blk.0.ffn_{one}_exps.weight": np.ones((2, n, 4), "f4") for n, one in enumerate(("gate", "up", "down"), 1)},
    ),
    "gate and up of whole numbers and others": alternating(
        "match.*element types",
        {
            f"blk.0.ffn_{one}_exps.weight": np.ones((2, 4, 4), kind)
            for one, kind in (("gate", "i1"), ("up", "f4"), ("down", "f4"))
        },
    ),
    "biases of three experts of two": alternating(
        "not 2 experts", {f"blk.0.ffn_{one}_exps.bias": np.ones((3, 4), "f4") for one in ("gate", "up", "down")}
    ),
    "no window": alternating("sliding_window", attention__sliding_window=None),
    "a window that is a text": alternating("sliding_window", attention__sliding_window="8"),
    "windows of a text": alternating("other layers", attention__sliding_window_pattern="2"),
    "windows in all layers": alternating("other layers", attention__sliding_window_pattern=np.array([1, 1], "u4")),
    "windows with another base": alternating("another base", rope__freq_base_swa=5.0),
    "keys without values": latent("without", {"blk.0.attn_k_b.weight": K_B}),
    "keys of other shapes": latent("shapes", {"blk.0.attn_k_b.weight": V_B, "blk.0.attn_v_b.weight": V_B}),
    "keys of one axis": latent("shapes", {"blk.0.attn_k_b.weight": K_B[0, 0], "blk.0.attn_v_b.weight": V_B}),
    "keys and values twice": latent(
        "whole and in parts",
        {
            **{f"blk.0.attn_{one}.weight": None for one in "kv"},
            "blk.0.attn_k_b.weight": K_B, "blk.0.attn_v_b.weight": V_B,
            "blk.0.attn_kv_b.weight": np.ones((8, 4), "f4"),
        },
    ),
    "a latent of 2^31 - 2": latent("other sizes", attention__kv_lora_rank=(1 << 31) - 2),
    "a head that turns whole": latent("key_length_mla", attention__key_length_mla=2),
    "a head of a text": latent("key_length_mla", attention__key_length_mla="4"),
    "a router that is an array": latent("another way", expert_gating_func=np.array([1, 2], "u4")),
    "a router of no kind": latent("another way", expert_gating_func=7),
    "more dense layers than there are": latent("leading_dense", leading_dense_block_count=2),
    "a scale of experts that is NaN": latent("expert_weights_scale", expert_weights_scale=NAN),
    "a norm of experts that is a number": latent("expert_weights_norm", expert_weights_norm=1),
    "biases of a softmax": latent("another way", {"blk.0.exp_probs_b.bias": np.ones(4, "f4")}),
    "groups that divide no experts": latent(
        "expert_group_count",
        {"blk.0.exp_probs_b.bias": np.ones(4, "f4")},
        expert_gating_func=2, expert_group_count=3, expert_group_used_count=1,
    ),
    "a scale of attention that is a text": latent(
        "yarn_log_multiplier",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=4,
        rope__scaling__yarn_log_multiplier="0.1",
    ),
    # tokenizers
    "tokens that are numbers": token("not texts", tokens=np.arange(VOCABULARY, dtype="u4")),
    "tokens that are one text": token("not texts", tokens="abcdefgh"),
    "a token less": token("tokens", tokens=["a"] * 7),
    "a token twice": token("twice", tokens=["a", "a", "b", "c", "ab", "bc", "abc", "x"]),
    "a piece twice": token("twice", pieces=True, tokens=["a"] * 8),
    **{
        f"token_type {name}": token("token_type", pieces=pieces, token_type=one)
        for pieces in (False, True)
        for name, one in {
            f"of floats, {pieces}": np.ones(8, "f4"),
            f"that are NaN, {pieces}": np.full(8, NAN, "f4"),
            f"of texts, {pieces}": ["1"] * 8,
            f"a number, {pieces}": 1,
            f"of one less, {pieces}": np.ones(7, "i4"),
            f"of flags, {pieces}": np.ones(8, "?"),
        }.items()
    },
    "token_type of no such type": token(None, token_type=np.full(8, 99, "i4")),
    "scores that are NaN": token("scores", pieces=True, scores=np.full(8, NAN, "f4")),
    "scores that are infinite": token("scores", pieces=True, scores=np.full(8, INF, "f4")),
    "scores that are texts": token("scores", pieces=True, scores=["0"] * 8),
    "no scores": token("scores", pieces=True, scores=None),
    "no unknown token": token("unknown", pieces=True, unknown_token_id=None),
    "merges of tokens that are not there": token("merges", merges=["a x"]),
    "merges of three": token("merges", merges=["a b c"]),
    "merges that are one token": token("merges", merges=["ab"]),
    "merges that are numbers": token("merges", merges=np.array([1, 2], "u4")),
    "merges that are a text": token("merges", merges="a b"),
    "no merges": token("merges", merges=None),
    **{
        f"{key}_token_id {one!r}": case("has no token", {f"tokenizer.ggml.{key}_token_id": one})
        for key in ("bos", "eos", "padding", "eot")
        for one in (8, -1, 1 << 40, 0.5, "0", np.array([0, 1], "u4"))
    },
    "model that is an array": token("unsupported kind", model=np.array([1, 2], "u4")),
    "model that is a number": token("unsupported kind", model=7),
    "model of 100,000 letters": token("unsupported kind", model=LONG),
    "pre that is an array": token("unknown way", pre=np.array([1, 2], "u4")),
    "bos that is added by an array": token(None, add_bos_token=np.array([1, 2], "u4")),
    "eos that is added by an array": token("add_eos_token", add_eos_token=np.array([1, 2], "u4")),
    "tokens with escape sequences": token(None, tokens=["\x1b[2J", "\0", "a", "b", "c", "ab", "bc", "abc"]),
    "a template that is a number": case(None, {"tokenizer.chat_template": 7}),
    "a template of a megabyte": case(None, {"tokenizer.chat_template": "{{ x }}" * (1 << 17)}),
    "a template that includes itself": case(None, {"tokenizer.chat_template": "{% include 'chat_template.jinja' %}"}),
    # parts
    "split.tensors.count of more": case("11 of 99 tensors", {"split.tensors.count": 99}),
    "split.tensors.count that is an array": case("tensors", {"split.tensors.count": np.array([10, 10], "u4")}),
    "one of 99,999 parts": file("is not next to it", gguf, "x-00001-of-99999.gguf"),
    "one of 0 parts": file("cannot be one of 0", gguf, "x-00001-of-00000.gguf"),
    "part 7 of 2": parts("cannot be one of", [PART.format(number) for number in (1, 2, 7)], PART.format(7)),
    "a part twice": parts("same tensors", [PART.format(number) for number in (1, 2)], PART.format(1)),
    "two models": parts("several GGUF models", ["a.gguf", "b.gguf"], ""),
    "a link to another file": Case(linked, "GGUF|link"),
}  # fmt: skip


SIZE = 4 << 20


def many(count: int, **keys: Any) -> Callable[[], bytes]:
    """The honest file with an embedding of `count` rows of whole numbers, which is refused after its tokenizer."""
    tokenizer = {"token_type": None, **keys}
    metadata = {f"tokenizer.ggml.{name}": one for name, one in tokenizer.items()}
    return lambda: gguf(
        {name: one() if callable(one) else one for name, one in metadata.items()},
        {EMBEDDING: np.zeros((count, HIDDEN), "i1")},
    )


def pieces(make: Callable[[int], str], count: int) -> Callable[[], bytes]:
    """As `many`, with pieces of sentencepiece."""
    own = {name.rpartition(".")[2]: one for name, one in PIECES.items()} | {"scores": np.zeros(count, "f4")}
    return many(count, **own, tokens=lambda: [make(number) for number in range(count)])


def tensors_of(count: int) -> bytes:
    """A file of tensors of eight bytes."""
    entries = b"".join(info(f"blk.{n}.a", (2,), 0, 8 * n) for n in range(count))
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 2) + text("general.alignment") + value(8)
    head += text("general.architecture") + value("llama") + entries
    return head + bytes(-len(head) % 8 + 8 * count)


def experts_of(layers: int, count: int) -> bytes:
    """A Mixtral of many experts of one number."""
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(layers) for part in ("gate", "up", "down")]
    joined = {name: np.zeros((count, 1, 1), "f2") for name in names}
    sizes = {"block_count": layers, "expert_count": count, "expert_used_count": 1}
    return gguf({f"llama.{name}": one for name, one in sizes.items()}, {**joined, **dense(None)})


def of_heads(size: int, frequencies: int) -> bytes:
    """A file whose heads have `size` elements."""
    lengths = {f"llama.attention.{name}_length": size for name in ("key", "value")}
    return gguf(lengths, {FREQUENCIES: np.ones(frequencies, "f4")})


BOMBS: dict[str, Callable[[], bytes]] = {
    "many tensors": lambda: tensors_of(1 << 15),
    "too many tensors": lambda: tensors_of(1 << 17),
    "many keys": lambda: gguf({f"x{n}": 1 for n in range(65_000)}),
    "many keys of a Llama": lambda: gguf({f"llama.x{n}": 1 for n in range(65_000)}),
    "an array of numbers": lambda: gguf({"x": np.zeros(SIZE - 100, "u1")}),
    "an array of a Llama": lambda: gguf({"llama.block_count": np.zeros(SIZE - 100, "u1")}),
    "a window of numbers": lambda: gguf({"llama.attention.sliding_window": np.arange(SIZE // 4, dtype="u4")}),
    "empty texts": lambda: gguf({"x": array(TEXT, SIZE // 8, bytes(SIZE // 8 * 8))}),
    "texts of a Llama": lambda: gguf({"llama.x": ["x" * (n % 7) for n in range(SIZE // 11)]}),
    "a long text": lambda: gguf({"x": "x" * SIZE}),
    "a long architecture": lambda: gguf({"general.architecture": "x" * SIZE}),
    "a long type": lambda: gguf({"general.type": ["x"] * (SIZE // 9)}),
    "a long pre": lambda: gguf({"tokenizer.ggml.pre": ["x"] * (SIZE // 9)}),
    "a long template": lambda: gguf({"tokenizer.chat_template": "{{ x }}" * (SIZE // 7)}),
    "many tokens": many(SIZE // 12, tokens=lambda: [f"{n:x}" for n in range(SIZE // 12)], merges=["1 2"]),
    "a long token": many(8, tokens=lambda: [*"abcdefg", "ab" * (SIZE // 2)], merges=["a b"]),
    "many merges": many(8, tokens=[*"abcdef", "ab", "bc"], merges=lambda: ["a b"] * (SIZE // 11)),
    "a merge of spaces": many(8, tokens=[*"abcdef", "ab", "bc"], merges=lambda: [" " * SIZE]),
    "merges of long tokens": many(
        3, tokens=["a" * 999, "b" * 999, "a" * 999 + "b" * 999], merges=lambda: ["a" * 999 + " " + "b" * 999] * 2000
    ),
    "types of tokens": many(8, token_type=lambda: np.zeros(SIZE // 4, "i4")),
    "a long piece": pieces(lambda n: "abcdefg"[n] if n < 7 else "ab" * (SIZE // 2), 8),
    "pieces of 1000": pieces(lambda n: "a" * 1000 + str(n), SIZE // 1010),
    "pieces of one letter": pieces(lambda n: "a" * (n + 1), 2800),
    "many pieces": pieces(lambda n: f"{n:x}", SIZE // 16),
    "many experts": lambda: experts_of(1, SIZE // 6),
    "many layers of experts": lambda: experts_of(64, SIZE // 64 // 6),
    "layers without end": lambda: gguf(
        {"llama.block_count": (1 << 31) - 1, "llama.expert_count": 1, "llama.expert_used_count": 1}
    ),
    "a head without end": lambda: of_heads((1 << 31) - 2, 1),
    "frequencies": lambda: of_heads(SIZE // 2, SIZE // 4),
}  # fmt: skip
"""Files of a few megabytes that declare much."""
