"""Checkpoint: a read-only mapping from tensor name to LazyTensor, with config and side files; transposed weights."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import numpy as np

from llmconv.errors import MalformedInput, UnsupportedInput, listing, short, word
from llmconv.files.paths import refuse_git_lfs
from llmconv.files.safetensors_file import RANGES, FileTensor, read_header, with_second_names
from llmconv.files.shard_index import require_listed
from llmconv.files.source_file import fill, open_data
from llmconv.files.sources import snapshot_home
from llmconv.not_a_model_folder import refused_model
from llmconv.tensors import BLOCK_BYTES, Array, LazyTensor

JSON_BYTES = 32 << 20
# ten times the largest known index of shards and tokenizer; parsed JSON takes up to twenty times as much memory
SMALL_BYTES = 256 << 20
DEPTH_LIMIT = 100  # maximum nesting of a JSON file; those of models have fewer than ten levels
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# folder of an adapter's two files next to a model; without a model they are in the output itself
ADAPTER_FOLDER = "adapter"
# vocabularies of Kimi, Qwen 1 and Mistral, which code of their own reads
OWN_CODE = ("tiktoken.model", "qwen.tiktoken", "tekken.json")
# small files that are copied with a model: never code, never weights
SIDE_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json"),
    *OWN_CODE,
)
# files of which a tokenizer has at least one
VOCABULARIES = frozenset(
    ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"]
    + [*OWN_CODE]
)
# Where transformers saves the chat templates of a tokenizer that has several, but for the default one
TEMPLATES = "additional_chat_templates"
MOST_TEMPLATES = 64


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """Tensors by Hugging Face name, in file order, read lazily."""

    path: Path  # the file or folder it was opened from
    format: str  # of the source, such as `hf`, `composer`, `meta`
    tensors: Mapping[str, LazyTensor]
    config: dict[str, Any]  # the content of `config.json`
    # content of tokenizer and generation files, by file name
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # for the user, one line each
    version: str = ""  # the writer of the files, such as `composer 0.32.1`; empty if unknown
    shards: int = 1  # number of files with weights
    # content of the files that is not in `tensors`, one phrase each, such as `the optimizer's state`
    dropped: tuple[str, ...] = ()
    source_type: str = ""  # the writer's name of the `model_type`, such as `chatglm_v2`
    # a separate PEFT adapter of this model: its tensors, and `adapter_config.json` as its `config`
    adapter: Checkpoint | None = None
    # for a Hugging Face folder, name of a tensor to the name of its file
    files: Mapping[str, str] = field(default_factory=dict)
    # names of tensors that are the values of codes, in float32 and not yet rounded
    dequantized: frozenset[str] = frozenset()
    # files outside of `path` on which values depend, and not only the `config`, such as a run's YAML with `lora_alpha`
    settings: tuple[Path, ...] = ()

    def __getitem__(self, name: str) -> LazyTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {self.format}, {self.kind}, {len(self)} tensors>"

    @property
    def kind(self) -> str:
        """The model type for messages: `llama`, or `chatglm_v2 as glm` if the writer's name differs."""
        model_type = str(self.config.get("model_type") or "unknown")
        return f"{self.source_type} as {model_type}" if self.source_type not in ("", model_type) else model_type

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has the file names of a Hugging Face model: a config and weights."""
    return (folder / "config.json").is_file() and has_weights(folder)


def has_weights(folder: Path) -> bool:
    """Whether a folder has a file name of weights: safetensors, or the index of ranges in other files."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX, RANGES))


# Parts of a module that PEFT wrapped: its weight before training, and what the tuners train (PEFT `tuners/*/layer.py`,
# `adapter_layer_names`; `utils/other.py`), followed by the adapter's label or not
UNMERGED = re.compile(
    r"\.(?:base_layer|original_module|modules_to_save|lora_(?:[ABEab]|down|up|embedding_[AB]|magnitude_vector)|ia3_l"
    r"|p?vera_(?:[AB]|lambda_[bd])|vblora_(?:logits_[AB]|vector_bank)|hada_[tw][12](?:_[ab])?|lokr_[tw][12](?:_[ab])?"
    r"|oft_(?:embedding_)?R|boft_[Rs]|randlora_(?:[AB]|lambda|gamma)|fourierft_spectrum|waveft_spectrum|hra_u|c3a_kernel"
    r"|bone_block|miss_block|shira_weight|road_(?:theta|alpha)|gralora_[AB](?:_general)?|hira_(?:embedding_)?[AB]"
    r"|delora_(?:[AB]|lambda)|ln_tuning_layers|trainable_tokens_(?:delta|original))(?:\.|$)"
)
OWN_FACTORS = ("phi4_multimodal", "phi4mm")
"""Types whose published weights have factors of their own, which the model's code adds."""
UNMERGED_SAYS = "of an adapter that is not merged"


def unmerged(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The names that PEFT gave to parts of modules.

    A model with its own code may have such parts itself (Jina's embeddings): there only `base_layer` tells.
    """
    found = [name for name in names if UNMERGED.search(name)]
    own = config.get("model_type") in OWN_FACTORS
    own = own or bool(config.get("auto_map")) and not any(".base_layer." in name for name in found)
    return [] if own else found


MLX_LAYER = re.compile(r"\.(?:lora_[ab]|linear\.(?:weight|bias|scales|biases))$")
"""Parts of a layer of mlx-lm with LoRA (`tuner/lora.py`), whose scale is in no file."""


def refuse_mlx_layers(names: Iterable[str], source: str) -> None:
    """MalformedInput for a model that mlx-lm saved with its adapter in it, not fused."""
    found = [name for name in names if MLX_LAYER.search(name)]
    if any(name.endswith(".lora_a") for name in found) and any(".linear." in name for name in found):
        raise MalformedInput(
            f"`{source}` contains {len(found)} tensors {UNMERGED_SAYS}, of mlx-lm's LoRA layers, whose scale is in no "
            f"file: {listing(found)}",
            hint="merge the run's adapter, the folder with `adapters.safetensors`, into the model it was trained on: "
            "`llmconv merge-lora BASE ADAPTER -o OUT`",
        )


def refuse_unmerged(names: Iterable[str], config: Mapping[str, Any], source: str) -> None:
    """MalformedInput, listing them, for parts of an adapter among the tensors of a model."""
    names = list(names)
    refuse_mlx_layers(names, source)
    if found := unmerged(names, config):
        raise MalformedInput(
            f"`{source}` contains {len(found)} tensors {UNMERGED_SAYS}: {listing(found)}",
            hint=f"with the run's `{ADAPTER_CONFIG}` in the folder `llmconv to-hf` merges LoRA; else merge it where it "
            "was trained (PEFT's `merge_and_unload` before `save_pretrained`)",
        )


class TwoCopies(MalformedInput):
    """Files have the same weights under two names."""


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return all(one.rows(*block).tobytes() == other.rows(*block).tobytes() for block in one.blocks())


def refuse_copies(copies: Mapping[str, str], tensors: Mapping[str, LazyTensor], source: str) -> None:
    """Raises TwoCopies for `tensors` that are the same weight as another one, or a part of it, and not equal to it."""
    copies = {name: other for name, other in copies.items() if not _are_equal(tensors[name], tensors[other])}
    if copies:
        name, other = next(iter(copies.items()))
        raise TwoCopies(
            f"`{source}` has {len(copies)} weights twice: `{name}` is also in `{other}`, and readers take either",
            hint="two models, or two versions of one, are mixed in these files; write the trained one alone",
        )


def refuse_second_names(names: Iterable[str], known: Iterable[str], source: str) -> None:
    """Raises TwoCopies if most of the `names` that no model has are `known` ones with a prefix, or without theirs."""
    names, known = list(names), set(known)
    ends = {end: name for name in known for end in _ends(name)}
    found = {name: ends.get(name) or next((end for end in _ends(name) if end in known), "") for name in names}
    twice = [name for name, other in found.items() if other]
    if 2 * len(twice) > len(names):
        raise TwoCopies(
            f"`{source}` has {len(twice)} weights twice, under two names: `{twice[0]}` is `{found[twice[0]]}`, too",
            hint="two models, or two versions of one, are mixed in these files; write the trained one alone",
        )


def _ends(name: str) -> list[str]:
    """A name without its first one to three modules."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(1, min(4, len(parts) - 1))]


WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module|_forward_module|_orig_module"
    r"|pretrained_model)\."
)
"""What torch.compile, FSDP (also torch_xla's), activation checkpointing, Fabric and TRL (for a value head) put
around modules; in no model."""


def refuse_wrapped(names: Iterable[str], folder: Path) -> None:
    """MalformedInput, listing them, for tensors of a trainer's wrappers in a folder that transformers would load."""
    names = [*names]
    if found := [name for name in names if WRAPPED.search(name)]:
        heads = any(VALUE_HEAD.fullmatch(name) for name in names)
        raise MalformedInput(
            f"`{folder.name}` contains {len(found)} tensors under the names of a trainer's wrappers, which no model "
            f"has: {listing(found)}",
            hint=f"write it without them: `llmconv to-hf {word(folder)} --drop -o OUT`"
            if heads
            else f"write it without them: `llmconv to-hf {word(folder)} -o OUT`",
        )


VALUE_HEAD = re.compile(r"(?:value|v)_head\..*")
"""Names of TRL's value head, and of the files that LLaMA-Factory puts it in, next to a reward model's or an adapter."""
LEFT_OUT = "{} is left out: a language model has no value head"


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder; raises InputRefused or MalformedInput, also for an adapter that is not merged."""
    if not (path / "config.json").is_file():
        raise refused_model(path)
    config = read_json(own_file(path, "config.json"))
    if isinstance(given := config.get("quantization"), dict) and {"bits", "group_size"} <= given.keys():
        config.setdefault("quantization_config", given)  # mlx-lm writes both, and wrote the first alone
    if not config.get("quantization_config") and (settings := _settings_of_modelopt(path)):
        config["quantization_config"] = settings
    tensors = open_weights(path)
    if (path / SINGLE).is_file() and not (path / INDEX).is_file():
        tensors = with_second_names(tensors, read_header(path / SINGLE).metadata, config)
    refuse_unmerged(tensors, config, path.name)
    refuse_wrapped(tensors, path)
    refuse_mlx_layout(tensors, path, config.get("model_type"))
    paths = {name: getattr(tensor, "path", None) for name, tensor in tensors.items()}
    files = {name: found.name for name, found in paths.items() if found}
    version = config.get("transformers_version")
    version = f"transformers {version}" if isinstance(version, str) else ""
    heads = [file.name for file in sorted(path.glob("*_head.*")) if VALUE_HEAD.fullmatch(file.name)]
    return Checkpoint(
        path,
        "hf",
        tensors,
        config,
        read_side_files(path),
        version=version,
        shards=len({*files.values()}),
        files=files,
        warnings=(LEFT_OUT.format(listing(heads)),) if heads else (),
    )


def _settings_of_modelopt(folder: Path) -> dict[str, Any] | None:
    """What ModelOpt states in a file of its own, as newer releases state it in the config; None for plain weights.

    Source: `modelopt/torch/export/unified_export_hf.py`; without `quant_algo` only keys and values are quantized.
    """
    if not (folder / MODELOPT).is_file():
        return None
    given = read_json(own_file(folder, MODELOPT)).get("quantization")
    algorithm = given.get("quant_algo") if isinstance(given, dict) else None
    return {"quant_method": "modelopt", "quant_algo": str(algorithm)} if algorithm else None


STACKED_BY_MLX = ("glm4_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
"""Model types of which mlx-lm stores the matrices of all experts as one, `switch_mlp`, and all else unchanged."""


def refuse_mlx_layout(tensors: Mapping[str, LazyTensor], path: Path, kind: object) -> None:
    """UnsupportedInput for a folder that MLX converted from a model whose weights it stores in an order of its own.

    mlx-lm (`models/*.py`, `sanitize`) stacks experts as `switch_mlp`, those of gpt-oss with gate and up apart, moves
    the channels of a `conv1d` to the end, and adds one to norms or multiplies weights in the same families; of others
    (Llama, Qwen 2 and 3, Gemma) it keeps all.
    """
    for name, tensor in tensors.items():
        moved = name.endswith("conv1d.weight") and tensor.shape[2:] == (1,) and tensor.shape[1] > 1
        apart = name.endswith(".mlp.experts.gate_proj.weight") and len(tensor.shape) == 3
        if moved or apart or ".switch_mlp." in name:
            way = f"write it in transformers' names: `llmconv to-hf {word(path)} -o OUT`"
            raise UnsupportedInput(
                f"`{path.name}` was written by MLX, which stores weights of this family in an order, and some with "
                f"values, of its own (`{name}`)",
                hint=way if kind in STACKED_BY_MLX else "take the model it was converted from",
            )


MODELOPT = "hf_quant_config.json"


def open_weights(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of `model.safetensors`, of shards and an index, or of ranges; InputRefused if there are none."""
    if (folder / INDEX).is_file():
        return open_shards(folder)
    if (folder / SINGLE).is_file():
        return dict(read_header(folder / SINGLE).tensors)
    if (folder / RANGES).is_file():
        from llmconv.files.weight_ranges import MOST_BYTES, read_ranges  # noqa: PLC0415 - few folders have such files

        index = parse_object(read_small(own_file(folder, RANGES), MOST_BYTES), RANGES, by_hand=True)
        return dict(read_ranges(folder, index))
    raise refused_model(folder)


def open_shards(folder: Path, index: str = INDEX) -> dict[str, LazyTensor]:
    """The tensors of the shards in the index file of `folder`; raises MalformedInput if the two disagree.

    A `model.safetensors` that the index does not list is another model: transformers reads it, and other programs the
    shards.
    """
    shards = indexed_shards(folder, index, lambda name: name.endswith(".safetensors"))
    if index == INDEX and SINGLE not in shards and (folder / SINGLE).is_file():
        problem = f"`{folder}` contains two models: `{SINGLE}`, and the shards that `{INDEX}` lists without it"
        raise MalformedInput(problem, hint="delete the one that an earlier save left there")
    found = {shard: read_header(folder / shard).tensors for shard in shards}
    everywhere = {name for tensors in found.values() for name in tensors}
    if nowhere := sorted(set().union(*shards.values()) - everywhere):
        problem = f"`{index}` lists {len(nowhere)} tensors that no file has: {listing(nowhere)}"
        raise MalformedInput(
            problem,
            hint="the save left them out (heads for several tokens that were not trained, usually), or the copy is "
            f"damaged: delete `{index}`, and `llmconv to-hf {word(folder)} -o OUT` writes the model with a new one if "
            "nothing is missing",
        )
    require_listed(shards, found, index, lambda shard, name: found[shard][name])
    return {name: tensor for shard, listed in shards.items() for name, tensor in found[shard].items() if name in listed}


def indexed_shards(folder: Path, index: str, is_shard_name: Callable[[str], bool]) -> dict[str, set[str]]:
    """Shard to its tensors by an index's `weight_map`; MalformedInput: none, a missing shard, an invalid name."""
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MalformedInput(f"`{index}` has no `weight_map`", hint="copy the folder again")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not is_shard_name(shard):
            problem = f"`{index}` has the invalid shard name {short(shard, 80)!r}"
            raise MalformedInput(problem, hint="shards are plain file names next to the index")
        shards.setdefault(shard, set()).add(name)
    if missing := [name for name in sorted(shards) if not (folder / name).is_file()]:
        rest = f" and {len(missing) - 1} more of {len(shards)} shards are" if len(missing) > 1 else " is"
        hint = "copy or download the folder again; an interrupted download continues where it stopped"
        problem = f"shard `{missing[0]}`{rest} missing from `{folder}`"
        there = sorted(one.name for one in folder.iterdir() if is_shard_name(one.name) and one.name not in shards)
        # PaddlePaddle's are not read without an index
        others = [name for name in there if re.fullmatch(r".*-of-.*\.(?:safetensors|bin)", name) or name == SINGLE]
        if others and len(missing) == len(shards):
            problem += f": `{index}` is of another copy, and lists none of the weights there, {listing(others)}"
            hint = f"delete `{index}`, and `llmconv to-hf {word(folder)} -o OUT` writes the model with a new one"
        raise MalformedInput(problem, hint=hint)
    return dict(sorted(shards.items()))


HEADS = ("lm_head.weight", "embed_out.weight")  # names of output heads
# the way out for a model without one
NO_HEAD = (
    "if its output head is the embedding, set `tie_word_embeddings` to true in `config.json`; an embedding model has "
    "none: `llmconv export MODEL --task embed -o OUT`"
)


def side_file_names(folder: Path) -> list[str]:
    """The `SIDE_FILES` that `folder` has, and its further chat templates, as `additional_chat_templates/NAME.jinja`."""
    inner = folder / TEMPLATES
    templates = sorted(inner.glob("*.jinja")) if inner.is_dir() and not inner.is_symlink() else []
    if len(templates) > MOST_TEMPLATES:
        problem = f"`{inner}` has {len(templates)} chat templates, more than {MOST_TEMPLATES}"
        raise MalformedInput(problem, hint="copy the folder again from its source")
    names = (*SIDE_FILES, *(f"{TEMPLATES}/{file.name}" for file in templates))
    return [name for name in names if (folder / name).is_file()]


def read_side_files(folder: Path) -> dict[str, bytes]:
    """The side files of `folder`; MalformedInput for a large one or a link out, UnsupportedInput for Git LFS."""
    files = {name: read_small(own_file(folder, name)) for name in side_file_names(folder)}
    for name, content in files.items():
        refuse_git_lfs(content, name)
    return files


def write_small(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes small files by their names in `folder`, some of which are in a folder there (`TEMPLATES`)."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


SENTENCE_MODULES = "modules.json"
MOST_MODULES = 64
SENTENCE_FILES = ("config_sentence_transformers.json", "sentence_bert_config.json")
OF_MODULES = re.compile(r"[\w.-]+\.(?:json|txt|safetensors)|pytorch_model\.bin")


def with_modules(checkpoint: Checkpoint) -> Checkpoint:
    """A folder with the files of sentence-transformers among its side files, see `sentence_files`."""
    found = sentence_files(checkpoint.path)
    return replace(checkpoint, side_files={**checkpoint.side_files, **found}) if found else checkpoint


def sentence_files(folder: Path) -> dict[str, bytes]:
    """The files of sentence-transformers by path, with the weights of the modules after the model; usually none.

    Without them that library takes the mean of all tokens. Source: `modules.json` lists the modules, each with the
    folder of its files. Raises MalformedInput for another list, or a folder elsewhere.
    """
    if not (folder / SENTENCE_MODULES).is_file():
        return {}
    listed = listed_modules(folder)
    names = [SENTENCE_MODULES, *(name for name in SENTENCE_FILES if (folder / name).is_file())]
    for _, home in listed:
        if (folder / home).is_symlink():
            raise MalformedInput(f"`{SENTENCE_MODULES}` names `{home}`, which is a link", hint="copy the folder again")
        inner = sorted((folder / home).iterdir()) if home and (folder / home).is_dir() else []
        names += [f"{home}/{file.name}" for file in inner if OF_MODULES.fullmatch(file.name)]
    files = {name: read_small(own_file(folder, name)) for name in names}
    for name, content in files.items():
        refuse_git_lfs(content, name)
    return files


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module in `modules.json`, in order; the folder of the model is empty."""
    content = parse_object(b'{"modules": ' + read_small(own_file(folder, SENTENCE_MODULES)) + b"}", SENTENCE_MODULES)[
        "modules"
    ]
    if not isinstance(content, list) or len(content) > MOST_MODULES:
        raise MalformedInput(f"`{SENTENCE_MODULES}` is not a list of modules", hint="copy it from the original model")
    found = []
    for entry in content:
        kind, home = (entry.get(name) if isinstance(entry, dict) else None for name in ("type", "path"))
        is_plain = isinstance(home, str) and (not home or re.fullmatch(r"\w[\w.-]*", home))
        if not isinstance(kind, str) or not is_plain:
            raise MalformedInput(f"`{SENTENCE_MODULES}` has a module without a type and a folder", hint="copy it again")
        found.append((kind.rpartition(".")[2], str(home)))
    return found


def own_file(folder: Path, name: str) -> Path:
    """The path of a file to copy; MalformedInput for a link out of the folder, except into the hub's cache."""
    path, home = folder / name, folder.resolve()
    target = path.resolve()
    model = snapshot_home(home)
    in_hub_cache = model is not None and target.is_relative_to(model / "blobs")
    if path.is_symlink() and not target.is_relative_to(home) and not in_hub_cache:
        problem = f"`{name}` in `{folder}` is a link that leads out of the folder, to `{target}`"
        raise MalformedInput(problem, hint="replace it with a copy of the file, if that belongs to the model")
    return path


def read_small(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes; raises MalformedInput for others (a pipe might never end)."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        problem = f"has {found.st_size:,} bytes, too large" if stat.S_ISREG(found.st_mode) else "is not a regular file"
        raise MalformedInput(f"`{path.name}` {problem}", hint="copy it again from its source")
    return path.read_bytes()


def read_json(path: Path, *, by_hand: bool = False) -> dict[str, Any]:
    """A JSON object from a file; with `by_hand`, duplicate keys are an error. Raises MalformedInput."""
    return parse_object(read_small(path, JSON_BYTES), path.name, by_hand=by_hand)


def parse_object(text: bytes, name: str, *, by_hand: bool = False) -> dict[str, Any]:
    """The JSON object in the content `text` of the file `name`; options and errors as `read_json`."""
    try:
        content = json.loads(text.decode(), object_pairs_hook=unique_keys if by_hand else None)
    except StrictJsonError as slip:
        raise MalformedInput(f"in `{name}`: {slip}", hint=slip.hint) from slip
    except (ValueError, RecursionError) as error:
        raise MalformedInput(f"`{name}` is not valid JSON: {error}", hint="repair or replace the file") from error
    if not isinstance(content, dict):
        raise MalformedInput(f"`{name}` is not a JSON object", hint="repair or replace the file")
    require_shallow(content, name)
    if name == "config.json":
        require_bounds(content, name)
    return content


MOST_LABELS, MOST_LAYERS, LARGEST_SIZE = 1_000_000, 1 << 14, 1 << 24
LABELS, LAYERS = re.compile(r"(num|n)_(\w+_)?labels"), re.compile(r"(\w+_)?layers?|num_loops")
# fields of `config.json` in whose proportion transformers makes objects, or tables of numbers that are no weights
SIZES = re.compile(
    r"(\w+_)?(hidden|intermediate|vocab|ffn|embedding|state|conv|kernel|group|block|image|patch)_size|d_model|d_ff|d_kv"
    r"|(\w+_)?(dim|rank|head_dim)|n_embd|n_inner|(\w+_)?(num|n)_(\w+_)?(heads?|experts?)"
)


def json_object(content: bytes) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def require_bounds(config: Any, name: str) -> None:
    """Raises MalformedInput for sizes and numbers of labels or layers in parsed JSON that would take all memory."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if isinstance(value, dict | list):
            require_bounds(value, name)
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        rules = ((LABELS, MOST_LABELS), (LAYERS, MOST_LAYERS), (SIZES, LARGEST_SIZE))
        most = next((most for names, most in rules if names.fullmatch(key)), inf)
        if value > most:
            problem = f"`{name}` has `{key}` {short(value)}, more than any model has ({most:,})"
            raise MalformedInput(problem, hint="correct it, or copy the model's own `config.json` into the folder")


def require_shallow(content: Any, name: str) -> None:
    """Raises MalformedInput for JSON or YAML nested deeper than `DEPTH_LIMIT`, too deep for recursive functions."""
    level = [content]
    for _ in range(DEPTH_LIMIT):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise MalformedInput(f"`{name}` is nested deeper than {DEPTH_LIMIT} levels", hint="repair or replace the file")


SHOWN = 40  # maximum characters of a key or number in a message


class StrictJsonError(ValueError):
    """JSON that Python accepts, but not with the meaning that its author intended; `hint` is the way out."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


def parse_strictly(text: str | bytes) -> Any:
    """The value of a JSON text; StrictJsonError for a duplicate key or infinite number, ValueError, RecursionError."""
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)


def first_strict_error(text: str) -> tuple[int, StrictJsonError] | None:
    """The first strict error in a JSON value (usually an array) that Python accepts; None if there is none.

    It follows the line, counted from 1, in which the item with the error begins.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)
    text = text.rstrip()
    begin = len(text) - len(text.lstrip())
    is_array = text.startswith("[", begin)
    position = begin + is_array
    while True:
        while position < len(text) and text[position] in (" \t\n\r," if is_array else " \t\n\r"):
            position += 1
        if position == len(text) or (is_array and text[position] == "]"):
            return None
        try:
            position = decoder.raw_decode(text, position)[1]
        except StrictJsonError as error:
            return text.count("\n", 0, position) + 1, error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of these fields, as `object_pairs_hook` of Python's parser; raises StrictJsonError for a duplicate key."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise StrictJsonError(f"duplicate key `{duplicate[:SHOWN]}`", "remove one of the two")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    if not isfinite(value):
        _refuse(number)
    return value


def _refuse(number: str) -> NoReturn:
    raise StrictJsonError(f"the number `{number[:SHOWN]}` is not finite", "write a float64 number, or a string")


# eight blocks of the writer: wide enough that the pieces of rows are long reads, small enough to be held
PANEL_BYTES = 32 << 20
TILE_ROWS = 256
# tiles, and rows that are not a power of two apart, keep columns out of each other's cache lines: 8 times as fast
PADDING_BYTES = 64


def transposed(tensor: LazyTensor) -> LazyTensor:
    """The transpose of a matrix, else ValueError; a second read within one panel comes from memory."""
    if len(tensor.shape) != 2:
        raise ValueError(f"only matrices are transposed, not shape {tensor.shape}")
    return LazyTensor(tensor.dtype, tensor.shape[::-1], _Panels(tensor).rows)


@dataclass(frozen=True, eq=False)
class _Panels:
    """The columns of `tensor`, by panels of equal width."""

    tensor: LazyTensor
    lock: Lock = field(default_factory=Lock)

    @property
    def width(self) -> int:
        """Columns in a panel."""
        return max(1, PANEL_BYTES // max(1, self.tensor.shape[0] * self.tensor.dtype.itemsize))

    def rows(self, start: int, stop: int) -> Array:
        """Columns `start:stop` as rows, C-contiguous."""
        parts = [self._part(number, start, stop) for number in range(start // self.width, -(-stop // self.width))]
        if not parts:
            return np.empty((0, self.tensor.shape[0]), self.tensor.dtype.numpy)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part(self, number: int, start: int, stop: int) -> Array:
        with self.lock:  # threads ask for neighboring blocks: one reads the panel, the others wait for it
            panel = _panel(self, number)
        first = number * self.width
        # the transpose of `block`, written in tiles
        block = panel[:, max(start - first, 0) : stop - first]
        turned = np.empty(block.shape[::-1], block.dtype)
        for row in range(0, block.shape[0], TILE_ROWS):
            turned[:, row : row + TILE_ROWS] = block[row : row + TILE_ROWS].T
        return turned


@lru_cache(maxsize=2)
def _panel(panels: _Panels, number: int) -> Array:
    """One panel; the last two of all tensors are kept."""
    first = number * panels.width
    return _columns(panels.tensor, first, min(first + panels.width, panels.tensor.shape[1]))


def _columns(tensor: LazyTensor, first: int, last: int) -> Array:
    """Columns `first:last`, each row followed by some unused bytes."""
    size = tensor.dtype.itemsize
    panel = np.empty((tensor.shape[0], last - first + PADDING_BYTES // size), tensor.dtype.numpy)[:, : last - first]
    if isinstance(tensor, FileTensor) and last - first < tensor.shape[1]:
        # fills `panel` with columns of a matrix in a file, one read per row
        raw = panel.view(np.uint8)
        if tensor.record:
            tensor.record.was_touched()
        with open_data(tensor.path) as file:
            for row in range(tensor.shape[0]):
                place = tensor.offset + (row * tensor.shape[1] + first) * size
                fill(file, raw[row].data, place, tensor.path)
    else:
        for start, stop in tensor.blocks(BLOCK_BYTES):
            panel[start:stop] = tensor.rows(start, stop)[:, first:last]
    return panel


MODULES = ("c_attn", "c_proj", "c_fc", "q_attn")
TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


def is_conv1d(config: Mapping[str, Any], weight: str) -> bool:
    """Whether the weight of this name, such as `h.0.attn.c_attn.weight`, is that of a `Conv1D`."""
    return config.get("model_type") in TYPES and weight.split(".")[-2:-1] in [[module] for module in MODULES]
