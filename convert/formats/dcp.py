"""Torch Distributed Checkpoint (DCP, FSDP): `.metadata`, `__RANK_N.distcp` files, a model inside a nested dict.

Layout: `convert/state_dicts/distributed.py`. Names are Hugging Face's (accelerate, the Trainer's `SHARDED_STATE_DICT`,
torch's recipes), or torchtitan's, which are Meta's: of Llama with rows of queries and keys in Meta's order, too, and of
Qwen 3 not (`torchtitan/models/llama3|qwen3/state_dict_adapter.py`). Since 2026 q, k and v are in `qkv_linear`, apart or
as one matrix of groups (the queries of a key, it, its value), and the head is `lm_head`. Experts are stacks
[experts, out, in], and the bias by which torchtitan balances them has no place in transformers' class.

slime's runs with FSDP (`slime/backends/fsdp_utils/checkpoint.py`) have the files of Megatron's around it: the newest
step in `latest_checkpointed_iteration.txt`, and the model in `iter_0000100/model`, or in `iter_0000100` at first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.adapters.other_tools import LayerSizes
from llmconv.convert.adapters.other_tools import sizes_of as sizes_of_heads
from llmconv.convert.algebra import (
    LAYER_NUMBER,
    all_zero,
    deal_rows,
    fitting,
    renamed,
    reordered,
    reshaped,
    rope_order,
    split,
)
from llmconv.convert.assembly import (
    OPTIONS,
    config_of_run,
    dropped_outside,
    opened_with_adapter,
    with_tokenizer,
    without_adapter,
)
from llmconv.convert.formats import Format
from llmconv.convert.formats.composer import is_sharded
from llmconv.convert.formats.megatron.save_folder import (
    ITERATION,
    STEP_MODEL,
    TRACKER,
    is_megatron_distributed,
    named,
    plain_steps,
)
from llmconv.convert.formats.meta import LLAMA
from llmconv.convert.formats.torchtune import ROTATED
from llmconv.convert.models.completeness import as_loaded
from llmconv.convert.models.config_file import OPTION, causal_lm_config, other_class_config, own_fields
from llmconv.convert.state_dicts.distributed import (
    PARTS,
    DistributedFolder,
    TensorItem,
    is_folder,
    is_meta_named,
    named_leaves,
    open_folder,
    outside,
    prefix_of,
    roots,
    sizes_of,
)
from llmconv.convert.state_dicts.files import phrases, select, tracked
from llmconv.errors import InputRefused, UnsupportedInput, listing
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor

INNER = "pytorch_model_fsdp_*"  # name of the model's folder inside those of accelerate and the Trainer
TOP = "."  # the value of `--root` for the nested dict itself
ROPE_TABLE = "freqs_cis"  # A complex buffer of older torchtitan models, which recompute it


def _shard_folder(path: Path) -> Path | None:
    """The folder with the shards: `path`, or one inside it."""
    if not path.is_dir() or is_sharded(path) or is_megatron_distributed(path):
        return None
    if is_folder(path):
        return path
    inner = [entry for entry in path.glob(INNER) if is_folder(entry)]
    if len(inner) == 1:
        return inner[0]
    return path / STEP_MODEL if ITERATION.fullmatch(path.absolute().name) and is_folder(path / STEP_MODEL) else None


def _opened_folder(path: Path) -> Path:
    """As `_shard_folder`, or that of the newest step of a run; InputRefused, MalformedInput as `tracked`."""
    steps = plain_steps(path) if path.is_dir() else {}
    return _shard_folder(path) or (tracked(path, steps, path / TRACKER, named) if steps else path)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    shards = _opened_folder(path)
    folder, warnings = open_folder(shards), list[str]()
    # the configuration is next to the shards or above, and two above if the Trainer or slime nest one more
    places = [shards, *shards.resolve().parents[: 2 if shards.match(INNER) or shards.name == STEP_MODEL else 1]]
    home = next((place for place in places if (place / "config.json").is_file()), None)
    stored = read_json(home / "config.json") if home else {}
    given = {name: value for name, value in config.items() if name not in FORMAT.options or name == OPTION}
    own = own_fields(stored, given, path.name) is not None
    root, state = _model(folder, config.get("root"), own_names=own)

    def open_model(leaves: Mapping[str, Any], base: Checkpoint | None) -> Checkpoint:
        notes, left_out, settings = [*warnings], list[str](), dict[str, Any]()
        tensors = dict[str, LazyTensor]()
        if leaves:
            fields = config_of_run(stored, base, notes)
            other = other_class_config(fields, given, leaves, notes, drop=bool(config.get("drop")))
            settings = other or causal_lm_config(fields, given, path.name, notes)
            own_code = AUTO_MAP in settings
            tensors = select(leaves, lambda _, tensor: tensor, path.name, notes, buffers=own_code)
            if not own_code:
                prefix = prefix_of(tensors)
                foreign = [] if is_meta_named(leaves) else outside(tensors, prefix)
                if other:  # all names with the prefix are the model's, its head's too
                    foreign = [name for name in foreign if not name.startswith(prefix)]
                left_out = dropped_outside(foreign, path.name, drop=bool(config.get("drop")))
                tensors = {name.removeprefix(prefix): one for name, one in tensors.items() if name not in foreign}
                tensors = _from_meta(tensors, settings, path.name) if is_meta_named(state) else tensors
                settings = other or as_loaded(tensors, settings)
        homes = [one for one in (home, *(place for place in places if place.is_relative_to(path.resolve()))) if one]
        found = next((files for one in homes if (files := read_side_files(one))), {})  # a Trainer has no configuration
        own_files = with_tokenizer(found, tokenizer)
        dropped = (*phrases(sizes_of(_without(folder.tree, root))), *left_out)
        version = f"torch distributed checkpoint {folder.version}".rstrip()
        side_files = {**(base.side_files if base else {}), **own_files}
        more = (tuple(notes), version, folder.shards, dropped)
        return Checkpoint(path, FORMAT.name, tensors, settings, side_files, *more)

    # the tensors as LazyTensor, and values unchanged; nested dicts are not part of the state dict
    named = {str(name): item for name, item in state.items() if not isinstance(item, dict)}
    leaves = {
        name: folder.tensor(name, item) if isinstance(item, TensorItem) else item
        for name, item in named.items()
        if not name.endswith(ROPE_TABLE)
    }
    if not any("lora_" in name for name in leaves):
        without_adapter(config, path.name)
        return open_model(leaves, None)
    tensors = select(leaves, lambda _, tensor: tensor, path.name, warnings)
    return opened_with_adapter(tensors, shards, config, open_model)


def _model(
    folder: DistributedFolder, chosen: str | None, *, own_names: bool
) -> tuple[tuple[str, ...], Mapping[Any, Any]]:
    """The keys that lead to the model in the nested dict, and its state dict; InputRefused if there is none.

    If there are several, `chosen` has the user's keys, joined with dots (InputRefused without it). With `own_names` the
    model's own code has the names. Trainer and accelerate save of a LoRA run only the adapter.
    """
    any_names = roots(folder.tree, own_names=True)
    adapters = {keys: state for keys, state in any_names.items() if any("lora_" in str(name) for name in state)}
    states = roots(folder.tree) or adapters or (any_names if own_names else {})
    found = {".".join(keys) or TOP: (keys, state) for keys, state in states.items()}
    if chosen in found:
        return found[chosen]
    if len(found) == 1 and chosen is None:
        return next(iter(found.values()))
    if found:
        raise InputRefused(
            f"`{folder.path.name}` contains {len(found)} model(s): {listing(list(found))}",
            hint=f"choose one with `--root`, such as `--root {next(iter(found))}`",
        )
    raise UnsupportedInput(
        f"`{folder.path.name}` contains no language model; it has {listing([str(key)[:80] for key in folder.tree])}",
        hint="its names must be Hugging Face's or torchtitan's; an optimizer's folder lies next to that of the model",
    )


TITAN = LLAMA | {
    "lm_head.weight": "lm_head.weight",
    **{
        f"layers.{{}}.attention.qkv_linear.w{one}.weight": f"model.layers.{{}}.self_attn.{one}_proj.weight"
        for one in "qkv"
    },
}
QWEN = TITAN | {
    **{
        f"layers.{{}}.attention.{one}.weight": f"model.layers.{{}}.self_attn.{one}.weight"
        for one in ("q_norm", "k_norm")
    },
    "layers.{}.moe.router.gate.weight": "model.layers.{}.mlp.gate.weight",
}
TITANS = {"llama": TITAN, "qwen3": QWEN, "qwen3_moe": QWEN}
JOINED = ".attention.qkv_linear.wqkv.weight"
BALANCE = re.compile(r"\.moe\.(?:expert_bias|tokens_per_expert)(?:_E)?$")
STACK = re.compile(rf"layers\.({LAYER_NUMBER})\.moe\.experts\.(w[123])(?:_E[DF]{{2}})?")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EXPERTS_LIMIT = 4096  # more experts than any layer has


def _from_meta(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> dict[str, LazyTensor]:
    """A model of torchtitan in Hugging Face's names and order."""
    kind = config["model_type"]
    if kind not in TITANS:
        raise UnsupportedInput(
            f"`{source}` has the names of torchtitan, and its configuration belongs to a `{kind}`",
            hint=f"of torchtitan's models {', '.join(TITANS)} are supported; let torchtitan write its checkpoint in "
            "Hugging Face's names (`last_save_in_hf`)",
        )
    sizes = sizes_of_heads(config, source)
    with fitting(f"the heads of `{source}` do not match its configuration"):
        tensors = _separate(tensors, sizes, source)
        experts = {name: one for name, one in tensors.items() if ".mlp.experts." in name}
        rest = renamed({name: one for name, one in tensors.items() if name not in experts}, TITANS[kind], source)
        return (reordered(rest, ROTATED, rope_order(sizes.dim)) if kind == "llama" else rest) | experts


def _separate(tensors: Mapping[str, LazyTensor], sizes: LayerSizes, source: str) -> dict[str, LazyTensor]:
    """The tensors with q, k and v apart, and experts one by one; ValueError if rows do not fit."""
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        stack = STACK.fullmatch(name)
        if name.endswith(JOINED):
            parts = deal_rows(tensor, (sizes.queries // sizes.keys * sizes.dim, sizes.dim, sizes.dim))
            stem = name.removesuffix(JOINED)
            found |= {f"{stem}.attention.w{one}.weight": part for one, part in zip("qkv", parts, strict=True)}
        elif stack and len(tensor.shape) == 3 and 0 < tensor.num_rows <= EXPERTS_LIMIT:
            matrices = split(reshaped(tensor, (prod(tensor.shape[:2]), tensor.shape[2])), 0, tensor.num_rows)
            stem = f"model.layers.{stack[1]}.mlp.experts"
            found |= {f"{stem}.{at}.{PROJECTIONS[stack[2]]}.weight": one for at, one in enumerate(matrices)}
        elif not BALANCE.search(name):
            found[name] = tensor
        elif not all_zero(tensor) and "expert_bias" in name:
            raise UnsupportedInput(
                f"`{source}` chooses its experts with a bias (`{name}`), which transformers' class does not have",
                hint="no folder computes this model; train with `load_balance_coeff` none",
            )
    return found


def _without(tree: Mapping[Any, Any], keys: Sequence[str]) -> dict[Any, Any]:
    """The parts of the nested dict outside the model under `keys`, from every level."""
    if not keys:
        return {key: value for key, value in tree.items() if isinstance(value, dict)}
    rest = {key: value for key, value in tree.items() if str(key) != keys[0]}
    return _without(tree[keys[0]], keys[1:]) | rest


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    folder = open_folder(_opened_folder(path))
    found = [(".".join(map(str, keys)), item) for keys, item in named_leaves(folder.tree) if keys[0] not in PARTS]
    return {name: folder.tensor(name, item) for name, item in found if isinstance(item, TensorItem) and item.dtype}


FORMAT = Format(
    name="dcp",
    title="torch Distributed Checkpoint (FSDP, accelerate, torchtitan): a folder of `.distcp` shards and `.metadata`",
    detect=lambda path: _shard_folder(path) is not None or (path.is_dir() and bool(plain_steps(path))),
    open=_open,
    covers="any causal language model in Hugging Face's names, also with images, and classifiers, sharded in any "
    "grid over any number of ranks; "
    "torchtitan's Llama and Qwen 3; slime's runs with FSDP, the newest step of a run; LoRA runs, merged or kept apart; "
    "give `config.json` with `--config` if there is none with it",
    options=("root", "drop", *OPTIONS, OPTION),
    peek=_peek,
)
