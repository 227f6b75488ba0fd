"""A model in Hugging Face names as MindFormers' files: a `.ckpt`, or rank folders and strategy, and the run's YAML.

The axes of ranks are those of the `shard` methods in mindformers `models/*`; `vocab_emb_dp`: all have the embedding.

MindFormers (MindSpore): `.ckpt` or MindSpore-flavored safetensors, one file or the rank folders of a run.

Names and layouts: mindformers 1.0 to 1.7, `models/*/convert_reversed.py`; the run's YAML gives the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from llmconv.checkpoint import Checkpoint, read_side_files
from llmconv.convert.algebra.operations import split
from llmconv.convert.formats import Format
from llmconv.convert.formats.mindformers.config import (
    OPTIONS,
    MindFormersFamily,
    MindFormersModel,
    RunConfig,
    merge_lora,
    read_run_config,
)
from llmconv.convert.formats.mindformers.glm import build_chatglm_6b, build_glm, store_glm
from llmconv.convert.formats.mindformers.gpt import build_bloom, build_gpt2, store_bloom, store_gpt2
from llmconv.convert.formats.mindformers.llama import build_core, build_llama, build_qwen, store_core, store_llama
from llmconv.convert.formats.mindformers.mindspore import WHOLE, ParallelLayout, ckpt_pieces, strategy_bytes
from llmconv.convert.formats.mindformers.read import is_mindspore, open_parameters, peek
from llmconv.convert.models.config_file import with_architecture
from llmconv.convert.models.model_config import ModelSettings, refuse_other_settings, refuse_shards, settings_of, tied
from llmconv.convert.models.tied_head import settle_head
from llmconv.convert.tokenizers import read_tokenizer
from llmconv.errors import MalformedInput, UnsupportedInput, UsageProblem, listing
from llmconv.model_code import AUTO_MAP
from llmconv.output.plan import Plan, Shard
from llmconv.tensors import LazyTensor

MODEL, RUN = "model.ckpt", "run.yaml"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a MindFormers checkpoint; see `Format.save`."""
    checkpoint = tied(checkpoint)
    settings, source = settings_of(checkpoint), checkpoint.path.name
    stored = _stored(checkpoint, settings)
    run = _run(checkpoint, stored)
    model = run["model"]
    config = RunConfig(source, model["model_config"], stored.arch, {})
    model_back = family_of(stored.tensors, source).build(config, dict(stored.tensors))
    config_back = settle_head(dict(model_back.tensors), model_back.config, [])
    warnings: tuple[str, ...] = ()
    if config_back["tie_word_embeddings"] and not settings["tie_word_embeddings"]:
        checkpoint = replace(checkpoint, config={**checkpoint.config, "tie_word_embeddings": True})
        warnings = (f"the output head of `{source}` equals its embedding; `to-hf` will tie them",)
    refuse_other_settings(checkpoint, config_back, "MindFormers")
    small = {**checkpoint.side_files, RUN: yaml.safe_dump(run, sort_keys=False).encode()}
    if shards == 1:
        return Plan(checkpoint, (Shard(MODEL, stored.tensors, ckpt_pieces),), small, warnings)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    refuse_shards(source, shards, {name: settings[name] for name in names if name in settings})
    ranks = split_among_ranks(stored.tensors, shards, source)
    files = [Shard(f"rank_{n}/checkpoint_{n}.ckpt", rank, ckpt_pieces) for n, rank in enumerate(ranks.tensors)]
    strategy = strategy_bytes(ranks.layouts)
    strategies = {f"strategy/ckpt_strategy_rank_{rank}.ckpt": strategy for rank in range(shards)}
    return Plan(checkpoint, tuple(files), {**small, **strategies}, warnings)


def _stored(checkpoint: Checkpoint, settings: ModelSettings) -> MindFormersModel:
    known = {kind: store for family in FAMILIES for kind, store in family.store.items()}
    source, kind = checkpoint.path.name, settings["model_type"]
    if kind not in known:
        raise UnsupportedInput(
            f"`{source}` is a `{kind}`, which cannot be written in MindFormers' format",
            hint=f"models of these types can be written: {', '.join(known)}",
        )
    try:
        return known[kind](settings, dict(checkpoint.tensors), source)
    except ValueError as error:
        raise MalformedInput(
            f"the tensors of `{source}` contradict its `config.json`: {error}", hint="copy the folder again"
        ) from error


def _run(checkpoint: Checkpoint, stored: MindFormersModel) -> dict[str, Any]:
    """The run's YAML: the configuration from which MindFormers builds the model, with its dtypes."""
    dtype = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    types = {"param_init_type": dtype, "compute_dtype": dtype}
    tokens = {name: checkpoint.config[name] for name in TOKENS if checkpoint.config.get(name) is not None}
    model_config = {**stored.fields, **tokens, **types, "use_past": False, "checkpoint_name_or_path": ""}
    return {"model": {"arch": {"type": stored.arch}, "model_config": model_config}}


SPLIT_AXES = (
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
"""Name patterns, with the axis along which ranks divide the tensors; of all others every rank has a copy."""


@dataclass(frozen=True)
class SplitModel:
    """The tensors of each rank, and the layout of every tensor."""

    tensors: list[dict[str, LazyTensor]]
    layouts: dict[str, ParallelLayout]


def split_among_ranks(tensors: Mapping[str, LazyTensor], count: int, source: str) -> SplitModel:
    """Splits the tensors, in MindFormers' names; the reverse of `read.merge_ranks`. UsageProblem if not divisible."""
    ranks: list[dict[str, LazyTensor]] = [{} for _ in range(count)]
    layouts: dict[str, ParallelLayout] = {}
    indivisible = []
    for name, tensor in tensors.items():
        axis = next((axis for sign, axis in SPLIT_AXES if sign.search(name)), WHOLE)
        if axis != WHOLE and tensor.shape[axis] % count:
            indivisible.append(f"{name} {list(tensor.shape)}")
            continue
        layouts[name] = ParallelLayout(
            (count,), tuple((0,) if place == axis else () for place in range(len(tensor.shape)))
        )
        parts = [tensor] * count if axis == WHOLE else split(tensor, axis, count)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part
    if indivisible:
        raise UsageProblem(
            f"{len(indivisible)} tensors of `{source}` cannot be divided among {count} shards: {listing(indivisible)}",
            hint="choose another number for `--shards`",
        )
    return SplitModel(ranks, layouts)


FAMILIES = (
    MindFormersFamily(
        re.compile(r"model\.(?:layers\.\d+\.attention|tok_embeddings)\."),
        build_llama,
        {"llama": store_llama, "qwen2": store_llama},
    ),
    MindFormersFamily(re.compile(r"transformer\.(?:layers\.\d+\.attention\.w[qkvo_]|wte\.)"), build_qwen),
    MindFormersFamily(re.compile(r"^decoder\.layers\."), build_core, {"qwen3": store_core}),
    MindFormersFamily(re.compile(r"^backbone\."), build_gpt2, {"gpt2": store_gpt2}),
    MindFormersFamily(
        re.compile(r"^(?:transformer\.)?blocks\.\d+\.attention\.dense1\."), build_bloom, {"bloom": store_bloom}
    ),
    MindFormersFamily(re.compile(r"^transformer\.encoder\."), build_glm, {"glm": store_glm}),
    MindFormersFamily(re.compile(r"^transformer\.layers\.\d+\.attention\.query_key_value\."), build_chatglm_6b),
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
    with _blaming(found.strategy):
        tensors, merged = merge_lora(run, found.tensors)
        model = family.build(run, tensors)
    warnings = [*found.warnings, *merged, *model.warnings]
    if run.file_name:
        warnings.append(f"the configuration is that of `{run.file_name}`, which lies next to the checkpoint")
    side_files, more = _side_files(path, tokenizer)
    warnings += more
    release = run.fields.get("mindformers_version")
    return Checkpoint(
        path,
        FORMAT.name,
        model.tensors,
        model.config if AUTO_MAP in model.config else with_architecture(model.config),
        side_files,
        tuple(warnings),
        version=f"mindformers {release}" if isinstance(release, str) else "",
        shards=found.files,
        dropped=found.dropped,
        source_type=run.arch,
    )


@contextmanager
def _blaming(strategy: Path | None) -> Iterator[None]:
    """Names the strategy where joined tensors have other shapes than the configuration says."""
    try:
        yield
    except MalformedInput as error:
        if strategy is None:
            raise
        raise MalformedInput(
            f"joined by the strategy `{strategy}`: {error}",
            hint="the strategy, or the configuration, belongs to another run",
        ) from error


def _side_files(path: Path, tokenizer: Path | None) -> tuple[dict[str, bytes], list[str]]:
    """Tokenizer and generation files: the given ones, else those next to the checkpoint, where `save` puts them."""
    folder = path if path.is_dir() else path.parent
    found = read_side_files(folder)
    if tokenizer:
        kept = {name: content for name, content in found.items() if name == GENERATION_CONFIG}
        return {**kept, **read_tokenizer(tokenizer)}, []
    if any(name in TOKENIZERS for name in found):
        return found, [f"the tokenizer is that of {listing(sorted(found))}, which lies next to the checkpoint"]
    return found, ["a MindSpore checkpoint contains no tokenizer; give one with `--tokenizer` if you need it"]


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
GENERATION_CONFIG = "generation_config.json"

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
