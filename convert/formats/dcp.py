"""Torch Distributed Checkpoint (DCP, FSDP): `.metadata`, `__RANK_N.distcp` files, a model inside a nested dict.

Layout: `convert/state_dicts/distributed.py`. Names are Hugging Face's (accelerate, the Trainer's `SHARDED_STATE_DICT`,
torch's recipes), or those of torchtitan's Llama, which are Meta's, with rows of queries and keys in Meta's order.

slime's runs with FSDP (`slime/backends/fsdp_utils/checkpoint.py`) have the files of Megatron's around it: the newest
step in `latest_checkpointed_iteration.txt`, and the model in `iter_0000100/model`, or in `iter_0000100` at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.adapters.other_tools import sizes_of as sizes_of_heads
from llmconv.convert.algebra import fitting, renamed, reordered, rope_order
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
from llmconv.convert.models.config_file import OPTION, causal_lm_config, own_fields
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
            settings = causal_lm_config(config_of_run(stored, base, notes), given, path.name, notes)
            own_code = AUTO_MAP in settings
            tensors = select(leaves, lambda _, tensor: tensor, path.name, notes, buffers=own_code)
            if not own_code:
                prefix = prefix_of(tensors)
                foreign = [] if is_meta_named(leaves) else outside(tensors, prefix)
                left_out = dropped_outside(foreign, path.name, drop=bool(config.get("drop")))
                tensors = {name.removeprefix(prefix): one for name, one in tensors.items() if name not in foreign}
                tensors = _from_meta(tensors, settings, path.name) if is_meta_named(state) else tensors
                settings = as_loaded(tensors, settings)
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


def _from_meta(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> dict[str, LazyTensor]:
    if config["model_type"] != "llama":
        raise UnsupportedInput(
            f"`{source}` has Meta's names, its configuration belongs to a `{config['model_type']}`",
            hint="of torchtitan's models only Llama is supported; give the `config.json` of a Llama",
        )
    order = rope_order(sizes_of_heads(config, source).dim)
    with fitting(f"the heads of `{source}` do not match its configuration"):
        return reordered(renamed(tensors, LLAMA, source), ROTATED, order)


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
    covers="any causal language model in Hugging Face's names, sharded in any grid over any number of ranks; "
    "torchtitan's Llama; slime's runs with FSDP, the newest step of a run; LoRA runs, merged or kept apart; give "
    "`config.json` with `--config` if there is none with it",
    options=("root", "drop", *OPTIONS, OPTION),
    peek=_peek,
)
