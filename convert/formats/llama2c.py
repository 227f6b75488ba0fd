"""llama2.c: `ckpt.pt` of its trainer, and the `.bin` files that its programs run; becomes a Llama.

Layout (karpathy/llama2.c `train.py`, `model.py`, `export.py`, `run.c`, `runq.c`): `ckpt.pt` has Meta's names under
`model`, and `model_args`. A `.bin` has no names. Version 0: seven int32 (dim, hidden_dim, n_layers, n_heads,
n_kv_heads, vocab_size, max_seq_len; a negative vocab_size: with a head of its own), then float32. Versions 1 and 2: the
magic 0x616b3432, the version, the same seven, a byte (1: the head is the embedding), in version 2 the int32 size of the
groups, in 256 bytes; then float32, in version 2 norms alone: each matrix is int8 [n] and one float32 scale per group
of its elements, row by row, and a value is their product. The order of the tensors is that of `ORDERS`.

The programs know one epsilon (1e-5), one rotary base (10000), 1 as the token before each text, and stop at it.
`tokenizer.bin` (`tokenizer.py`): the longest token's length uint32; then for each token its score float32, its length
uint32, and its UTF-8 with spaces for sentencepiece's U+2581.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, read_small
from llmconv.convert import algebra, tokenizers
from llmconv.convert.assembly import contents_around, second_models
from llmconv.convert.fields import Fields
from llmconv.convert.formats import Format, has_sign_of, meta
from llmconv.convert.models.completeness import WRAPPERS, as_loaded
from llmconv.convert.models.config_file import plain_fields, updated, with_architecture
from llmconv.convert.state_dicts.files import Sign, require_state
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.files.safetensors_file import FileTensor
from llmconv.files.source_file import open_source
from llmconv.not_a_model_folder import training_files_in
from llmconv.output.plan import json_bytes
from llmconv.tensors import BY_NAME, Array, LazyTensor

FILE = "ckpt.pt"
SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
OWN_NAMES = re.compile(r"^(?:_orig_mod\.|module\.)*layers\.\d+\.feed_forward\.w1\.weight$")
"""Names that its files have (`model.py`), next to `model_args`."""
MAGIC, HEADER = 0x616B3432, 256
LARGEST, MOST_LAYERS = 1 << 24, 1024  # no size of a model is larger
SEVEN = struct.Struct("<7i")
FLOAT, BYTE = BY_NAME["float32"], BY_NAME["int8"]

NORM_1, NORM_2 = "layers.{}.attention_norm.weight", "layers.{}.ffn_norm.weight"
ATTENTION = tuple(f"layers.{{}}.attention.{name}.weight" for name in ("wq", "wk", "wv", "wo"))
MLP = tuple(f"layers.{{}}.feed_forward.{name}.weight" for name in ("w1", "w2", "w3"))
NORM, EMBEDDING, HEAD = "norm.weight", "tok_embeddings.weight", "output.weight"
TABLES = ("freqs_cos", "freqs_sin")  # which the model computes
ORDERS = {  # by version; of a name with `{}` all layers
    0: (EMBEDDING, NORM_1, *ATTENTION, NORM_2, *MLP, NORM, *TABLES, HEAD),
    1: (NORM_1, NORM_2, NORM, EMBEDDING, *ATTENTION, *MLP, HEAD),
    2: (NORM_1, NORM_2, NORM, EMBEDDING, *ATTENTION, *MLP, HEAD),
}
NAMES: dict[str, str | None] = {
    **meta.LLAMA,
    **dict.fromkeys((*TABLES, "freqs_cis", "layers.{}.attention.mask"), None),  # buffers of older runs
}


@dataclass(frozen=True)
class BinHeader:
    """The header of a `.bin` file: its version, sizes by their names in `SIZES`, and where the tensors begin."""

    version: int
    sizes: Mapping[str, int]
    shared: bool  # whether the head is the embedding
    group: int  # elements with one scale; 0: float32
    start: int  # position of the first tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape, in the order of the file."""
        dim, hidden, layers, heads, kv_heads, vocabulary, positions = (self.sizes[name] for name in SIZES)
        keys, table = dim // heads * kv_heads, (positions, dim // heads // 2)
        matrices = dict(zip((*ATTENTION, *MLP), ((dim, dim), (keys, dim), (keys, dim), (dim, dim)), strict=False))
        matrices |= dict(zip(MLP, ((hidden, dim), (dim, hidden), (hidden, dim)), strict=True))
        others = {EMBEDDING: (vocabulary, dim), HEAD: (vocabulary, dim), **dict.fromkeys(TABLES, table)}
        every = {**dict.fromkeys((NORM_1, NORM_2, NORM), (dim,)), **matrices, **others}
        names = [name for name in ORDERS[self.version] if name != HEAD or not self.shared]
        return {name.format(layer): every[name] for name in names for layer in range(layers if "{}" in name else 1)}

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        count = prod(shape)
        return count + 4 * (count // self.group) if self.group and len(shape) == 2 else 4 * count

    @property
    def size(self) -> int:
        """The bytes of the whole file."""
        return self.start + sum(map(self.bytes_of, self.shapes().values()))


def header_of(path: Path) -> BinHeader | None:
    """The header of a `.bin` file of llama2.c; None for any other, MalformedInput for a version that is unknown."""
    if path.suffix != ".bin" or not path.is_file():
        return None
    with open_source(path) as file:
        head = file.read(HEADER)
    versioned = len(head) == HEADER and struct.unpack_from("<I", head)[0] == MAGIC
    version = struct.unpack_from("<i", head, 4)[0] if versioned else 0
    if versioned and version not in (1, 2):
        raise UnsupportedInput(
            f"`{path.name}` is a file of llama2.c of version {version}", hint="versions 0, 1 and 2 are read"
        )
    if len(head) < SEVEN.size + 8:
        return None
    sizes = dict(zip(SIZES, SEVEN.unpack_from(head, 8 if versioned else 0), strict=True))
    shared, group = bool(head[36]) if versioned else sizes["vocab_size"] > 0, 0
    if version == 2:
        (group,) = struct.unpack_from("<i", head, 37)
    sizes["vocab_size"] = abs(sizes["vocab_size"]) if not versioned else sizes["vocab_size"]
    found = BinHeader(version, sizes, shared, group, HEADER if versioned else SEVEN.size)
    if _is_possible(found):
        return found
    if versioned:
        raise MalformedInput(f"the header of `{path.name}` is damaged", hint="copy it again, or export it again")
    return None


def _is_possible(header: BinHeader) -> bool:
    dim, _, layers, heads, kv_heads, *_ = header.sizes.values()
    if not all(0 < size <= LARGEST for size in header.sizes.values()) or layers > MOST_LAYERS:
        return False
    if dim % heads or heads % kv_heads or dim // heads % 2:
        return False
    return header.version < 2 or (
        header.group > 0
        and not any(len(shape) == 2 and prod(shape) % header.group for shape in header.shapes().values())
    )


def _bin_tensors(path: Path, header: BinHeader) -> dict[str, LazyTensor]:
    """The tensors under Meta's names; MalformedInput unless the file is as long as its header says."""
    if path.stat().st_size != header.size:
        raise MalformedInput(
            f"`{path.name}` has {path.stat().st_size:,} bytes, and {header.size:,} by the sizes in its header",
            hint="the file is truncated or damaged; copy it again, or export it again",
        )
    shapes = header.shapes()
    starts = accumulate(map(header.bytes_of, shapes.values()), initial=header.start)
    return {
        name: _dequantized(path, start, shape, header.group)
        if header.group and len(shape) == 2
        else FileTensor(path, start, FLOAT, shape)
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }


def _dequantized(path: Path, start: int, shape: tuple[int, ...], group: int) -> LazyTensor:
    """A matrix of int8 codes and scales, in float32 as `runq.c` computes it; a group may reach into the next row."""
    count, width = prod(shape), shape[1]
    codes = FileTensor(path, start, BYTE, (count,))
    scales = FileTensor(path, start + count, FLOAT, (count // group,))

    def load(first: int, last: int) -> Array:
        begin, end = first * width, last * width
        low = begin // group
        factors: Array = np.repeat(scales.rows(low, -(-end // group)), group)[begin - low * group :][: end - begin]
        with np.errstate(over="ignore", invalid="ignore"):
            values: Array = codes.rows(begin, end).astype(np.float32) * factors
        return values.reshape(last - first, width)

    return LazyTensor(FLOAT, shape, load)


def _file(path: Path) -> Path:
    """The checkpoint at a path; of a folder `ckpt.pt`, or the only `.bin` of llama2.c in it."""
    if not path.is_dir() or (path / FILE).is_file():
        return path / FILE if path.is_dir() else path
    found = [file for file in sorted(path.glob("*.bin")) if header_of(file)]
    return found[0] if len(found) == 1 else path


def _detect(path: Path) -> bool:
    file = _file(path)
    return has_sign_of("llama2c", file) or header_of(file) is not None


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    file, warnings = _file(path), list[str]()
    if header := header_of(file):
        stored, sizes, eps = _bin_tensors(file, header), dict(header.sizes), 1e-5
        version, dropped = f"version {header.version}", tuple[str, ...]()
        if header.group:
            warnings.append(
                f"`{file.name}` has codes of 8 bits, which were dequantized; its trainer's `{FILE}` is exact"
            )
    else:
        found = require_state(file)
        stored, version = {WRAPPERS.sub("", name): tensor for name, tensor in found.tensors().items()}, ""
        warnings += second_models(found)
        sizes, eps = _model_args(found.around, stored, file.name)
        dropped = contents_around(found)
    order = algebra.rope_order(sizes["dim"] // sizes["n_heads"])
    rotated = {
        name: algebra.permute_rows(tensor, order)
        if name.endswith((".wq.weight", ".wk.weight")) and tensor.num_rows % len(order) == 0
        else tensor
        for name, tensor in stored.items()
    }
    tensors = algebra.renamed(rotated, NAMES, file.name)
    tokens, notes = _tokenizer(file, tokenizer, sizes["vocab_size"])
    tied = header.shared if header else None  # in `ckpt.pt` the values decide
    settings = {**_config(sizes, eps), "tie_word_embeddings": tied}
    settings = updated(settings, plain_fields(config, warnings))
    settings = as_loaded(tensors, with_architecture(settings))
    side_files = {
        **tokens.files,
        "generation_config.json": json_bytes({"bos_token_id": BOS, "eos_token_id": [EOS, BOS]}),
    }
    left = (*dropped, *training_files_in(path))
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, (*warnings, *notes), version, 1, left)


def _model_args(
    around: Mapping[Any, Any], stored: Mapping[str, LazyTensor], source: str
) -> tuple[dict[str, int], float]:
    """The sizes in `SIZES` and the epsilon of a `ckpt.pt`; MalformedInput for one that contradicts the weights."""
    stated = around.get("model_args")
    hint = "the file was changed, or another program wrote it"
    given = Fields(stated if isinstance(stated, dict) else {}, source, "in `model_args` of `{}`", hint)
    sizes = {name: given.count(name) for name in ("dim", "n_layers", "n_heads", "vocab_size", "max_seq_len")}
    sizes["n_kv_heads"] = given.count("n_kv_heads", default=sizes["n_heads"])
    first = stored.get("layers.0.feed_forward.w1.weight")
    sizes["hidden_dim"] = first.num_rows if first else 0
    odd = {
        "n_layers": sizes["n_layers"] > len(stored),
        "n_heads": sizes["dim"] % sizes["n_heads"] or sizes["dim"] // sizes["n_heads"] % 2,
        "n_kv_heads": sizes["n_heads"] % sizes["n_kv_heads"],
    }
    if name := next((name for name, is_odd in odd.items() if is_odd), ""):
        raise given.invalid(name, sizes[name])
    return sizes, given.number("norm_eps", default=1e-5)


def _config(sizes: Mapping[str, int], eps: float) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes["dim"],
        "intermediate_size": sizes["hidden_dim"],
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": sizes["n_kv_heads"],
        "head_dim": sizes["dim"] // sizes["n_heads"],
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["max_seq_len"],
        "rms_norm_eps": eps,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


BOS, EOS = 1, 2  # in every vocabulary (`tinystories.py`, `run.c`)
UNKNOWN, FIRST_BYTE, BYTES = 0, 3, 256  # ids; the kind of a byte in sentencepiece is 6
NAMED = {UNKNOWN: "<unk>", BOS: "<s>", EOS: "</s>"}
TOKENIZERS = ("tokenizer.model", "tokenizer.bin")


def _tokenizer(file: Path, given: Path | None, vocabulary: int) -> tuple[meta.MetaTokenizer, list[str]]:
    """The user's tokenizer, or the one next to the file (or a folder above) that has as many tokens as the model."""
    if given:
        if given.is_file() and given.suffix in (".bin", ".model"):
            return read_tokenizer(given), []
        return meta.load_tokenizer(given, since_3_1=False), []
    near = [folder / name for folder in (file.parent, file.absolute().parent.parent) for name in TOKENIZERS]
    loaded = [read_tokenizer(one) for one in near if one.is_file()]
    if found := next((one for one in loaded if one.size == vocabulary), None):
        return found, []
    other = f", and `tokenizer.model` near it has {loaded[0].size} tokens" if loaded else ""
    return meta.MetaTokenizer(), [
        f"`{file.name}` has no tokenizer of {vocabulary} tokens next to it{other}; give the run's with `--tokenizer`"
    ]


def read_tokenizer(path: Path) -> meta.MetaTokenizer:
    """The tokenizer in a `tokenizer.model` or `tokenizer.bin`; MalformedInput if it is none."""
    if path.suffix == ".model":
        data = read_small(path)
        return meta.sentencepiece_tokenizer(tokenizers.parse_sentencepiece(data), {meta.TOKENIZER: data})
    model = tokenizers.SentencePieceModel(
        _pieces(path), is_bpe=True, byte_fallback=True, bos=BOS, eos=EOS, unk=UNKNOWN, charsmap=b"",
        add_dummy_prefix=True, remove_extra_whitespaces=False,
    )  # fmt: skip
    return meta.sentencepiece_tokenizer(model, {})


def _pieces(path: Path) -> tuple[tuple[str, float, int], ...]:
    """Text, score and type of each token of a `tokenizer.bin`; MalformedInput if it is none."""
    data, pieces, place = read_small(path), list[tuple[str, float, int]](), 4
    try:
        while place < len(data):
            score, length = struct.unpack_from("<fI", data, place)
            text = data[place + 8 : place + 8 + length]
            place += 8 + length
            number = len(pieces)
            is_byte = FIRST_BYTE <= number < FIRST_BYTE + BYTES
            kind = (
                tokenizers.UNKNOWN if number == UNKNOWN else tokenizers.CONTROL if number in NAMED else 6 * is_byte or 1
            )
            pieces.append((NAMED.get(number) or text.decode().replace(" ", tokenizers.SPACE), score, kind))
    except (struct.error, UnicodeDecodeError):
        place = -1
    if place != len(data) or len(pieces) <= FIRST_BYTE + BYTES:
        raise MalformedInput(f"`{path.name}` is not a tokenizer of llama2.c", hint="copy it again from the run")
    return tuple(pieces)


def _peek(file: Path) -> dict[str, LazyTensor]:
    header = header_of(file)
    return _bin_tensors(file, header) if header else require_state(file).tensors()


FORMAT = Format(
    name="llama2c",
    title="llama2.c: `ckpt.pt` or a `.bin` file, or the folder it lies in",
    detect=_detect,
    sign=Sign(keys=("model_args",), names=OWN_NAMES),
    open=_open,
    covers="Llamas of any size, with `tokenizer.model` or `tokenizer.bin`; `.bin` of versions 0, 1 and 2 (dequantized)",
    peek=lambda path: _peek(_file(path)),
)
