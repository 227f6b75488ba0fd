"""Torch Distributed Checkpoint (DCP, FSDP): `.metadata`, `__RANK_N.distcp` files, a model somewhere in a nested dict.

Layout: `convert/state_dicts/distributed/`. Names are Hugging Face's (accelerate, the Trainer's `SHARDED_STATE_DICT`,
torch's recipes), or those of torchtitan's Llama, which are Meta's, with rows of queries and keys in Meta's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.algebra.operations import listing, permute_rows, rename, rope_order
from llmconv.convert.formats import Format
from llmconv.convert.formats.composer.sharded import is_sharded
from llmconv.convert.formats.meta.names import LLAMA
from llmconv.convert.models.completeness import select, whole
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.state_dicts.distributed.folder import PARTS, Folder, is_folder, named_leaves, open_folder, sizes_of
from llmconv.convert.state_dicts.distributed.metadata import TensorItem
from llmconv.convert.state_dicts.distributed.model_root import is_meta_named, outside, prefix_of, roots
from llmconv.convert.state_dicts.other_contents import phrases
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

INNER = "pytorch_model_fsdp_*"
"""How accelerate and the Trainer call the folder of the model inside their own."""

TOP = "."
"""What `--root` calls the nested dict itself."""

ROPE_TABLE = "freqs_cis"
"""A complex buffer that older torchtitan models carry and compute anew."""


def _place(path: Path) -> Path | None:
    """The folder with the shards: `path`, or the one inside of it."""
    if not path.is_dir() or is_sharded(path):
        return None
    inner = [entry for entry in path.glob(INNER) if is_folder(entry)]
    return path if is_folder(path) else inner[0] if len(inner) == 1 else None


def _detect(path: Path) -> bool:
    return _place(path) is not None


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    place = _place(path) or path
    folder, warnings = open_folder(place), list[str]()
    root, state = _model(folder, config.get("root"))
    home = _home(place)
    stored = read_json(home / "config.json") if home else {}
    given = {name: value for name, value in config.items() if name not in FORMAT.options}
    settings = causal_lm_config(stored, given, path.name, warnings)
    tensors, left_out = _tensors(folder, state, warnings, drop=bool(config.get("drop")))
    if is_meta_named(state):
        tensors = _from_meta(tensors, settings, path.name)
    settings = whole(tensors, settings, path.name, warnings)
    side_files = read_tokenizer(tokenizer) if tokenizer else read_side_files(home) if home else {}
    return Checkpoint(
        path,
        FORMAT.name,
        tensors,
        settings,
        side_files,
        tuple(warnings),
        version=f"torch distributed checkpoint {folder.version}".rstrip(),
        shards=folder.shards,
        dropped=(*phrases(sizes_of(_without(folder.tree, root))), *left_out),
    )


def _home(place: Path) -> Path | None:
    """The folder with `config.json`: that of the shards, or one above (two above where the Trainer nests one more)."""
    above = place.resolve().parents
    candidates = [place, *above[: 2 if place.match(INNER) else 1]]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def _model(folder: Folder, chosen: str | None) -> tuple[tuple[str, ...], Mapping[Any, Any]]:
    """The state dict of the one model in the folder, and where it is.

    Raises:
        InputRefused: there is none, or more than one and none is chosen.
    """
    found = {".".join(place) or TOP: (place, state) for place, state in roots(folder.tree).items()}
    if chosen in found:
        return found[chosen]
    if len(found) == 1 and chosen is None:
        return next(iter(found.values()))
    if found:
        raise InputRefused(
            f"`{folder.path.name}` holds {len(found)} model(s): {listing(list(found))}",
            hint=f"say which with `--root`, such as `--root {next(iter(found))}`",
        )
    raise UnsupportedInput(
        f"`{folder.path.name}` holds no language model; it has {listing([str(key)[:80] for key in folder.tree])}",
        hint="its names must be Hugging Face's or torchtitan's; an optimizer's folder lies next to that of the model",
    )


def _tensors(
    folder: Folder, state: Mapping[Any, Any], warnings: list[str], *, drop: bool
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors without wrappers and prefix, and a phrase for those of them that are no part of the model."""
    source = folder.path.name
    leaves = _leaves(folder, state)
    lora = [name for name in leaves if "lora_" in name]
    if lora:
        raise UnsupportedInput(
            f"`{source}` holds LoRA matrices that are not merged: {listing(lora)}",
            hint="save the adapter with PEFT and use `llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    tensors = select(leaves, lambda _, tensor: tensor, source, warnings)
    prefix = prefix_of(tensors)
    foreign = [] if is_meta_named(state) else outside(tensors, prefix)
    if foreign and not drop:
        raise UnsupportedInput(
            f"`{source}` holds {len(foreign)} tensors that are no part of the model: {listing(foreign)}",
            hint="`--drop` leaves them out, if the model computes its logits without them",
        )
    kept = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name not in foreign}
    return kept, [f"{len(foreign)} tensors outside the model: {listing(foreign)}"] if foreign else []


def _leaves(folder: Folder, state: Mapping[Any, Any]) -> dict[str, Any]:
    """Tensors as LazyTensor, values as they are; what is nested below is not part of the state dict."""
    named = {str(name): item for name, item in state.items() if not isinstance(item, dict)}
    return {
        name: folder.tensor(name, item) if isinstance(item, TensorItem) else item
        for name, item in named.items()
        if not name.endswith(ROPE_TABLE)
    }


def _from_meta(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], source: str) -> dict[str, LazyTensor]:
    if config["model_type"] != "llama":
        raise UnsupportedInput(
            f"`{source}` has Meta's names, its configuration is of a `{config['model_type']}`",
            hint="of torchtitan's models only Llama is converted; give the `config.json` of a Llama",
        )
    try:
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        renamed = rename(tensors, LLAMA, source)
        return {
            target: permute_rows(tensors[name], rope_order(head_dim))
            if name.endswith((".wq.weight", ".wk.weight"))
            else tensors[name]
            for target, name in renamed.items()
        }
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise MalformedInput(
            f"the heads of `{source}` do not fit its configuration: {error}",
            hint="`config.json` needs `hidden_size` and `num_attention_heads` of this model",
        ) from error


def _without(tree: Mapping[Any, Any], place: Sequence[str]) -> dict[Any, Any]:
    """The parts of the nested dict next to the model, at every level down to it."""
    if not place:
        return {key: value for key, value in tree.items() if isinstance(value, dict)}
    rest = {key: value for key, value in tree.items() if str(key) != place[0]}
    return _without(tree[place[0]], place[1:]) | rest


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    folder = open_folder(_place(path) or path)
    found = [(".".join(map(str, keys)), item) for keys, item in named_leaves(folder.tree) if keys[0] not in PARTS]
    return {name: folder.tensor(name, item) for name, item in found if isinstance(item, TensorItem) and item.dtype}


FORMAT = Format(
    name="dcp",
    title="torch Distributed Checkpoint (FSDP, accelerate, torchtitan): a folder of `.distcp` shards and `.metadata`",
    detect=_detect,
    open=_open,
    covers="any causal language model in Hugging Face's names, sharded in any grid over any number of ranks; "
    "torchtitan's Llama; give `config.json` with `--config` where none lies beside",
    options=("root", "drop"),
    peek=_peek,
)
