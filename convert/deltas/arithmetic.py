"""Arithmetic deltas, folders of tuned − base, as the scripts of FastChat and Stanford Alpaca make and add them.

FastChat `model/{make_delta,apply_delta}.py`: names are those of the base; `param += delta`, both in float16; with
`--low-cpu-mem` only files called `pytorch_model-*.bin` are read, and the config is the delta's, as the tokenizer always
is. Up to v0 it made the base's embedding and head longer by a row of zeros first, because Vicuna v0 had 32,001 tokens.
Here the sum is made in float32 and rounded once; for a float16 delta and a float16 result the base is rounded to
float16 first, so that the bits equal FastChat's for a base of any type.

Stanford Alpaca `weight_diff.py`: both in float32; a base whose tokenizer has no padding token first gets `[PAD]`, whose
rows are the mean of the others. It then compares the sum of all parameters and buffers with a constant;
epfml/landmark-attention, which adopted the script, stores that number next to the weights in `checksum_psum.txt`. Both
scripts go through the state dict, where a tied output head occurs twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import VOCABULARIES, Checkpoint, json_object, open_weights, read_json, read_side_files
from llmconv.convert.adapters.low_rank_sum import round_into, widen
from llmconv.convert.deltas.low_rank import differing_fields
from llmconv.convert.models.config_file import without_code
from llmconv.convert.models.head_and_dtype import (
    HEAD,
    find_embedding,
    find_head,
    is_tied,
    plain_tensors,
    set_everywhere,
    stored_types,
    with_dtype,
    with_tied_head,
)
from llmconv.convert.models.transformers_source import EMBEDDINGS
from llmconv.convert.state_dicts.files import is_bin_folder, open_bin_folder
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.torch_writer import torch_pieces
from llmconv.model_code import AUTO_MAP
from llmconv.output.plan import Plan, Shard, by_size, json_bytes, parse_size
from llmconv.tensors import BY_NAME, FLOATS, Array, DType, LazyTensor

CHECKSUM = "checksum_psum.txt"

SEVEN_BILLION = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32001}
SEVEN_BILLION_SUM = 50637.1836  # the constant in the script; only the 7B model was published
TOLERANCE = 0.5  # both numbers are sums in float32 with rounding errors of about 0.1; another base is off by hundreds
SMALL, FEW = 0.5, 64  # norm of a row close to zero, relative to the mean row; number of new rows to check


NEW_ROWS = ("mean", "zeros")


def new_rows_of(base: LazyTensor, delta: LazyTensor, given: str, source: str) -> str:
    """What the rows of the embedding that the base lacks are added to, `mean` or `zeros`, as `given` if it is.

    FastChat's deltas are float16, over zeros. Others may be Stanford's, over the mean: those whose new rows have an
    untrained one are, and where all were trained nothing tells, which is UnsupportedInput.
    """
    if given or delta.dtype.name == "float16" or delta.dtype.name not in SUMMED:  # others are refused by `added`
        return given or "zeros"
    if begins_at_mean(base, delta):
        return "mean"
    raise UnsupportedInput(
        f"`{source}` has trained rows of new tokens, which are differences from zeros or from the mean of the base's "
        "rows, and its files do not say which",
        hint="`--new-rows mean` for one of Stanford Alpaca's `weight_diff.py`, `--new-rows zeros` where the base was "
        "lengthened by zeros",
    )


def begins_at_mean(base: LazyTensor, delta: LazyTensor) -> bool:
    """Whether new rows [tokens, dim] are differences from the mean, not zeros: an untrained one is then near zero."""
    if delta.dtype.name != "float32" or base.dtype.name not in FLOATS or len(base.shape) != 2:
        return False  # FastChat's are float16
    new = delta.rows(base.num_rows, min(delta.num_rows, base.num_rows + FEW)).astype(np.float64)
    return bool(np.linalg.norm(new, axis=1).min() < SMALL * np.linalg.norm(_mean(base)))


def with_mean_rows(base: LazyTensor, count: int) -> LazyTensor:
    """The base's rows in float32, followed by copies of their mean up to `count` rows."""
    kind, known = BY_NAME["float32"], base.num_rows
    mean: list[Array] = []

    def load(start: int, stop: int) -> Array:
        rows = np.empty((stop - start, *base.shape[1:]), kind.numpy)
        last = max(start, min(stop, known))
        if start < last:
            rows[: last - start] = base.rows(start, last)
        if last < stop:
            mean[:] = mean or [_mean(base)]
            rows[last - start :] = mean[0]
        return rows

    return LazyTensor(kind, (count, *base.shape[1:]), load)


def _mean(tensor: LazyTensor) -> Array:
    total = np.zeros(tensor.shape[1:])
    for block in tensor.blocks():
        total += tensor.rows(*block).astype(np.float64).sum(0)
    return np.asarray(total / tensor.num_rows)


@dataclass
class WeightSum:
    """Compares the sum of all weights, taken while they are read, with `expected`; `buffers`: of the frequencies."""

    source: str
    expected: float
    buffers: float
    _sums: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    _size: int = 0

    def watched(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The same tensors, whose rows are added to the sum when they are read."""
        self._size = sum(tensor.nbytes // tensor.dtype.itemsize for tensor in tensors.values())
        return {name: self._watched(name, tensor) for name, tensor in tensors.items()}

    def _watched(self, name: str, tensor: LazyTensor) -> LazyTensor:
        def load(start: int, stop: int) -> Array:
            rows = tensor.rows(start, stop)
            self._sums[name, start] = rows.size, float(rows.sum(dtype=np.float64))
            return rows

        return LazyTensor(tensor.dtype, tensor.shape, load)

    def problems(self) -> list[str]:
        """A warning if the sum differs or is incomplete; call it after everything is written."""
        if sum(size for size, _ in self._sums.values()) != self._size:
            return [f"{self.source} was not compared, because the run was resumed"]
        found = fsum(total for _, total in self._sums.values())
        if min(abs(found - self.expected), abs(found + self.buffers - self.expected)) <= TOLERANCE:
            return []
        problem = f"all weights add up to {found:.2f}, expected {self.expected:.2f} ({self.source})"
        return [f"{problem}: is the base another one, or a file damaged?"]


def checksum_of(folder: Path, config: Mapping[str, Any], *, mean_rows: bool) -> WeightSum | None:
    """The checksum of a delta folder for the tuned `config`, or None; `mean_rows`: new tokens as Stanford's."""
    path = folder / CHECKSUM
    if path.is_file() and path.stat().st_size < 100:
        try:
            number = float(path.read_text())
        except ValueError:
            number = float("nan")
        return WeightSum(f"`{CHECKSUM}`", number, rotary_sum(config)) if isfinite(number) else None
    if mean_rows and all(config.get(name) == value for name, value in SEVEN_BILLION.items()):
        return WeightSum("Stanford's script for Alpaca 7B", SEVEN_BILLION_SUM, rotary_sum(config))
    return None


def rotary_sum(config: Mapping[str, Any]) -> float:
    """The sum of the rotary frequencies of all layers of a Llama, θ^(-2i/d); 0 for other models."""
    sizes: list[Any] = [config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")]
    if not all(type(size) is int and 0 < size < 1 << 20 for size in sizes):
        return 0.0
    width, layers = sizes[0] // sizes[1], sizes[2]
    return float(layers * (10000.0 ** -(np.arange(0, width, 2) / max(1, width))).sum())


EXACT = "without `--to` the delta is exact"


@dataclass
class Differences:
    """Makes differences, and compares base + difference with the tuned model as they are read; `elements`: of all.

    A tool subtracts and adds in float32: `operands` is the type of both sides, `stored` that of difference and sum.
    """

    operands: DType
    stored: DType
    elements: int = 0
    _made: dict[int, tuple[LazyTensor, LazyTensor]] = field(default_factory=dict)
    _counts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def of(self, name: str, base: LazyTensor | None, tuned: LazyTensor) -> LazyTensor:
        """`tuned` - `base`; the same tensor again for the same `tuned`, which counts once.

        Rows of `base` have the same shape; those it lacks, and None, count as zeros. Raises UnsupportedInput if one of
        them is not floating-point; when rows are read, for a value too large for float16.
        """
        if id(tuned) not in self._made:
            self._made[id(tuned)] = (tuned, self._difference(name, base, tuned))
            self._names.append(name)
            self.elements += tuned.nbytes // tuned.dtype.itemsize
        return self._made[id(tuned)][1]

    def _difference(self, name: str, base: LazyTensor | None, tuned: LazyTensor) -> LazyTensor:
        for side in (base, tuned):
            if side and side.dtype.name not in SUMMED:
                raise UnsupportedInput(
                    f"unsupported dtype {side.dtype.name} of `{name}`", hint=f"only floats are subtracted; {EXACT}"
                )
        stored, number = self.stored, len(self._made)

        def load(start: int, stop: int) -> Array:
            rows = tuned.rows(start, stop)
            above = self._operand(rows, name)
            below = np.zeros_like(above)
            last = max(start, min(stop, base.num_rows)) if base else start
            if base and start < last:
                below[: last - start] = self._operand(base.rows(start, last), name)
            result = _rounded(above - below, stored, name)
            restored = _rounded(below + widen(result), stored, name)
            # the number of elements whose values differ by a bit, in the wider of the two types
            wide, other = widen(rows), widen(restored)
            if wide.dtype != other.dtype:
                wide, other = wide.astype(np.float64), other.astype(np.float64)
            bits = np.dtype(f"u{wide.itemsize}")
            self._counts[number, start] = rows.size, int(np.count_nonzero(wide.view(bits) != other.view(bits)))
            return result

        return LazyTensor(stored, tuned.shape, load)

    def _operand(self, rows: Array, name: str) -> Array:
        """Rows in float32, rounded as the tool loads them."""
        return widen(_rounded(widen(rows), self.operands, name))

    def inexact(self) -> int | None:
        """How many elements the sum does not restore to the bit; None if not all were read, as in a resumed run."""
        if sum(size for size, _ in self._counts.values()) != self.elements:
            return None
        return sum(count for _, count in self._counts.values())

    def inexact_tensors(self) -> dict[str, int]:
        """The number of elements that the sum does not restore, by the names of the tensors that have any."""
        found: Counter[str] = Counter()
        for (number, _), (_, count) in self._counts.items():
            found[self._names[number]] += count
        return {name: count for name, count in sorted(found.items()) if count}


def _rounded(values: Array, dtype: DType, name: str) -> Array:
    result = np.empty(values.shape, dtype.numpy)
    try:
        round_into(result, values)
    except UnsupportedInput as error:
        raise UnsupportedInput(f"`{name}` has a value too large for {dtype.name}", hint=EXACT) from error
    return result


FLOAT16, FLOAT32 = BY_NAME["float16"], BY_NAME["float32"]
SUMMED = ("float64", *FLOATS)


def added(name: str, base: LazyTensor | None, delta: LazyTensor) -> LazyTensor:
    """`base` + `delta` in float32 or float64; missing rows, and None, are zeros. UnsupportedInput unless floats."""
    kinds = [tensor.dtype.name for tensor in (base, delta) if tensor is not None]
    if odd := [kind for kind in kinds if kind not in SUMMED]:
        raise UnsupportedInput(
            f"unsupported dtype {odd[0]} of `{name}`", hint="give base and delta unquantized, in floating point"
        )
    work = BY_NAME["float64" if "float64" in kinds else "float32"]

    def load(start: int, stop: int) -> Array:
        rows = delta.rows(start, stop)
        wide = widen(rows)
        total = wide.astype(work.numpy, copy=wide is rows)
        last = min(stop, base.num_rows) if base else start
        if base and start < last:
            total[: last - start] += widen(base.rows(start, last))
        return total

    return LazyTensor(work, delta.shape, load)


def rounded(tensor: LazyTensor, dtype: DType) -> LazyTensor:
    """A sum rounded once to `dtype`; reading raises UnsupportedInput for a finite sum too large for float16."""
    if tensor.dtype == dtype or tensor.dtype.name not in SUMMED:
        return tensor

    def load(start: int, stop: int) -> Array:
        values = tensor.rows(start, stop)
        values = widen(values) if dtype.name == "float16" else values
        result = np.empty(values.shape, dtype.numpy)
        round_into(result, values)
        return result

    return tensor.recast(dtype) if tensor.recast else LazyTensor(dtype, tensor.shape, load)


def wider(one: DType, other: DType) -> DType:
    """The dtype of a sum with `keep`: the base's, or the delta's if it has more bits."""
    return other if other.name in SUMMED and other.itemsize > one.itemsize else one


def types_of(
    sums: Mapping[str, LazyTensor], config: Mapping[str, Any], kept: Mapping[str, DType], dtype: str
) -> Mapping[str, DType]:
    """The type of each tensor of a tuned model in `dtype` (`stored_types`), or with `keep` that in `kept`."""
    return kept if dtype == "keep" else stored_types(sums, config, dtype)


# Names of the last norm, whose weights are about 1 in a model and about 0 in a delta
NORM = ("norm.weight", "ln_f.weight")


def open_difference(folder: Path) -> Checkpoint:
    """A folder of tuned − base; InputRefused, which describes the expected files, for a delta of no kind."""
    if not folder.is_dir() or not (is_bin_folder(folder) or list(folder.glob("*.safetensors"))):
        raise InputRefused(
            f"`{folder}` is not a delta",
            hint="give a folder that `llmconv delta extract` made, one of FastChat's (a Hugging Face folder), "
            "or one of LLaMA2-Accessory's (`consolidated.NN-of-MM.model-diff.pth`)",
        )
    tensors = open_bin_folder(folder).tensors() if is_bin_folder(folder) else open_weights(folder)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return Checkpoint(folder, "delta", tensors, config, read_side_files(folder))


def plus_difference(
    base: Checkpoint, delta: Checkpoint, dtype: str, new_rows: str = ""
) -> tuple[Checkpoint, WeightSum | None]:
    """The tuned model, base + delta, in `dtype` (or `keep`), and its checksum if the delta has one.

    `new_rows` as for `new_rows_of`.

    The delta's config and side files take precedence. Raises MalformedInput for missing or unexpected keys, or a shape
    mismatch, except for a vocabulary that grew, UnsupportedInput if one of them is quantized.
    """
    # without buffers, with a head that only one stores
    below, above = plain_tensors(base), plain_tensors(delta)
    if HEAD in above or HEAD in below:
        below = with_tied_head(below, base.config, HEAD)
        above = with_tied_head(above, delta.config or base.config, HEAD)
    for one, other, where in ((below, above, "delta"), (above, below, "base")):
        if missing := [name for name in one if name not in other]:
            raise MalformedInput(
                f"{len(missing)} missing keys in the {where}: {listing(missing)}",
                hint="the delta was made from another model; see its page for the base it needs",
            )
    _check_shapes(base, delta, below, above)
    embedding = find_embedding(below)  # new tokens may be stored as differences from the mean, as Stanford Alpaca's are
    grown = embedding is not None and below[embedding].num_rows < above[embedding].num_rows
    _require_delta(below, above, delta)
    start_of = new_rows_of(below[embedding], above[embedding], new_rows, delta.path.name) if grown and embedding else ""
    by_mean = start_of == "mean"
    rows = sorted({(below[name].num_rows, above[name].num_rows) for name in below if is_vocabulary(name)})
    start = "as the mean of the others, as for Stanford Alpaca" if by_mean else "as zeros, as for FastChat"
    text = "the base has {:,} tokens, the delta {:,}: rows that the base lacks count " + start
    warnings = [*base.warnings, *(text.format(few, many) for few, many in rows if few != many)]
    (own, _), (other, dropped) = without_code(base.config), without_code(delta.config)
    config = {**own, **other, **({AUTO_MAP: base.config[AUTO_MAP]} if AUTO_MAP in base.config else {})}
    warnings += [f"dropped {listing(dropped)} from the configuration: no code comes from a delta"] if dropped else []
    if embedding:
        set_everywhere(config, "vocab_size", above[embedding].num_rows)
    if HEAD in below and is_tied(config):
        set_everywhere(config, "tie_word_embeddings", False)
    kept = {name: wider(below[name].dtype, above[name].dtype) for name in below}
    chosen = types_of(above, config, kept, dtype)
    if by_mean:
        below = {
            name: tensor if tensor.shape == above[name].shape else with_mean_rows(tensor, above[name].num_rows)
            for name, tensor in below.items()
        }
    for name in below:  # FastChat's script rounds the base to float16 before adding
        if above[name].dtype == chosen[name] == FLOAT16:
            below[name] = rounded(below[name], FLOAT16)
    sums = {name: added(name, below[name], above[name]) for name in below}
    checksum = checksum_of(delta.path, config, mean_rows=by_mean)
    tensors = {name: rounded(one, chosen[name]) for name, one in (checksum.watched(sums) if checksum else sums).items()}
    # the delta's files, and the base's unless they are of a tokenizer that the delta has, too
    has_tokenizer = bool(delta.side_files.keys() & VOCABULARIES)
    files = {
        name: content
        for name, content in base.side_files.items()
        if name == "generation_config.json" or name.endswith(".py") or not has_tokenizer
    }
    files |= delta.side_files
    tuned = replace(
        base, tensors=tensors, config=with_dtype(config, tensors), side_files=files, warnings=tuple(warnings)
    )
    return tuned, checksum


NamedTensors = Mapping[str, LazyTensor]


def _check_shapes(base: Checkpoint, delta: Checkpoint, below: NamedTensors, above: NamedTensors) -> None:
    odd = []
    for name in below:
        few, many = below[name].shape, above[name].shape
        grown = is_vocabulary(name) and len(few) == len(many) and few[1:] == many[1:] and few < many
        if few != many and not grown:
            odd.append(f"{name} {list(many)} for {list(few)}")
    if not odd:
        return
    hint = "the delta was made from another model; see its page for the base it needs"
    if all(is_vocabulary(entry.split(" ")[0]) for entry in odd):
        hint = "the base has tokens that the delta's base did not have; give it as it was published"
    raise MalformedInput(
        f"shape mismatch for {len(odd)} tensors of `{delta.path.absolute().name}` and "
        f"`{base.path.absolute().name}`: " + listing(odd),
        hint=hint,
    )


def is_vocabulary(name: str) -> bool:
    """Whether a tensor of this name has a row for each token."""
    return name == HEAD or name.endswith(EMBEDDINGS)


def _require_delta(below: NamedTensors, above: NamedTensors, delta: Checkpoint) -> None:
    """Refuses a whole model in place of a delta: its last norm nearly equals the base's."""
    name: Any = next((name for name in below if name.endswith(NORM) and ".layers." not in name), None)
    if name is None:
        return
    norm, added = (side[name].read().astype(np.float64) for side in (below, above))
    if np.abs(added - norm).mean() < 0.5 * np.abs(norm).mean():
        raise MalformedInput(
            f"`{name}` of `{delta.path.absolute().name}` nearly equals the base's: it is a whole model, not a delta",
            hint="give the published delta; `llmconv delta extract BASE TUNED -o DELTA` makes one of two models",
        )


WITHOUT = "extract an exact delta, without `--to`"


@dataclass(frozen=True)
class Script:
    """How one of the two scripts computes."""

    title: str
    operands: DType  # as in `Differences`
    stored: DType
    mean_rows: bool  # a new token of the base is the mean of the others, else zeros
    own_config: bool  # the tuned model gets the config of the delta, else of the base


@dataclass(frozen=True)
class WrittenDelta:
    """The files of a delta for another tool; `differences` counts, during writing, what its sum does not restore."""

    plan: Plan
    differences: Differences


SCRIPTS = {
    "fastchat": Script("FastChat", FLOAT16, FLOAT16, mean_rows=False, own_config=False),
    "alpaca": Script("Stanford Alpaca", FLOAT32, FLOAT32, mean_rows=True, own_config=True),
}


def plan_script_delta(base: Checkpoint, tuned: Checkpoint, to: str, max_shard_size: str | int) -> WrittenDelta:
    """The files of a delta for `fastchat` or `alpaca` (`to`); UnsupportedInput if it cannot restore the tuned model."""
    script = SCRIPTS[to]
    below, above = (_weights(side, script) for side in (base, tuned))
    if odd := sorted(below.keys() ^ above.keys()):
        raise UnsupportedInput(f"only one of the two models has {listing(odd)}", hint=WITHOUT)
    # the names of the matrices with one token more; UnsupportedInput for any other difference in shape
    grown = [name for name in above if above[name].shape != below[name].shape]
    if wrong := [name for name in grown if not is_vocabulary(name) or above[name].shape[1:] != below[name].shape[1:]]:
        shapes = [f"{name} {list(above[name].shape)} for {list(below[name].shape)}" for name in wrong]
        raise UnsupportedInput(f"shape mismatch for {len(wrong)} tensors: {listing(shapes)}", hint=WITHOUT)
    if more := sorted({above[name].num_rows - below[name].num_rows for name in grown} - {1}):
        change = f"{more[0]} more" if more[0] > 0 else f"{-more[0]} fewer"
        raise UnsupportedInput(
            f"the tuned model has {change} tokens, and {script.title}'s script adds one, `[PAD]`, or none", hint=WITHOUT
        )
    differences = Differences(script.operands, script.stored)
    if script.mean_rows:
        below = {n: with_mean_rows(t, above[n].num_rows) if n in grown else t for n, t in below.items()}
    tensors = {name: differences.of(name, below[name], above[name]) for name in above}
    if script.mean_rows:
        # a new token that `delta apply` would take for one that FastChat counts from zeros
        name = find_embedding(above)
        is_longer = name is not None and base[name].num_rows < above[name].num_rows
        if name and is_longer and not begins_at_mean(base[name], tensors[name]):
            raise UnsupportedInput(
                f"the new row of `{name}` is not near the mean of the others, as an untrained `[PAD]` is", hint=WITHOUT
            )
    config, code = without_code(tuned.config)
    delta = replace(tuned, tensors=tensors, config=with_dtype(config, tensors))
    warnings = [f"dropped {listing(code)} from the configuration: a delta contains no code"] if code else []
    warnings += _warnings(base, tuned, script, grown=bool(grown))
    # torch files with an index, also where there is one file: FastChat's `--low-cpu-mem` reads no other names
    groups = by_size(delta.tensors, parse_size(max_shard_size))
    shards = tuple(
        Shard(f"pytorch_model-{number:05}-of-{len(groups):05}.bin", group, torch_pieces)
        for number, group in enumerate(groups, 1)
    )
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    index = {"metadata": {"total_size": delta.nbytes}, "weight_map": weight_map}
    small = {"config.json": json_bytes(delta.config), "pytorch_model.bin.index.json": json_bytes(index)}
    return WrittenDelta(Plan(delta, shards, {**delta.side_files, **small}, tuple(warnings)), differences)


def _weights(side: Checkpoint, script: Script) -> NamedTensors:
    """The tensors without buffers; UnsupportedInput if they are quantized or the output head is tied."""
    tensors = plain_tensors(side)
    if is_tied(side.config) and find_head(tensors, find_embedding(tensors)) not in tensors:
        problem = f"is tied to its embedding, to which {script.title}'s script adds twice"
        raise UnsupportedInput(f"the output head of `{side.path.absolute().name}` {problem}", hint=WITHOUT)
    return tensors


def _warnings(base: Checkpoint, tuned: Checkpoint, script: Script, *, grown: bool) -> list[str]:
    warnings = []
    if not tuned.side_files.keys() & VOCABULARIES:
        warnings.append(f"the tuned model has no tokenizer, and {script.title}'s script loads that of the delta")
    odd = differing_fields(base, tuned)
    if odd and not script.own_config:
        warnings.append(f"{script.title}'s script keeps the base's configuration; the models differ in {listing(odd)}")
    if grown and not script.mean_rows:
        warnings.append("only FastChat before 0.2 lengthens the base by one token; later ones cannot apply this delta")
    files = ("special_tokens_map.json", "tokenizer_config.json")
    has_padding = any(json_object(base.side_files.get(name, b"{}")).get("pad_token") for name in files)
    if script.mean_rows and base.side_files.keys() & VOCABULARIES and grown == has_padding:
        expected = "no more tokens, since the base has a padding token" if grown else "one token more, `[PAD]`"
        warnings.append(f"{script.title}'s script expects {expected}; only `llmconv delta apply` can apply this delta")
    return warnings
