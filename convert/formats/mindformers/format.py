"""MindFormers (MindSpore): `.ckpt` or MindSpore-flavored safetensors, one file or the rank folders of a run.

Names and layouts: mindformers 1.0 to 1.7, `models/*/convert_reversed.py`; the run's YAML gives the configuration. The
axes of ranks are those of the `shard` methods in `models/*`; `vocab_emb_dp`: all have the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import yaml

from llmconv.checkpoint import Checkpoint
from llmconv.convert.algebra import concat, first_missing, fitting, split
from llmconv.convert.assembly import side_files_of
from llmconv.convert.formats import Format
from llmconv.convert.formats.mindformers import families, mindspore
from llmconv.convert.formats.mindformers.config import (
    BLOOM,
    CHATGLM_6B,
    CORE,
    GLM,
    GPT2,
    LLAMA,
    OPTIONS,
    QWEN,
    MindFormersFamily,
    RunConfig,
    merge_lora,
    read_run_config,
)
from llmconv.convert.models.completeness import check_complete
from llmconv.convert.models.config_file import with_architecture
from llmconv.convert.models.head_and_dtype import settle_head
from llmconv.convert.models.model_config import refuse_other_settings, refuse_shards, settings_of, tied
from llmconv.convert.state_dicts.files import joined, without_duplicates
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.files.safetensors_file import read_header
from llmconv.model_code import AUTO_MAP
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import LazyTensor, lists_by_key

RANK = re.compile(r"rank_(\d+)")
SUFFIXES = (".ckpt", ".safetensors")

# Tensor names of MindFormers that Hugging Face models do not have, for files without the metadata `ms`
MINDFORMERS_NAMES = re.compile(
    r"\.embedding_(?:weight|table)$|\.norm_out\.weight$|(?:layernorm\d?|ln_f|norm)\.gamma$|\.attention_norm\.weight$"
)
NOT_THE_MODEL = re.compile(  # optimizer states, counters and caches that training and serving save among the weights
    r"^[^.]+$"  # epoch_num, step_num, loss_scale, global_step, beta1_power, …
    r"|^(?:adam_[a-z]+|accu_grads|moments?|momentum|velocity|pma_weight|ema_weight|clone_param32)\."
    r"|__param_key__"
    r"|(?:^|\.)(?:key|value)_(?:past|cache)(?:\.|$)"
)


def is_mindspore(path: Path) -> bool:
    """Whether `path` is a MindSpore file, or a folder of them (rank folders included)."""
    if path.is_file():
        return _is_file(path)
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    return bool(_rank_files(path)) or any(_is_file(entry) for entry in _candidates(path))


def _is_file(path: Path) -> bool:
    if path.suffix != ".safetensors":
        return mindspore.is_mindspore_ckpt(path)
    try:
        header = read_header(path)
    except (LlmconvError, OSError):
        return False
    return header.metadata.get("format") == "ms" or any(MINDFORMERS_NAMES.search(name) for name in header.tensors)


def _candidates(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix in SUFFIXES and entry.is_file())


def _rank_files(folder: Path) -> dict[int, Path]:
    """Rank to its checkpoint, the last in name order as in MindFormers."""
    files: dict[int, Path] = {}
    for entry in folder.iterdir():
        match = RANK.fullmatch(entry.name)
        if match and entry.is_dir() and (found := [file for file in _candidates(entry) if _is_file(file)]):
            files[int(match[1])] = found[-1]
    return dict(sorted(files.items()))


def open_parameters(path: Path, strategy: Path | None = None) -> mindspore.Parameters:
    """Opens a path that `is_mindspore`, by headers; `strategy` is the run's, None: in or next to the folder.

    Raises UsageProblem for a superfluous `strategy`, UnsupportedInput for encrypted or quantized files, or ranks
    without one, MalformedInput for missing or damaged files.
    """
    ranks = _rank_files(path) if path.is_dir() else {}
    if strategy and len(ranks) < 2:
        raise UsageProblem(f"`{path.name}` is not divided into ranks", hint="leave out `--strategy`")
    found = _open_ranks(path, ranks, strategy) if ranks else _open_files(path)
    model = {name: tensor for name, tensor in found.tensors.items() if not NOT_THE_MODEL.search(name)}
    others = len(found.tensors) - len(model)
    dropped = (f"{others} tensors of the optimizer and the run",) if others else ()
    left_out = tuple(f"left out {what}" for what in dropped)
    return mindspore.Parameters(model, (*found.warnings, *left_out), found.files, dropped, found.strategy)


def peek(path: Path) -> dict[str, LazyTensor]:
    """The tensors in MindFormers' names (of every rank if not joinable); InputRefused if headers are unreadable."""
    try:
        return open_parameters(path).tensors
    except InputRefused:
        ranks = _rank_files(path).items() if path.is_dir() else ()
        files = {f"rank_{rank}": file for rank, file in ranks}
        files = files or {file.name: file for file in ([path] if path.is_file() else _candidates(path))}
        return joined({name: _open_file(file).tensors for name, file in files.items()})


def _open_files(path: Path) -> mindspore.Parameters:
    files = [path] if path.is_file() else [entry for entry in _candidates(path) if _is_file(entry)]
    if len(files) > 1 and any(file.suffix == ".ckpt" for file in files):
        raise InputRefused(
            f"`{path}` holds {len(files)} checkpoints: {listing([file.name for file in files])}",
            hint=f"give one of them, such as `{files[-1]}`",
        )
    # the tensors of several files of one model (the output of `unified_safetensors`)
    parts = [_open_file(file) for file in files]
    tensors = without_duplicates(path.name, [part.tensors for part in parts])
    return mindspore.Parameters(tensors, tuple(warning for part in parts for warning in part.warnings), len(parts))


def _open_file(path: Path) -> mindspore.Parameters:
    if path.suffix != ".safetensors":
        return mindspore.read_ckpt(path)
    header = read_header(path)
    if packed := [name for name in header.tensors if header.metadata.get(name) == "Int4"]:
        raise UnsupportedInput(
            f"`{path.name}` holds {len(packed)} tensors of packed int4 values: {listing(packed)}",
            hint="only plain float, integer and bool tensors can be converted; dequantize it first",
        )
    return mindspore.Parameters(dict(header.tensors))


def _open_ranks(folder: Path, files: Mapping[int, Path], given: Path | None) -> mindspore.Parameters:
    if (missing := first_missing(files, max(files) + 1)) is not None:
        raise MalformedInput(
            f"`{folder.name}` has {len(files)} ranks, but `rank_{missing}` is missing",
            hint="copy the missing folder; all ranks are needed",
        )
    opened = {rank: _open_file(file) for rank, file in files.items()}
    warnings = tuple(dict.fromkeys(warning for part in opened.values() for warning in part.warnings))
    if len(opened) == 1:
        return opened[0]
    if (strategy := mindspore.find_strategy(folder, given)) is None:
        raise UnsupportedInput(
            f"`{folder.name}` holds {len(opened)} ranks, but no strategy file describes how they are divided",
            hint="name the run's `strategy` folder (`ckpt_strategy_rank_*.ckpt`) with `--strategy`",
        )
    shards = {
        rank: {name: tensor for name, tensor in part.tensors.items() if not NOT_THE_MODEL.search(name)}
        for rank, part in opened.items()
    }
    return mindspore.Parameters(merge_ranks(folder, shards, strategy), warnings, len(opened), strategy=strategy.path)


def merge_ranks(
    folder: Path, shards: Mapping[int, Mapping[str, LazyTensor]], strategy: mindspore.Strategy
) -> dict[str, LazyTensor]:
    """Joins the tensors of all ranks (rank to tensors by name); of equal copies, the one of the lowest rank is read.

    Raises UnsupportedInput for an uneven division, MalformedInput for a missing layout or rank, or contradictions.
    """
    holders = lists_by_key((name, rank) for rank in sorted(shards) for name in shards[rank])
    if unknown := [name for name in holders if name not in strategy.layouts]:
        raise MalformedInput(
            f"the strategy `{strategy.path}` contains no layout for {len(unknown)} tensors of `{folder.name}`: "
            + listing(unknown),
            hint="give the strategy files of all stages of this run",
        )
    return {
        name: _merge(folder, name, {rank: shards[rank][name] for rank in ranks}, strategy, len(shards))
        for name, ranks in holders.items()
    }


def _merge(
    folder: Path, name: str, parts: Mapping[int, LazyTensor], strategy: mindspore.Strategy, ranks: int
) -> LazyTensor:
    """Joins one tensor from the ranks that hold it, maybe not all (`remove_redundancy` keeps one copy of each part)."""
    layout = strategy.layouts[name]
    if layout.uneven:
        raise _unsupported(folder, name, "unevenly or in nested parts")
    if ranks % layout.ranks:
        raise MalformedInput(
            f"`{folder.name}` has {ranks} ranks, but the strategy `{strategy.path}` divides `{name}` "
            f"among {layout.ranks}",
            hint="a rank folder is missing, or the strategy belongs to another run",
        )
    pieces = {layout.coordinates_of(rank % layout.ranks): parts[rank] for rank in sorted(parts, reverse=True)}
    if any(len(layout.axes) > len(part.shape) for part in pieces.values()) or len(pieces) != prod(layout.grid()):
        raise MalformedInput(
            f"`{folder.name}` holds {len(pieces)} of {prod(layout.grid())} parts of `{name}`, or it has other axes",
            hint=f"a rank folder is incomplete, or the strategy `{strategy.path}` belongs to another run",
        )
    grid = layout.grid()
    if any(count > 1 for count in grid[2:]):
        raise _unsupported(folder, name, f"along {len(grid)} axes")
    rows, columns = (*grid[:2], 1, 1)[:2] if grid else (1, 1)
    rest = (0,) * max(0, len(grid) - 2)
    hint = f"ranks of different runs are mixed, or the strategy `{strategy.path}` belongs to another run"
    with fitting(f"the parts of `{name}` in `{folder.name}` cannot be joined", hint):
        lines = [
            concat([pieces[(row, column, *rest)[: len(grid)]] for column in range(columns)], 1) for row in range(rows)
        ]
        return concat(lines, 0)


def _unsupported(folder: Path, name: str, how: str) -> UnsupportedInput:
    return UnsupportedInput(
        f"`{name}` of `{folder.name}` is divided {how}, which is unsupported",
        hint="merge it first with MindSpore's `transform_checkpoints(src, dst, prefix, src_strategy, None)`",
    )


MODEL, RUN = "model.ckpt", "run.yaml"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a MindFormers checkpoint; see `Format.save`."""
    known = {kind: store for family in FAMILIES for kind, store in family.store.items()}
    checkpoint = tied(checkpoint, known)
    settings, source = settings_of(checkpoint, known), checkpoint.path.name
    with fitting(f"the tensors of `{source}` contradict its `config.json`", "copy the folder again"):
        stored = known[settings["model_type"]](settings, dict(checkpoint.tensors), source)
    # the run's YAML: the configuration from which MindFormers builds the model, with its dtypes
    dtype = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    tokens = {name: checkpoint.config[name] for name in TOKENS if checkpoint.config.get(name) is not None}
    types = {"param_init_type": dtype, "compute_dtype": dtype, "use_past": False, "checkpoint_name_or_path": ""}
    config = RunConfig({**stored.fields, **tokens, **types}, source, arch=stored.arch)
    run = {"model": {"arch": {"type": stored.arch}, "model_config": dict(config.values)}}
    model_back = family_of(stored.tensors, source).build(config, dict(stored.tensors))
    config_back = settle_head(dict(model_back.tensors), model_back.config, [])
    warnings: tuple[str, ...] = ()
    if config_back["tie_word_embeddings"] and not settings["tie_word_embeddings"]:
        checkpoint = replace(checkpoint, config={**checkpoint.config, "tie_word_embeddings": True})
        warnings = (f"the output head of `{source}` equals its embedding; `to-hf` will tie them",)
    refuse_other_settings(checkpoint, config_back, "MindFormers")
    small = {**checkpoint.side_files, RUN: yaml.safe_dump(run, sort_keys=False).encode()}
    if shards == 1:
        return Plan(checkpoint, (Shard(MODEL, stored.tensors, mindspore.ckpt_pieces),), small, warnings)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    refuse_shards(source, shards, {name: settings[name] for name in names if name in settings})
    ranks, layouts = split_among_ranks(stored.tensors, shards, source)
    files = [Shard(f"rank_{n}/checkpoint_{n}.ckpt", rank, mindspore.ckpt_pieces) for n, rank in enumerate(ranks)]
    strategy = mindspore.strategy_bytes(layouts)
    strategies = {f"strategy/ckpt_strategy_rank_{rank}.ckpt": strategy for rank in range(shards)}
    return Plan(checkpoint, tuple(files), {**small, **strategies}, warnings)


SPLIT_AXES = (  # name patterns, with the axis along which ranks divide the tensors; of all others every rank has a copy
    (re.compile(r"\.attention\.w[qkv]\.(?:weight|bias)$|\.feed_forward\.w[13]\.weight$|^lm_head\.weight$"), 0),
    (re.compile(r"\.attention\.wo\.weight$|\.feed_forward\.w2\.weight$"), 1),
    (re.compile(r"\.attention\.dense[123]\.(?:weight|bias)$|\.(?:attention|output)\.projection\.weight$"), 0),
    (re.compile(r"\.output\.mapping\.weight$"), 1),
    (re.compile(r"\.output\.mapping\.bias$"), 0),
    (re.compile(r"\.query_key_value\.(?:weight|bias)$|\.dense_h_to_4h\.weight$|\.output_layer\.weight$"), 0),
    (re.compile(r"\.self_attention\.dense\.weight$|\.dense_4h_to_h\.weight$"), 1),
    (re.compile(r"\.linear_(?:qkv|fc1)\.weight$|^output_layer\.weight$"), 0),
    (re.compile(r"\.linear_(?:proj|fc2)\.weight$"), 1),
)


def split_among_ranks(
    tensors: Mapping[str, LazyTensor], count: int, source: str
) -> tuple[list[dict[str, LazyTensor]], dict[str, mindspore.ParallelLayout]]:
    """Each rank's tensors and their layouts, the reverse of `merge_ranks`; UsageProblem if not divisible."""
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    layouts: dict[str, mindspore.ParallelLayout] = {}
    indivisible = []
    for name, tensor in tensors.items():
        axis = next((axis for sign, axis in SPLIT_AXES if sign.search(name)), mindspore.WHOLE)
        if axis != mindspore.WHOLE and tensor.shape[axis] % count:
            indivisible.append(f"{name} {list(tensor.shape)}")
            continue
        layouts[name] = mindspore.ParallelLayout(
            (count,), tuple((0,) if place == axis else () for place in range(len(tensor.shape)))
        )
        parts = [tensor] * count if axis == mindspore.WHOLE else split(tensor, axis, count)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    if indivisible:
        raise UsageProblem(
            f"{len(indivisible)} tensors of `{source}` cannot be divided among {count} shards: {listing(indivisible)}",
            hint="choose another number for `--shards`",
        )
    return ranks, layouts


FAMILIES = (
    MindFormersFamily(
        re.compile(r"^transformer\.layers\.\d+\.attention\.query_key_value\."), CHATGLM_6B, families.build_chatglm_6b
    ),
    MindFormersFamily(
        re.compile(r"^model\.(?:layers\.\d+|tok_embeddings)\."),
        LLAMA,
        families.build_llama,
        {"llama": families.store_llama, "qwen2": families.store_llama},
    ),
    MindFormersFamily(re.compile(r"^transformer\.(?:layers\.\d+|wte)\."), QWEN, families.build_qwen),
    MindFormersFamily(re.compile(r"^decoder\.layers\."), CORE, families.build_core, {"qwen3": families.store_core}),
    MindFormersFamily(re.compile(r"^backbone\."), GPT2, families.build_gpt2, {"gpt2": families.store_gpt2}),
    MindFormersFamily(
        re.compile(r"^(?:transformer\.)?blocks\.\d+\."), BLOOM, families.build_bloom, {"bloom": families.store_bloom}
    ),
    MindFormersFamily(re.compile(r"^transformer\.encoder\."), GLM, families.build_glm, {"glm": families.store_glm}),
)


def family_of(tensors: Mapping[str, LazyTensor], source: str) -> MindFormersFamily:
    """The family whose `sign` matches a tensor name; UnsupportedInput if none does."""
    for family in FAMILIES:
        if any(family.sign.search(name) for name in tensors):
            return family
    raise UnsupportedInput(
        f"`{source}` is a MindSpore checkpoint of an unknown model: it holds {listing(sorted(tensors)) or 'nothing'}",
        hint="supported are llama, qwen, internlm, baichuan, gpt2, bloom and chatglm2/3 in MindFormers' names",
    )


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    strategy = config.get("strategy")
    found = open_parameters(path, strategy if isinstance(strategy, Path) else None)
    family = family_of(found.tensors, path.name)
    run = read_run_config(path, {name: value for name, value in config.items() if name != "strategy"})
    try:
        tensors, merged = merge_lora(run, found.tensors)
        model = family.build(run, tensors)
        if found.strategy and AUTO_MAP not in model.config:
            check_complete(model.tensors, model.config, path.name)
    except MalformedInput as error:
        if found.strategy is None:
            raise
        raise MalformedInput(
            f"joined by the strategy `{found.strategy}`: {error}",
            hint="the strategy, or the configuration, belongs to another run",
        ) from error
    warnings = [*found.warnings, *merged, *model.warnings]
    if run.file_name:
        warnings.append(f"the configuration is that of `{run.file_name}`, which lies next to the checkpoint")
    side_files = side_files_of(path, tokenizer)  # those next to the checkpoint are where `save` puts them
    if not tokenizer and any(name in TOKENIZERS for name in side_files):
        warnings.append(f"the tokenizer is that of {listing(sorted(side_files))}, which lies next to the checkpoint")
    elif not tokenizer:
        warnings.append("a MindSpore checkpoint contains no tokenizer; give one with `--tokenizer` if you need it")
    release = run.values.get("mindformers_version")
    settings = model.config if AUTO_MAP in model.config else with_architecture(model.config)
    version = f"mindformers {release}" if isinstance(release, str) else ""
    rest = (tuple(warnings), version, found.files, found.dropped)
    outside = [path.parent / run.file_name] if run.file_name and path.is_file() else []
    outside += mindspore.strategy_files(found.strategy) if found.strategy else []
    more: dict[str, Any] = {"source_type": run.arch, "settings": tuple(outside)}
    return Checkpoint(path, FORMAT.name, model.tensors, settings, side_files, *rest, **more)


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")

FORMAT = Format(
    name="mindformers",
    title="MindFormers 1.0 to 1.7 on MindSpore: `.ckpt`, its safetensors, or a folder of `rank_N`",
    covers="llama, qwen, internlm, baichuan, gpt2, bloom, chatglm2/3; with their own code (`--code`) Baichuan 1 and 2 "
    "13B and ChatGLM-6B; ranks joined by their strategy (`--strategy` if it lies elsewhere), LoRA merged; the run's "
    "YAML gives the configuration",
    detect=is_mindspore,
    open=_open,
    options=OPTIONS,
    peek=peek,
    save=save,
)
