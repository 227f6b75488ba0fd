"""What the model families of MindFormers share: LoRA merged, fused matrices taken apart, results checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmconv.convert.adapters.weighted_sum import LoraProduct, add_products
from llmconv.convert.algebra.operations import concat, equal, listing, require
from llmconv.convert.algebra.row_groups import interleave_rows, pick_rows
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.models.settings import Settings
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

Tensors = dict[str, LazyTensor]
Shapes = dict[str, tuple[int, ...]]

LORA = re.compile(r"(.+)\.(?:mindpet_delta_|tk_delta_)?lora_([ab])(?:\.weight)?", re.IGNORECASE)
IN_OUT = re.compile(r"\.(?:projection|mapping)\.weight$")
"""Weights of gpt2 and bloom that are stored in×out."""

LAYOUTS = ("plain", "interleaved")
FUSED = (
    (re.compile(r"(.+\.attention)\.(?:w_qkv|w)\.(weight|bias)"), ("wq", "wk", "wv")),
    (re.compile(r"(.+\.feed_forward)\.w_gate_hidden\.(weight|bias)"), ("w1", "w3")),
    (re.compile(r"(.+\.self_attention)\.linear_qkv\.(weight|bias)"), ("linear_q", "linear_k", "linear_v")),
    (re.compile(r"(.+\.mlp)\.linear_fc1\.(weight|bias)"), ("gating", "hidden")),
)
"""Names of fused matrices, and those of their parts: queries, keys and values, or gate and up."""


@dataclass(frozen=True)
class Heads:
    """Sizes of the attention: queries, keys/values, and elements of each head."""

    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class Model:
    """A converted model: tensors in Hugging Face names, their config, and what a user should know."""

    tensors: Tensors
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stored:
    """A model as MindFormers has it: tensors under its names, its class, and the fields of its `model_config`."""

    tensors: Tensors
    arch: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        sign: a tensor name that only this kind has.
        build: makes the model, or raises where transformers has no exact equal.
        store: the way back, by `model_type`: `store(settings, tensors, source)`; a ValueError tells of an odd shape.
    """

    sign: re.Pattern[str]
    build: Callable[[RunConfig, Tensors], Model]
    store: Mapping[str, Callable[[Settings, Tensors, str], Stored]] = field(default_factory=dict)


def heads_of(run: RunConfig, hidden: int) -> Heads:
    """The head sizes that the configuration says.

    Raises:
        MalformedInput: they do not fit the hidden size.
    """
    queries = run.integer("num_heads", "num_attention_heads")
    keys = run.integer(
        "n_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_query_groups", default=queries
    )
    dim = run.integer("head_dim", "kv_channels", default=max(1, hidden // queries))
    if queries % keys or ("head_dim" not in run.fields and "kv_channels" not in run.fields and queries * dim != hidden):
        raise MalformedInput(
            f"{queries} heads and {keys} key/value heads do not fit the hidden size {hidden} of `{run.source}`",
            hint="the configuration is of another model; give the YAML file of the run with `--config`",
        )
    return Heads(queries, keys, dim)


def merge_lora(run: RunConfig, tensors: Mapping[str, LazyTensor]) -> tuple[Tensors, tuple[str, ...]]:
    """The weights with `B·A·alpha/r` added where the file holds LoRA pairs (mindpet `LoRADense`), and a warning.

    Raises:
        InputRefused: only LoRA parameters, or nobody says what alpha is.
        MalformedInput: half a pair, or one that does not fit its weight.
    """
    pairs: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := LORA.fullmatch(name):
            pairs.setdefault(match[1] + ".weight", {})[match[2].lower()] = tensor
    plain = {name: tensor for name, tensor in tensors.items() if not LORA.fullmatch(name)}
    if not pairs:
        return plain, ()
    if not pairs.keys() & plain.keys():
        raise InputRefused(
            f"`{run.source}` holds LoRA parameters only ({len(pairs)} pairs), not the weights they change",
            hint="convert the full checkpoint of the run, which holds both, or merge them into the converted base: "
            f"`llmconv merge-lora BASE {run.source} --alpha A -o OUT`",
        )
    if run.lora.get("lora_alpha") is None:
        raise InputRefused(
            f"`{run.source}` holds {len(pairs)} LoRA pairs, but its configuration does not say `lora_alpha`",
            hint='give the YAML file of the run with its `pet_config`, or a JSON file such as `{"lora_alpha": 16}`',
        )
    alpha = RunConfig(run.source, run.lora, "", {}).number("lora_alpha")
    merged = {name: _merged(run, name, plain.get(name), pair, alpha) for name, pair in pairs.items()}
    return {**plain, **merged}, (f"merged {len(pairs)} LoRA pairs with `lora_alpha` {alpha:g}",)


def _merged(
    run: RunConfig, name: str, base: LazyTensor | None, pair: Mapping[str, LazyTensor], alpha: float
) -> LazyTensor:
    a, b = pair.get("a"), pair.get("b")
    if base is None or a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or IN_OUT.search(name):
        raise MalformedInput(
            f"the LoRA pair of `{name}` in `{run.source}` is incomplete or of a kind that is not read here",
            hint="merge it first with MindFormers' `transform_ckpt_lora.py`",
        )
    rank = a.shape[0]
    if base.shape != (b.shape[0], a.shape[1]) or b.shape[1] != rank or run.lora.get("lora_rank") not in (None, rank):
        raise MalformedInput(
            f"the LoRA pair of `{name}` in `{run.source}` ({list(b.shape)}·{list(a.shape)}) does not fit "
            f"{list(base.shape)}",
            hint="the parameters are of another run, or `lora_rank` of the configuration is",
        )
    return add_products(base, [LoraProduct(a, b, alpha / rank)])


def unfuse(run: RunConfig, tensors: Mapping[str, LazyTensor], heads: Heads) -> Tensors:
    """The tensors with the `FUSED` ones taken apart, such as `w_qkv` (in 1.0 `w`) into `wq`, `wk` and `wv`.

    Until 1.4 the parts stand one after the other; since 1.5 each key/value head stands with its queries, and gate and
    up rows alternate (mindformers `utils/convert_utils.py`, `qkv_concat_hf2mg`, `ffn_concat_hf2mg`). Names are equal.

    Raises:
        InputRefused: fused matrices, and `qkv_layout` is not said.
        MalformedInput: their rows do not fit the heads.
    """
    result: Tensors = {}
    for name, tensor in tensors.items():
        found = next(((match, parts) for sign, parts in FUSED if (match := sign.fullmatch(name))), None)
        if found is None:
            result[name] = tensor
            continue
        match, parts = found
        layout = layout_of(run, name)
        try:
            rows = split_qkv(tensor, heads, layout) if len(parts) == 3 else split_gate(tensor, layout)
        except ValueError as error:
            raise MalformedInput(
                f"`{name}` of `{run.source}` does not come apart: {error}", hint="the configuration is of another model"
            ) from error
        result |= {f"{match[1]}.{part}.{match[2]}": piece for part, piece in zip(parts, rows, strict=True)}
    return result


def layout_of(run: RunConfig, name: str) -> str:
    """`plain` or `interleaved`: what the names and the class of the model leave no doubt of, or what the user says.

    Raises:
        InputRefused: neither.
    """
    if ".linear_" in name:  # Megatron's names exist since 1.6 only
        return "interleaved"
    if ".attention.w." in name and run.arch:  # Llama's in 1.0 only; InternLM2 has its own order, which never changed
        return "interleaved" if run.arch.startswith("InternLM2") else "plain"
    asked = run.fields.get("qkv_layout")
    if asked in LAYOUTS:
        return str(asked)
    raise InputRefused(
        f"`{run.source}` holds fused matrices (`{name}`), whose order the file does not tell",
        hint="give `--qkv-layout plain` if MindFormers up to 1.4 wrote it, `--qkv-layout interleaved` since 1.5",
    )


def split_qkv(tensor: LazyTensor, heads: Heads, layout: str) -> list[LazyTensor]:
    """The queries, keys and values of a fused matrix or bias.

    Raises:
        ValueError: it has another number of rows.
    """
    rows = [heads.queries * heads.dim, heads.keys * heads.dim, heads.keys * heads.dim]
    if tensor.num_rows != sum(rows):
        raise ValueError(f"it has {tensor.num_rows} rows, the heads need {sum(rows)}")
    counts = rows if layout == "plain" else [count // heads.keys for count in rows]
    return [pick_rows(tensor, sum(counts), sum(counts[:part]), counts[part]) for part in range(3)]


def split_gate(tensor: LazyTensor, layout: str) -> list[LazyTensor]:
    """The gate and up rows of a fused matrix.

    Raises:
        ValueError: an odd number of rows.
    """
    count = tensor.num_rows // 2 if layout == "plain" else 1
    return [pick_rows(tensor, 2 * count, part * count, count) for part in range(2)]


def fuse(tensors: Tensors, parts: Sequence[str], whole: str, counts: Sequence[int] | None = None) -> Tensors:
    """The tensors with those of each layer that `parts` names (modules) put together; the reverse of `unfuse`.

    Args:
        tensors: by name.
        parts: what their names end with, before `.weight` or `.bias`.
        whole: what takes the place of these words.
        counts: rows of each that follow each other; without, each part stands whole.

    Raises:
        ValueError: a part is missing, or has another number of rows than the others.
    """
    ends = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    fused = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for name in tensors:
        root, _, kind = name.rpartition(f".{parts[0]}.")
        if root and kind in ("weight", "bias"):
            found = [tensors.get(f"{root}.{part}.{kind}") for part in parts]
            present = [tensor for tensor in found if tensor is not None]
            if len(present) < len(parts):
                raise ValueError(f"`{name}` has no match in `{parts[1]}` or behind")
            fused[f"{root}.{whole}.{kind}"] = interleave_rows(present, counts) if counts else concat(present, 0)
    return fused


def finish(
    run: RunConfig, tensors: Tensors, shapes: Shapes, config: dict[str, Any], head: str, embedding: str
) -> Model:
    """Checks the tensors against `shapes`, in whose order they are written, and ties an output head that is shared.

    Args:
        run: for messages, and whether the run ties them.
        tensors: by Hugging Face name.
        shapes: all that the model has.
        config: the content of `config.json`; `tie_word_embeddings` is added.
        head: name of the output head.
        embedding: name of the input embedding.

    Raises:
        MalformedInput: a tensor is missing, left over or of another shape.
    """
    tied = head not in tensors
    if tied and not run.flag("tie_word_embeddings"):
        raise MalformedInput(
            f"`{run.source}` has no output head, and its configuration does not tie it to the embedding",
            hint="if it was trained so, give a configuration with `tie_word_embeddings: True`",
        )
    wanted = {name: shape for name, shape in shapes.items() if name != head or not tied}
    require(wanted, tensors, run.source)
    over = [name for name in tensors if name not in wanted]
    odd = [name for name, shape in wanted.items() if tensors[name].shape != shape]
    if over or odd:
        found = f"has {list(tensors[odd[0]].shape)}, not {list(wanted[odd[0]])}" if odd else "has no place in the model"
        raise MalformedInput(
            f"{len(over + odd)} tensors of `{run.source}` do not fit its configuration: {listing(odd + over)} {found}",
            hint="the configuration is of another model, or these are the shards of one rank",
        )
    if not tied and equal(tensors[head], tensors[embedding]):
        del wanted[head]
        tied = True
    return Model({name: tensors[name] for name in wanted}, {**config, "tie_word_embeddings": tied})


def refuse_model(run: RunConfig, what: str, reason: str) -> UnsupportedInput:
    """The error for a model that transformers cannot express exactly."""
    return UnsupportedInput(
        f"`{run.source}` is {what}, which has no exact equal in transformers: {reason}",
        hint="convert it with MindFormers' own `convert_weight.py --reversed` and run it with the model's own code",
    )
