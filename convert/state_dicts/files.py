"""State dicts in files: one torch or safetensors file, or the shards of a folder, with or without an index.

transformers (`utils/hub.py`, `modeling_utils.py`): the index maps every name to a plain file name. torchtune's Hugging
Face checkpointer wrote `hf_model_0001_0.pt` (shard, epoch) without one. accelerate (`accelerator.py`,
`checkpointing.py`) writes `model.safetensors` or `model-00001-of-00003.safetensors` with
`model.safetensors.index.json`; `safetensors.torch.save_model` stores a tensor that several parameters share once, and
lists the others in the metadata: `{left out: kept}`. Files of ranks, each with its part of the tensors, are torch's
(`convert/state_dicts/distributed.py`); NeMo Automodel puts the model's own files into `.hf_metadata` there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.checkpoint import INDEX, SINGLE, indexed_shards, open_shards
from llmconv.convert.models.completeness import WRAPPERS, is_buffer
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing, short
from llmconv.files.pickle_machine import Stub
from llmconv.files.pickle_reader import Global, TensorRef
from llmconv.files.safetensors_file import FileTensor, Header, read_header
from llmconv.files.shard_index import require_listed
from llmconv.files.source_file import Version, version_of
from llmconv.files.torch_reader import is_torch_file, open_torch_file
from llmconv.not_a_model_folder import training_file_kind
from llmconv.tensors import LazyTensor

# Keys under which training scripts save the state dict of the model
UNDER = ("state_dict", "model_state_dict", "model", "module")

QUANTIZED = re.compile(  # parts of a quantized matrix: GPTQ, AWQ, bitsandbytes, torch's own, float8 with scales
    r"\.(?:qweight|qzeros|SCB|weight_format|absmax|quant_map|quant_state\b.*|_packed_params\b.*|weight_scale(?:_inv)?)$"
)

Leaf = TensorRef | LazyTensor
"""A tensor of a state dict: a reference into a torch file, or a tensor that is already lazy."""


@dataclass(frozen=True)
class StateFile:
    """The state dict of one file, or of several shards."""

    path: Path
    state: Mapping[str, Any]  # name to a TensorRef, a LazyTensor, or any other value
    # `tensor(name, leaf)` returns the LazyTensor of a leaf
    tensor: Callable[[str, Any], LazyTensor] = field(repr=False)
    # the dict that contains the state dict; empty if there is none
    around: Mapping[Any, Any] = field(default_factory=dict, repr=False)
    shards: int = 1
    home: Path | None = None  # where the configuration and the tokenizer are; None: at or next to `path`

    def tensors(self) -> dict[str, LazyTensor]:
        """Name to tensor; UnsupportedInput if there is another object or the tensors are quantized."""
        refuse_quantized(self.state, self.path.name)
        refuse_objects(self.state, self.path.name)
        leaves = {name: leaf for name, leaf in self.state.items() if isinstance(leaf, Leaf)}
        return {name: self.tensor(name, leaf) for name, leaf in leaves.items()}


def select(
    state: Mapping[Any, Any],
    tensor: Callable[[str, Any], LazyTensor],
    source: str,
    warnings: list[str],
    prefix: str = "",
    *,
    buffers: bool = False,
) -> dict[str, LazyTensor]:
    """Hugging Face name to tensor (`tensor(name, leaf)`), without wrappers, buffers and (a warning) other values.

    `prefix` is what the trainer's module adds to every name; with `buffers` they are kept, since only a model's own
    code knows which ones it loads. Raises UnsupportedInput for two tensors with one name, or an object.
    """
    names = {key: WRAPPERS.sub("", str(key)) for key in state}
    prefix = prefix if all(name.startswith(prefix) for name in names.values()) else ""
    tensors: dict[str, LazyTensor] = {}
    skipped: list[str] = []
    for key, value in state.items():
        name = names[key].removeprefix(prefix)
        if not buffers and is_buffer(name, len(value.shape) if isinstance(value, Leaf) else -1):
            continue
        if isinstance(value, Stub) or name in tensors:
            if name in tensors:
                problem = f"is there twice, a duplicate key: as `{key}`, too"
                hint = "two models, or two versions of one, are mixed in these files; save the `state_dict()` of one"
            else:
                problem = "is an object that was not rebuilt, not a plain tensor"
                hint = "save a full (unsharded, unquantized) state dict"
            raise UnsupportedInput(f"`{name}` in `{source}` {problem}", hint=hint)
        if isinstance(value, Leaf):
            tensors[name] = tensor(name, value)
        else:
            skipped.append(name)
    if skipped:
        warnings.append(f"skipped {len(skipped)} values that are not tensors: {listing(skipped)}")
    return tensors


def refuse_quantized(names: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedInput if there are packed parts of quantized matrices."""
    if found := [name for name in names if QUANTIZED.search(name)]:
        raise UnsupportedInput(
            f"`{source}` is quantized: it contains {listing(found)}", hint="give the weights from before quantization"
        )


def refuse_objects(state: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedInput for the first object (`ShardedTensor`, `NF4Tensor` and the like) among the tensors."""
    for name, leaf in state.items():
        if isinstance(leaf, Stub):
            kind = next((one for one in (*leaf.args[:1], leaf.function) if isinstance(one, Global)), "")
            problem = f"`{name}` in `{source}` is an object, not a plain tensor" + (
                f" (`{short(kind, 80)}`)" if kind else ""
            )
            raise UnsupportedInput(problem, hint="save a full (unsharded, unquantized) state dict of plain tensors")


def open_state(path: Path) -> StateFile | None:
    """The state dict in a torch file, flat or under a key of `UNDER`, or None; InputRefused if malformed."""
    file = open_torch_file(path)
    content = file.content
    if not isinstance(content, dict):
        return None
    if any(isinstance(leaf, TensorRef) and "." in str(key) for key, leaf in content.items()):
        return StateFile(path, _named(content), file.tensor)
    for key in UNDER:
        inner = content.get(key)
        if isinstance(inner, dict) and any(isinstance(leaf, TensorRef) for leaf in inner.values()):
            return StateFile(path, _named(inner), file.tensor, content)
    return None


def peek_state(path: Path) -> StateFile | None:
    """As `open_state`, but None if the file is unreadable: for detection."""
    try:
        return open_state(path) if is_torch_file(path) else None
    except LlmconvError:
        return None


def _named(state: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): leaf for key, leaf in state.items()}


def union(path: Path, files: list[StateFile]) -> StateFile:
    """The shards of one state dict as one; MalformedInput if a tensor is in two of them."""
    homes = without_duplicates(path.name, [dict.fromkeys(file.state, file) for file in files])
    state = {name: file.state[name] for name, file in homes.items()}
    return StateFile(path, state, lambda name, leaf: homes[name].tensor(name, leaf), shards=len(files))


def without_duplicates(source: str, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of several dicts; MalformedInput if a key is in two of them."""
    whole: dict[str, Any] = {}
    for part in parts:
        if duplicate := sorted(whole.keys() & part.keys()):
            raise MalformedInput(
                f"duplicate keys in the files of `{source}`: {listing(duplicate)}",
                hint="files of different checkpoints are mixed, or a save wrote a tensor twice: copy the folder again "
                "from where it was saved, or save the model again",
            )
        whole |= part
    return whole


# Names of Hugging Face's input embeddings; Megatron's is in a module `embedding`
EMBEDDING = re.compile(r"(?<!embedding\.)\b(?:embed_tokens|wte|embed_in|word_embeddings|embeddings?)\.weight$")
ADAPTER_NAMES = re.compile(r"lora_|\.modules_to_save\.|prompt_embeddings")
MEGATRON_KEY = "checkpoint_version"  # A key of Megatron's checkpoints (its `checkpointing.py`), which are unsupported


@dataclass(frozen=True)
class Sign:
    """Content that only the state dicts of one system have."""

    # keys next to the state dict; any of them identifies the system, whatever the names of the tensors
    keys: tuple[str, ...] = ()
    names: re.Pattern[str] | None = None  # a pattern that matches the name of some tensor; None if the keys are enough

    def has_names(self, found: StateFile) -> bool:
        """Whether the tensors have names of this system."""
        return self.names is None or any(self.names.search(name) for name in found.state)


def has_hugging_face_names(found: StateFile) -> bool:
    """Whether the tensors have the names of a transformers model; False for an adapter."""
    if MEGATRON_KEY in found.around or found.path.name.startswith("adapter_model."):
        return False
    if all(ADAPTER_NAMES.search(name) for name in found.state):
        return False
    return any(EMBEDDING.search(name) for name in found.state)


# One rank's part of a model, as verl and SkyRL save it: ranks in all, and its own number
RANK_FILE = re.compile(r"model_world_size_([1-9]\d{0,6})_rank_(0|[1-9]\d{0,6})\.pt")
BINS = ("pytorch_model.bin", "pytorch_model_fsdp.bin")  # the whole model; a Trainer with FSDP writes the second
# DeepSpeed's own files, in the folder or one level below: the format `deepspeed` reads their float32 weights
RANK_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_.*\.pt|mp_rank_\d+_model_states\.pt")
SHARD = re.compile(r"(?:pytorch_)?model-(\d+)-of-(\d+)\.bin")
TORCHTUNE_SHARD = re.compile(r"hf_model_(\d+)_(\d+)\.pt")
INDEX_SUFFIX = ".bin.index.json"


def is_bin_folder(folder: Path) -> bool:
    """Whether `folder` contains torch files with Hugging Face's file names, and no safetensors model."""
    names = sorted(entry.name for entry in folder.iterdir())
    rank_states = (RANK_STATES.fullmatch(file.name) for file in [*folder.glob("*.pt"), *folder.glob("*/*.pt")])
    if SINGLE in names or INDEX in names or any(rank_states):
        return False
    return bool(model_files(folder)) or any(name.endswith(INDEX_SUFFIX) for name in names)


def model_files(folder: Path) -> list[Path]:
    """The files with the name of a whole model or of a shard, sorted."""
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.name in BINS or SHARD.fullmatch(entry.name) or TORCHTUNE_SHARD.fullmatch(entry.name)
    )


def is_shard(path: Path) -> bool:
    match = SHARD.fullmatch(path.name)
    return int(match[2]) > 1 if match else bool(TORCHTUNE_SHARD.fullmatch(path.name))


def open_bin_folder(folder: Path) -> StateFile:
    """A folder's state dict, as its index lists it (else MalformedInput); InputRefused for several checkpoints."""
    if index := _only(folder, _indices(folder, INDEX_SUFFIX)):
        shards = indexed_shards(folder, index, lambda name: name.endswith(".bin"))
        files = {shard: require_state(folder / shard) for shard in shards}
        states = {shard: file.state for shard, file in files.items()}
        require_listed(shards, states, index, lambda shard, name: _only_tensor(files[shard], name))
        for shard, file in files.items():
            kept = {name: leaf for name, leaf in file.state.items() if name in shards[shard]}
            files[shard] = replace(file, state=kept)
        return union(folder, [*files.values()])
    for name in BINS:
        if (folder / name).is_file():
            return union(folder, [require_state(folder / name)])
    entries = [(SHARD.fullmatch(one.name), TORCHTUNE_SHARD.fullmatch(one.name), one) for one in folder.iterdir()]
    found = [("", plain[1], int(plain[2]), entry) for plain, _, entry in entries if plain]
    found += [(tuned[2], tuned[1], 0, entry) for _, tuned, entry in entries if tuned]
    if not found:
        raise MalformedInput(
            f"`{folder}` contains no regular file with weights",
            hint="a link, a pipe or a folder has its name; copy it again",
        )
    return union(folder, [require_state(file) for file in _in_order(folder, found)])


def _only_tensor(file: StateFile, name: str) -> LazyTensor:
    return replace(file, state={name: file.state[name]}).tensors()[name]


def require_state(file: Path) -> StateFile:
    """As `open_state`; MalformedInput if there is none."""
    if (found := open_state(file)) is None:
        raise MalformedInput(f"`{file.name}` contains no state dict", hint="it should contain tensors by name")
    return found


def _in_order(folder: Path, found: Iterable[tuple[str, str, int, Path]]) -> list[Path]:
    """Unindexed shards in order: of each its set, its number, how many there are (0: unknown), and the file.

    Raises MalformedInput if one is missing or superfluous, InputRefused for shards of several checkpoints or epochs.
    """
    shards = {int(number): file for _, number, _, file in found}
    if len(sets := {(name, total) for name, _, total, _ in found}) > 1:
        raise InputRefused(
            f"`{folder}` contains the shards of several checkpoints", hint="move those of one into a separate folder"
        )
    count = next((total for _, total in sets), 0) or max(shards, default=0)
    missing = next((number for number in range(1, len(shards) + 2) if number not in shards), 0)
    if len(shards) != count or missing <= count:
        present = ", ".join(str(number) for number in sorted(shards)[:8])
        raise MalformedInput(
            f"`{folder}` contains {len(shards)} of {count} shards (numbers {present}); number {missing} is missing",
            hint="copy the folder again; all shards are needed",
        )
    return [shards[number] for number in sorted(shards)]


LISTED = 8  # number of parts that are listed, the largest first; the rest is counted
UNITS = ("bytes", "kB", "MB", "GB", "TB")


def phrases(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """A phrase for each of the largest parts with its bytes (0: no tensors), and one that counts the others."""
    large = sorted(sizes, key=lambda name: -sizes[name])
    more = (f"{len(large) - LISTED} smaller parts",) if len(large) > LISTED else ()
    return tuple(f"{name} ({size_text(sizes[name])})" if sizes[name] else name for name in large[:LISTED]) + more


def size_text(count: int) -> str:
    """A readable size, such as `536 kB`."""
    unit = min(len(UNITS) - 1, (len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:.3g} {UNITS[unit]}"


DEPTH = 4  # maximum nesting of dicts; deeper ones belong to optimizers


def raw_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a torch or safetensors file, or of a folder of them; reads only headers. InputRefused if none."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    files = {
        entry.name: read_header(entry).tensors if entry.suffix == SUFFIX else torch_tensors(entry)
        for entry in entries
        if entry.suffix == ".safetensors" or is_torch_file(entry)
    }
    if not files:
        raise InputRefused(f"`{path}` contains no torch or safetensors file", hint="is the copy complete?")
    return joined(files)


def joined(files: Mapping[str, Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    """The tensors of several files by unique names; with several files, a name contains that of the file."""
    if len(files) == 1:
        return dict(next(iter(files.values())))
    return {f"{file}: {name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def torch_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a plain torch file (else InputRefused): the state dict, or nested dicts in dotted names."""
    file = open_torch_file(path)
    return {name: file.tensor(name, ref) for name, ref in _leaves(file.content, "", 0)}


def _leaves(value: object, name: str, depth: int) -> list[tuple[str, TensorRef]]:
    if isinstance(value, TensorRef):
        return [(name, value)]
    if not isinstance(value, dict) or depth > DEPTH:
        return []
    return [leaf for key, item in value.items() for leaf in _leaves(item, f"{name}.{key}".lstrip("."), depth + 1)]


SUFFIX = ".safetensors"
SAFETENSORS_INDEX = ".safetensors.index.json"
SAFETENSORS_SHARD = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
RANK_SHARD = re.compile(r"shard-(\d{1,6})-(?:.+)-\d{1,6}-of-\d{1,6}\.safetensors")  # a rank's parts of tensors
RANK_HOME = ".hf_metadata"  # the folder of the model's own files next to them
ADAPTER = re.compile(r"(?:adapter_model|adapters|peft_model.*|.*lora.*)\.safetensors")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in name order, except those of optimizers and adapters."""
    return [
        entry
        for entry in sorted(folder.iterdir())
        if entry.suffix == SUFFIX
        and entry.is_file()
        and not training_file_kind(entry.name)
        and not ADAPTER.fullmatch(entry.name)
    ]


def is_safetensors_shard(path: Path) -> bool:
    match = SAFETENSORS_SHARD.fullmatch(path.name)
    return match is not None and (int(match[3]) > 1 or RANK_SHARD.fullmatch(path.name) is not None)


def are_of_ranks(files: Iterable[Path]) -> bool:
    """Whether safetensors files are those of ranks, with parts of tensors."""
    names = [file.name for file in files]
    return bool(names) and all(map(RANK_SHARD.fullmatch, names))


def one_checkpoint(folder: Path) -> list[Path]:
    """The files of the only checkpoint in a folder; empty if there is none, or several."""
    files = weight_files(folder)
    if are_of_ranks(files):
        return files
    stems = {match[1] if (match := SAFETENSORS_SHARD.fullmatch(file.name)) else file.name for file in files}
    return files if len(stems) == 1 or _indices(folder) else []


def numbered(folder: Path) -> list[Path]:
    """Unindexed shards in order, or none; errors as in `_in_order`."""
    matches = [(match, file) for file in weight_files(folder) if (match := SAFETENSORS_SHARD.fullmatch(file.name))]
    return _in_order(folder, [(match[1], match[2], int(match[3]), file) for match, file in matches])


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file, or the only checkpoint in a folder (else InputRefused); MalformedInput: damaged."""
    if path.is_file():
        return dict(header_of(path).tensors)
    bases = {name: name.removesuffix(".index.json") for name in _indices(path)}
    own = [name for name, base in bases.items() if not (training_file_kind(base) or ADAPTER.fullmatch(base))]
    if index := _only(path, own):
        return open_shards(path, index)
    if are_of_ranks(files := weight_files(path)):
        from llmconv.convert.state_dicts.distributed import join_boxes  # noqa: PLC0415 - of few folders

        return join_boxes(path, {file.name: header_of(file) for file in files})
    files = numbered(path) or one_checkpoint(path)
    if len(files) == 1:
        return dict(header_of(files[0]).tensors)
    if not files and not (files := weight_files(path)):
        raise InputRefused(f"`{path}` contains no safetensors weights", hint="is the copy complete?")
    if files[1:] and not one_checkpoint(path):
        raise InputRefused(
            f"`{path}` contains {len(files)} safetensors files that are not shards of one checkpoint: "
            f"{listing([file.name for file in files])}",
            hint=f"give the file, such as `{files[0]}`",
        )
    return without_duplicates(path.name, [header_of(file).tensors for file in files])


def header_of(path: Path) -> Header:
    """The header of a file, with a cache, since several formats read it; errors as in `read_header`."""
    return _header(path, version_of(path.stat()))


@lru_cache(maxsize=2)
def _header(path: Path, _version: Version) -> Header:
    return read_header(path)


def open_safetensors_state(path: Path) -> StateFile:
    """The state dict of a file or folder, including names that share a tensor; errors as in `open_safetensors`."""
    tensors = open_safetensors(path)
    stored = {tensor.path for tensor in tensors.values() if isinstance(tensor, FileTensor)}
    files = [path] if path.is_file() else sorted(stored)
    if path.is_dir() and are_of_ranks(ranks := weight_files(path)):
        home = path / RANK_HOME if (path / RANK_HOME / "config.json").is_file() else None
        return StateFile(path, tensors, lambda name, leaf: leaf, shards=len(ranks), home=home)
    shared = {name: kept for file in files for name, kept in header_of(file).metadata.items() if kept in tensors}
    state = {**{name: tensors[kept] for name, kept in shared.items() if name not in tensors}, **tensors}
    return StateFile(path, state, lambda name, leaf: leaf, shards=len(files))


def peek_safetensors_state(path: Path) -> StateFile | None:
    """As `open_safetensors_state`, with the names of all files of a folder; None if a file is unreadable."""
    try:
        files = [path] if path.is_file() else one_checkpoint(path)
        states = [open_safetensors_state(file) for file in files]
    except (LlmconvError, OSError):
        return None
    merged = {name: leaf for found in states for name, leaf in found.state.items()}
    return StateFile(path, merged, lambda name, leaf: leaf) if merged else None


def _indices(folder: Path, suffix: str = SAFETENSORS_INDEX) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(suffix))


def _only(folder: Path, indices: list[str]) -> str | None:
    if len(indices) > 1:
        raise InputRefused(
            f"`{folder}` contains {len(indices)} indices: {listing(indices)}", hint="keep the one to convert"
        )
    return indices[0] if indices else None


POINTER_LIMIT = 1024


def tracked(
    path: Path, saves: Mapping[str, Path], pointer: Path, name_of: Callable[[str], str] = lambda word: word
) -> Path:
    """The newest of several saves: that of which the file `pointer` has the name, or a word for `name_of`.

    Raises InputRefused for several saves without the file, MalformedInput if there is no save of the name.
    """
    name = next(iter(saves), "")
    if pointer.is_file():
        with open(pointer, encoding="utf-8", errors="replace") as text:
            name = name_of(text.read(POINTER_LIMIT).strip())
    elif len(saves) > 1:
        raise InputRefused(
            f"`{path.name}` contains {len(saves)} saves and no `{pointer.name}`: {listing(list(saves))}",
            hint=f"give one of them, such as `{[*saves.values()][-1]}`",
        )
    if name not in saves:
        raise MalformedInput(
            f"`{pointer.name}` in `{path.name}` names {name[:80]!r}, which is not a save in it",
            hint=f"copy that folder too, or give another one, such as `{[*saves.values()][-1]}`"
            if saves
            else "copy it again",
        )
    return saves[name]
