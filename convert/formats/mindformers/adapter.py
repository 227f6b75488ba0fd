"""MindFormers' LoRA (MindPET): pairs in a MindSpore `.ckpt` or safetensors, alone or beside the weights they change.

Layout (mindpet `delta/lora.py`, `LoRADense`): `<cell>.mindpet_delta_lora_a` (r×in) and `_b` (out×r), in other versions
`tk_delta_lora_a` or `lora_a`; the update is B·A·lora_alpha/r, and lora_alpha is in the run's YAML (`pet_config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.adapters.other_tools import AdapterFormat
from llmconv.convert.adapters.other_tools.factors import ForeignPair, as_adapter, pair_up, renamed, unplaced
from llmconv.convert.adapters.other_tools.joining import join_modules
from llmconv.convert.adapters.other_tools.layer_sizes import LayerSizes, sizes_of
from llmconv.convert.adapters.peft_tensors import CONFIG
from llmconv.convert.algebra.operations import listing, permute_rows
from llmconv.convert.algebra.row_groups import interleave_rows
from llmconv.convert.formats.mindformers import glm, gpt, llama
from llmconv.convert.formats.mindformers.config import RunConfig, read_run_config
from llmconv.convert.formats.mindformers.names import FUSED, LORA, Heads, layout_of, split_qkv, unfuse
from llmconv.convert.formats.mindformers.read import is_mindspore, open_parameters
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

FACTOR = re.compile(r"(?P<module>.+)\.(?:mindpet_delta_|tk_delta_)?(?P<part>lora_[ab])(?:\.weight)?", re.IGNORECASE)
WHAT = "a LoRA of MindFormers"
FUSED_GLM = ".self_attention.query_key_value"
LOW_BITS = 2.0**-7
"""Relative difference of two roundings of one number to half precision."""

Placed = dict[str, ForeignPair]


@dataclass(frozen=True)
class Family:
    """A kind of model under MindFormers' names.

    Attributes:
        sign: the beginning of names that only it has.
        names: its names to Hugging Face's, of whole tensors.
        place: brings the factors under the names that its modules have in the base, rows in its order.
    """

    sign: re.Pattern[str]
    names: Mapping[str, str | None]
    place: Callable[[Placed, RunConfig, LayerSizes, Mapping[str, str]], Placed]


def is_mindformers_adapter(path: Path) -> bool:
    """Whether `path` is a file or folder of MindSpore's; whether it holds pairs shows when it is opened."""
    folder = path if path.is_dir() else path.parent
    return not (folder / CONFIG).is_file() and is_mindspore(path)


def open_mindformers_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens a MindSpore checkpoint's LoRA pairs as an adapter.

    Args:
        path: the file, or the folder of a run.
        base: the model to merge into. What else is in the file replaces its tensors where the file holds only what was
            trained, and is only compared with them where the file holds the weights that the pairs change.
        alpha: `lora_alpha`, where no YAML of the run beside the file says it.

    Raises:
        InputRefused: no pairs, nobody says alpha, or the file's own weights are not the base's.
        MalformedInput: names or shapes that the base has not.
    """
    found = open_parameters(path)
    run = read_run_config(path, {})
    pairs = {name: tensor for name, tensor in found.tensors.items() if LORA.fullmatch(name)}
    if not pairs:
        raise InputRefused(
            f"`{path.name}` holds {len(found.tensors)} tensors and no LoRA pair",
            hint=f"a whole model is converted with `llmconv to-hf {path.name} --config run.yaml -o OUT`",
        )
    others = {name: tensor for name, tensor in found.tensors.items() if name not in pairs}
    family, factors = _family(pairs, path.name), pair_up(pairs, FACTOR, path.name)
    placed = _placed(factors, family, run, base, path.name)
    notes = list(found.warnings)
    if any(f"{module}.weight" in others for module in factors):
        _require_base(others, family, base, path.name)
        notes.append(f"left out {len(others)} tensors of the model itself, which are the base's")
        others = {}
    fields = {name: run.lora.get(old) for name, old in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"))}
    settings = (path if path.is_dir() else path.parent) / run.beside if run.beside else None
    adapter = as_adapter(
        _files(path),
        settings,
        {name: value for name, value in fields.items() if value is not None},
        placed,
        alpha,
        _whole(others, family, path.name),
        notes,
    )
    return replace(adapter, path=path if path.is_dir() else path.parent)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".ckpt", ".safetensors") and file.is_file())


def _family(tensors: Mapping[str, LazyTensor], source: str) -> Family:
    for family in FAMILIES:
        if any(family.sign.search(name) for name in tensors):
            return family
    raise UnsupportedInput(
        f"`{source}` holds LoRA pairs of no known model: {listing(sorted(tensors))}",
        hint="known are llama, qwen, internlm, baichuan, gpt2, bloom and chatglm2/3 under MindFormers' names",
    )


def _placed(factors: Placed, family: Family, run: RunConfig, base: Checkpoint, source: str) -> Placed:
    table = {name.removesuffix(".weight"): str(to).removesuffix(".weight") for name, to in family.names.items()}
    try:
        return family.place(factors, run, sizes_of(base), table)
    except ValueError as error:
        raise MalformedInput(
            f"the rows of `{source}` do not fit the base's heads: {error}",
            hint="the adapter was trained on another model",
        ) from error


def _llama(factors: Placed, run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]) -> Placed:
    """Queries, keys and values, or gate and up, may be fused, each with the A of the whole."""
    heads = Heads(sizes.queries, sizes.keys, sizes.dim)
    apart: Placed = {}
    for module, own in factors.items():
        name = f"{module}.weight"
        if not any(sign.fullmatch(name) for sign, _ in FUSED):
            apart[module] = own
            continue
        parts = _unfused(run, name, own.b, heads)
        apart |= {part.removesuffix(".weight"): replace(own, b=rows) for part, rows in parts.items()}
    return renamed(apart, table, run.source, WHAT)


def _unfused(run: RunConfig, name: str, rows: LazyTensor, heads: Heads) -> Mapping[str, LazyTensor]:
    try:
        layout_of(run, name)
    except InputRefused as error:
        raise InputRefused(
            str(error),
            hint="put the run's YAML beside the file, and in its `model_config` the line `qkv_layout: plain` if "
            "MindFormers up to 1.4 wrote it, `qkv_layout: interleaved` since 1.5",
        ) from error
    return unfuse(run, {name: rows}, heads)


def _glm(factors: Placed, run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]) -> Placed:
    heads = Heads(sizes.queries, sizes.keys, sizes.dim)
    apart: Placed = {}
    for module, own in factors.items():
        root = module.removesuffix(FUSED_GLM)
        parts = split_qkv(own.b, heads, "plain") if root != module else []
        apart |= {
            f"{root}.self_attention.w{one}": replace(own, b=rows) for one, rows in zip("qkv", parts, strict=False)
        }
        apart |= {} if parts else {module: own}
    placed = renamed(apart, table, run.source, WHAT)
    if run.flag("use_rearrange_rope"):
        order = [row % 2 * (sizes.dim // 2) + row // 2 for row in range(sizes.dim)]
        placed = {
            module: own.with_rows(lambda rows: permute_rows(rows, order)) if re.search(r"\.[qk]_proj$", module) else own
            for module, own in placed.items()
        }
    sides = ("mlp.gate_proj", "mlp.up_proj")
    return join_modules(placed, sides, "mlp.gate_up_proj", (sizes.inner, sizes.inner), run.source)


def _gpt2(factors: Placed, run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]) -> Placed:
    placed = renamed(factors, table, run.source, WHAT)
    return join_modules(placed, gpt.PARTS, "c_attn", sizes.attention, run.source)


def _bloom(factors: Placed, run: RunConfig, sizes: LayerSizes, table: Mapping[str, str]) -> Placed:
    plain = {module.removeprefix("transformer."): own for module, own in factors.items()}
    counts = [sizes.dim] * 3
    return join_modules(
        renamed(plain, table, run.source, WHAT),
        gpt.PARTS,
        "query_key_value",
        sizes.attention,
        run.source,
        lambda parts: interleave_rows(parts, counts),
    )


FAMILIES = (
    Family(re.compile(r"^model\.(?:layers\.\d+|tok_embeddings)\."), llama.LLAMA, _llama),
    Family(re.compile(r"^transformer\.(?:layers\.\d+|wte)\."), llama.QWEN, _llama),
    Family(re.compile(r"^decoder\.layers\."), llama.CORE, _llama),
    Family(re.compile(r"^backbone\."), gpt.GPT2, _gpt2),
    Family(re.compile(r"^(?:transformer\.)?blocks\.\d+\."), gpt.BLOOM, _bloom),
    Family(re.compile(r"^transformer\.encoder\."), glm.NAMES, _glm),
)


def _whole(others: Mapping[str, LazyTensor], family: Family, source: str) -> dict[str, LazyTensor]:
    """Trained tensors that stand in the place of the base's, where the family keeps them as they are."""
    homes = {name: _home(name, family) for name in others}
    unknown = sorted(name for name, home in homes.items() if home is None)
    if unknown:
        raise unplaced(unknown, [name for name, home in family.names.items() if home], source, WHAT)
    return {home: others[name] for name, home in homes.items() if home is not None}


def _home(name: str, family: Family) -> str | None:
    """The tensor of the base that `name` is, row by row; None where it is another's part or turned around."""
    if family.place is not _llama or any(sign.fullmatch(name) for sign, _ in FUSED):
        return None
    number = re.search(r"(?<=\.)\d{1,9}(?=\.)", name)
    target = family.names.get(name.replace(f".{number[0]}.", ".{}.", 1) if number else name)
    return target.format(number[0]) if target and number else target


def _require_base(others: Mapping[str, LazyTensor], family: Family, base: Checkpoint, source: str) -> None:
    """The file's own weights are the base's: the first block of each is compared.

    Raises:
        InputRefused: they are not.
    """
    for name, tensor in others.items():
        there = base.get(_home(name, family) or "")
        if there is not None and not _similar(tensor, there):
            raise InputRefused(
                f"`{source}` holds a whole model with its LoRA, and its `{name}` is not the base's",
                hint=f"convert it as it is: `llmconv to-hf {source} --config run.yaml -o OUT` merges its LoRA",
            )


def _similar(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors begin with the same values, or with two roundings of them."""
    if one.shape != other.shape:
        return False
    block = next(islice(one.blocks(), 1), (0, 0))
    mine, theirs = (tensor.rows(*block).astype(np.float64) for tensor in (one, other))
    tolerance = 0.0 if one.dtype == other.dtype else LOW_BITS
    return bool(np.allclose(mine, theirs, rtol=tolerance, atol=tolerance * 1e-3))


ADAPTER = AdapterFormat(
    title="MindFormers (MindPET pairs in a MindSpore `.ckpt` or safetensors)",
    detect=is_mindformers_adapter,
    open=open_mindformers_adapter,
)
