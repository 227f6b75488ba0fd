"""A model in Hugging Face names as MindFormers' files: a `.ckpt`, or rank folders and strategy, and the run's YAML."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from llmconv.checkpoint import Checkpoint
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.formats.mindformers.converted_model import MindFormersModel
from llmconv.convert.formats.mindformers.families import FAMILIES, family_of
from llmconv.convert.formats.mindformers.mindspore.ckpt_writer import ckpt_pieces, strategy_bytes
from llmconv.convert.formats.mindformers.split_ranks import split_among_ranks
from llmconv.convert.models.model_config import ModelSettings, settings_of, tied
from llmconv.convert.models.tied_head import settle_head
from llmconv.convert.models.unsupported_settings import refuse_other_settings, refuse_shards
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.output.plan import Plan, Shard

MODEL, RUN = "model.ckpt", "run.yaml"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save(checkpoint: Checkpoint, shards: int) -> Plan:
    """The files of a MindFormers checkpoint; the format's `open` returns the same tensors, bit for bit.

    Raises:
        UnsupportedInput: MindFormers has no such model.
        MalformedInput: config and tensors contradict each other.
        UsageProblem: the model does not divide among this number of ranks.
    """
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
