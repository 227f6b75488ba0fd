"""Composer (LLM Foundry) runs, opened as one nested dict in any of their layouts (mosaicml/composer `core/state.py`).

One file (`utils/checkpoint.py`, `models/huggingface.py`): `state.model`, the state dict of a ComposerModel, so each
Hugging Face name has the prefix `model.`, and wrappers may have added theirs anywhere;
`state.integrations.huggingface`, `state.metadata`, and parts for resuming that are not read. Every branch may be
missing (`ignore_keys`).

Sharded: a distributed checkpoint of that dict in `epE-baB/`.

Newer folders `epE-baB/` (`checkpoint/save.py`): `composer_metadata.json` (versions, and under `huggingface` what one
file has in `state.integrations.huggingface`), `model/model.pt` (the bare state dict) or a distributed checkpoint in
`model/`, `optim/`, `resumption.pkl`.

Tokenizer files (`models/huggingface.py`, `get_metadata`): `{key: {file_extension, content}}`, restored byte for byte
under safe names; the key is the file's name, without its extension before August 2023. JSON is stored parsed, text as
lines, sentencepiece as bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from llmconv.checkpoint import SIDE_FILES, Checkpoint, read_json
from llmconv.convert import assembly
from llmconv.convert.formats import Format
from llmconv.convert.models.completeness import as_loaded
from llmconv.convert.models.config_file import OPTION, causal_lm_config, other_class_config, own_fields
from llmconv.convert.models.mpt_config import enlarged, native_tensors
from llmconv.convert.state_dicts.distributed import FILE, TensorItem, open_folder, sizes_of
from llmconv.convert.state_dicts.distributed import is_folder as is_distributed_folder
from llmconv.convert.state_dicts.files import Sign, phrases, select
from llmconv.convert.tokenizers import read_tokenizer
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import Global, TensorRef
from llmconv.files.torch_reader import is_torch_file, open_torch_file
from llmconv.model_code import AUTO_MAP
from llmconv.tensors import LazyTensor


def _detect(path: Path) -> bool:
    if is_folder(path):
        return True
    if not is_torch_file(path):
        return is_sharded(path)
    content = open_torch_file(path).content
    # a state dict of a torch optimizer has a `state`, too
    return isinstance(content, dict) and "state" in content and "param_groups" not in content


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    run = open_run(path)
    if not (model := branch(run.content, "state", "model")):
        raise InputRefused(
            f"`{path.name}` has no `state.model`, so there are no weights in it",
            hint="it was saved without the model; give another checkpoint of the run",
        )
    warnings: list[str] = []
    given = {name: value for name, value in config.items() if name not in assembly.OPTIONS}
    huggingface = branch(run.content, "state", "integrations", "huggingface")
    embedded: dict[str, Any] = plain(branch(huggingface, "model", "config", "content"), path.name)
    own = own_fields(embedded, given, path.name) is not None
    tensors = select(model, run.tensor, path.name, warnings, prefix="model.", buffers=own)

    def open_model(tensors: dict[str, LazyTensor], base: Checkpoint | None) -> Checkpoint:
        settings, own_files = dict[str, Any](), dict(base.side_files if base else {})
        if tensors:
            stored = assembly.config_of_run(embedded, base, warnings)
            other = other_class_config(stored, given, tensors, warnings)
            settings = other or causal_lm_config(stored, given, path.name, warnings)
            if not other and AUTO_MAP not in settings:
                if settings["model_type"] == "mpt":
                    tensors = enlarged(native_tensors(tensors, path.name), {**stored, **given}, path.name)
                settings = as_loaded(tensors, settings)
        if tokenizer:
            side_files = read_tokenizer(tokenizer)
        else:
            side_files, left_out = restore_files(branch(huggingface, "tokenizer"), path.name)
            if left_out:
                warnings.append(f"left out {listing(left_out)}: not among the files of a tokenizer")
            if not side_files and not base:
                warnings.append(f"`{path.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
            side_files = side_files or own_files
        # a run does not contain the base's settings of generation
        kept = {name: content for name, content in own_files.items() if name == "generation_config.json"}
        info = (version(run), run.shards, dropped(run))
        return Checkpoint(path, FORMAT.name, tensors, settings, {**kept, **side_files}, tuple(warnings), *info)

    peft = plain(branch(huggingface, "model", "peft_config", "content"), path.name)
    return assembly.opened_with_adapter(tensors, path, config, open_model, stored=peft)


FORMAT = Format(
    name="composer",
    title="MosaicML Composer and LLM Foundry: one `.pt` file, packed or not, or a folder, sharded or not",
    detect=_detect,
    sign=Sign(keys=("state",)),
    open=_open,
    covers=(
        "runs of Composer 0.13 to 0.32 with any causal language model or classifier of transformers, in one file, "
        "packed (`.gz`, `.zst`, `.tar`, …), through a `.symlink` pointer or in a folder; LoRA runs, merged or kept "
        "apart; MPT as far as transformers' own computes the same"
    ),
    options=(*assembly.OPTIONS, OPTION),
    peek=lambda path: select(
        branch((run := open_run(path)).content, "state", "model"), run.tensor, path.name, [], "model."
    ),
)


@dataclass(frozen=True)
class ComposerRun:
    """An opened run."""

    # the nested dict, as `torch.load` of one whole file returns it; its tensors are leaves for `tensor`
    content: Mapping[str, Any]
    # `tensor(name, leaf)` returns the LazyTensor of a leaf; the name is for error messages
    tensor: Callable[[str, Any], LazyTensor]
    shards: int = 1
    # description to bytes of the parts outside `content`, which are not converted
    other_parts: Mapping[str, int] = field(default_factory=dict)


def branch(value: Any, *keys: str) -> dict[Any, Any]:
    """The dict under the nested `keys`, or an empty one."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def is_folder(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_run(path: Path) -> ComposerRun:
    """Opens the run at `path` without reading tensors; InputRefused if it is malformed or of an unsupported kind."""
    if is_sharded(path):
        return open_sharded(path)
    if is_folder(path):
        if not (path / MODEL).is_file():
            raise InputRefused(
                f"`{path.name}` has no `{MODEL}`, so there are no weights in it",
                hint="it was saved without the model, or the copy is incomplete",
            )
        model = open_torch_file(path / MODEL)
        return ComposerRun(folder_content(path, model.content), model.tensor, other_parts=other_parts(path))
    file = open_torch_file(path)
    refuse_rank_file(path, branch(file.content, "state", "model"))
    return ComposerRun(file.content, file.tensor)


METADATA = "composer_metadata.json"
MODEL = "model/model.pt"
OTHER_PARTS = {"optim": "the optimizer's state", "resumption.pkl": "the state for resuming the run"}


def folder_content(folder: Path, model: Any) -> dict[str, Any]:
    """A newer folder and its state dict as the one-file layout; MalformedInput if metadata or model are not such."""
    if not isinstance(model, dict):
        raise MalformedInput(f"`{folder.name}/{MODEL}` contains no state dict", hint="copy the folder again")
    stored = read_json(folder / METADATA)
    metadata = {"composer_env_info": stored, "torch_version": stored.get("torch_version")}
    integrations = {"huggingface": stored.get("huggingface")}
    return {"state": {"model": model, "integrations": integrations, "metadata": metadata}}


def other_parts(folder: Path) -> dict[str, int]:
    """Description to bytes of the other parts in the folder."""
    files = {part: [folder / name, *(folder / name).glob("*")] for name, part in OTHER_PARTS.items()}
    sizes = {part: sum(file.stat().st_size for file in group if file.is_file()) for part, group in files.items()}
    return {part: size for part, size in sizes.items() if size}


PARTS = {  # keys in the state, or (generators, and in old sharded runs the optimizer) next to it
    "optimizers": "the optimizer's state",
    "schedulers": "the learning rate schedulers",
    "algorithms": "the algorithms",
    "callbacks": "the callbacks",
    "scaler": "the gradient scaler",
    "train_metrics": "the training metrics",
    "eval_metrics": "the evaluation metrics",
    "dataset_state": "the data loader's position",
    "timestamp": "the time stamp",
    "rng": "the random number generators",
}

KEPT = {"model", "integrations", "metadata", "run_name", "rank_zero_seed"}
VERSION = re.compile(r"[\w.+-]{1,60}")


def version(run: ComposerRun) -> str:
    """The versions, such as `composer 0.32.1, torch 2.13.0`; empty if unknown."""
    composer = branch(run.content, "state", "metadata", "composer_env_info").get("composer_version")
    torch = branch(run.content, "state", "metadata").get("torch_version")
    if isinstance(torch, Stub) and torch.args:  # a `TorchVersion`, a class of strings
        torch = torch.args[0]
    known = (("composer", composer), ("torch", torch))
    return ", ".join(f"{name} {text}" for name, text in known if isinstance(text, str) and VERSION.fullmatch(text))


def dropped(run: ComposerRun) -> tuple[str, ...]:
    """The parts that are not converted, one phrase each, with the size of their tensors; none is read."""
    parts = {key: value for key, value in run.content.items() if key != "state"} | branch(run.content, "state")
    leaves = {str(key): [*_leaf_sizes(value)] for key, value in parts.items() if key not in KEPT}
    sizes = {PARTS.get(key, f"`{key[:40]}`"): sum(found) for key, found in leaves.items() if found}
    # a sharded run has the same parts under quoted keys
    others = {
        PARTS.get(key.strip("`"), key): size for key, size in run.other_parts.items() if key.strip("`") not in KEPT
    }
    return phrases(sizes | others)


def _leaf_sizes(value: Any) -> Iterator[int]:
    """Bytes of all but None in nested containers, each container once (a pickle may refer to one many times)."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping | list | tuple):
            if id(item) not in seen:
                seen.add(id(item))
                waiting.extend(item.values() if isinstance(item, Mapping) else item)
        elif isinstance(item, TensorRef):
            yield prod(item.shape) * (item.dtype.itemsize if item.dtype else 1)
        elif item is not None:
            yield item.nbytes if isinstance(item, LazyTensor) else 0


MODEL_KEY = "model"
# Keys of a Composer state next to the model; at least one of them is always there
TRACES = {"integrations", "metadata", "timestamp", "run_name", "rank_zero_seed"}
WAY_OUT = (
    "load all ranks' files with the Composer that wrote them, in as many processes, and save once with "
    "`state_dict_type: full`"
)


def is_sharded(path: Path) -> bool:
    if is_folder(path) and is_distributed_folder(path / MODEL_KEY):
        return True
    if not is_distributed_folder(path) or not (path / FILE).is_file():
        return False
    tree = open_folder(path).tree
    state = tree.get("state")
    return isinstance(state, dict) and MODEL_KEY in state and ("rng" in tree or bool(TRACES & set(state)))


def open_sharded(path: Path) -> ComposerRun:
    """Errors as in `open_folder`."""
    if is_folder(path):
        folder = open_folder(path / MODEL_KEY)
        state, left = folder_content(path, folder.tree)["state"], other_parts(path)
        model = state.pop(MODEL_KEY)
        known = state
    else:
        folder = open_folder(path)
        state = folder.tree["state"]
        model = state[MODEL_KEY]
        known = {name: folder.values(state.get(name, {})) for name in ("integrations", "metadata")}
        rest = {**folder.tree, **state}
        left = sizes_of({name: tree for name, tree in rest.items() if name not in ("state", MODEL_KEY, *known)})
    # restores the content of JSON files that are an empty dict, which torch does not store
    for entry in branch(known, "integrations", "huggingface", "tokenizer").values():
        if isinstance(entry, dict) and entry.get("file_extension") == ".json":
            entry.setdefault("content", {})
    entries = model.items() if isinstance(model, Mapping) else ()
    lazy = {str(key): folder.tensor(str(key), one) if isinstance(one, TensorItem) else one for key, one in entries}
    return ComposerRun({"state": {MODEL_KEY: lazy, **known}}, lambda _, tensor: tensor, folder.shards, left)


def refuse_rank_file(path: Path, model: Any) -> None:
    """Raises UnsupportedInput for the file of one rank (`ShardedTensor`, or flat parameters of FSDP, `local`)."""
    entries = model.items() if isinstance(model, Mapping) else ()
    # pickled as today (a call with the class as argument) or as in 2023 (the object itself)
    names = [name for _, value in entries if isinstance(value, Stub) for name in (value.function, *value.args)]
    if any(isinstance(name, Global) and name.name == "ShardedTensor" for name in names):
        raise UnsupportedInput(
            f"`{path.name}` is one rank's part of a sharded run from before August 2023 (`ShardedTensor`)", hint=WAY_OUT
        )
    if any(str(key).rpartition(".")[2] in ("flat_param", "_flat_param") for key, _ in entries):
        raise UnsupportedInput(
            f"`{path.name}` is one rank's part of a run saved with `state_dict_type: local` (flat parameters)",
            hint=WAY_OUT,
        )


DEPTH_LIMIT = 64
VALUE_LIMIT = 10_000_000
REPEAT_LIMIT = 1_000
"""How often one list or dict may occur: parsed JSON is a tree; only a hostile file refers to one many times."""


def restore_files(entries: Mapping[str, Any], source: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Contents by name, and names that no tokenizer has; MalformedInput: a name leads out, an odd content."""
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    for key, entry in entries.items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("file_extension"), str):
            raise MalformedInput(f"`{source}` contains a tokenizer file {key!r} without content", hint=HINT)
        extension = entry["file_extension"]
        name = str(key) if str(key).endswith(extension) else f"{key}{extension}"
        if PurePosixPath(name).name != name or "\\" in name or name.startswith("."):
            raise MalformedInput(f"`{source}` contains a tokenizer file {name!r} outside the folder", hint=HINT)
        if name not in SIDE_FILES:
            left_out.append(name)
            continue
        try:
            files[name] = _encode(name, extension, entry.get("content"), source)
        except UnicodeEncodeError as error:
            raise MalformedInput(f"`{source}` contains `{name}` with invalid text", hint=HINT) from error
    return files, tuple(left_out)


HINT = "the checkpoint was changed after it was saved; do not trust it, or give a tokenizer with `--tokenizer`"


def _encode(name: str, extension: str, content: Any, source: str) -> bytes:
    match extension, content:
        case ".json", dict() | list():
            # as its library writes it: tokenizers (Rust) for `vocab.json` and `tokenizer.json`, else transformers
            form: dict[str, Any] = {"separators": (",", ":")} if name == "vocab.json" else {"indent": 2}
            end = "" if name in ("vocab.json", "tokenizer.json") else "\n"
            return (json.dumps(plain(content, source), ensure_ascii=False, **form) + end).encode()
        case ".txt", list() if all(isinstance(line, str) for line in content):
            # upstream adds a newline to every line; joining restores the file
            return "\n".join(content).encode()
        case ".model", bytes():
            return content
        case ".jinja", str():
            return content.encode()
    raise MalformedInput(f"`{source}` contains `{name}` with content of the wrong type", hint=HINT)


def plain(value: Any, source: str) -> Any:
    """A copy of `value`; MalformedInput unless it consists of JSON types, within limits of size and depth."""
    count = 0
    seen: Counter[int] = Counter()  # repeats, because a pickle may refer to one list a million times

    def copy(value: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if value is None or isinstance(value, str | int | float):
            return value
        seen[id(value)] += bool(value)
        if depth > DEPTH_LIMIT or count > VALUE_LIMIT or seen[id(value)] > REPEAT_LIMIT:
            raise MalformedInput(f"`{source}` contains a configuration that is too large or nested", hint=HINT)
        if isinstance(value, list | tuple):
            return [copy(item, depth + 1) for item in value]
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {str(key): copy(item, depth + 1) for key, item in value.items()}
        raise MalformedInput(f"`{source}` contains a configuration with values that are not JSON", hint=HINT)

    return copy(value, 0)
