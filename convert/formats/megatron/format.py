"""Megatron-LM, Megatron Core and NeMo: files of ranks in any grid, and distributed checkpoints (`torch_dist`).

Layout: `save_folder`; the run's arguments give `config.json`, the sizes of the grid, and the order of fused rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_side_files
from llmconv.convert.formats import Format
from llmconv.convert.formats.megatron.arguments import Arguments, check_arguments
from llmconv.convert.formats.megatron.config import (
    head_dim,
    ignored_factor,
    is_tied,
    query_groups,
    rotary_percent,
    to_config,
)
from llmconv.convert.formats.megatron.convert_tensors import Layout, norm_dtypes, to_hugging_face
from llmconv.convert.formats.megatron.distributed import open_distributed, read_common
from llmconv.convert.formats.megatron.families import family_of
from llmconv.convert.formats.megatron.join_ranks import join_ranks
from llmconv.convert.formats.megatron.known_config import arguments_of, merged
from llmconv.convert.formats.megatron.names import EMBEDDING
from llmconv.convert.formats.megatron.nemo import read_nemo
from llmconv.convert.formats.megatron.rank_files import Rank, open_ranks
from llmconv.convert.formats.megatron.run_state import RunState
from llmconv.convert.formats.megatron.save_folder import NEMO2_CONTEXT, VERSION_KEY, Save, find_save, is_save
from llmconv.convert.formats.megatron.vocabulary import true_vocabulary
from llmconv.convert.models.completeness import as_loaded
from llmconv.convert.models.config_file import causal_lm_config
from llmconv.convert.state_dicts.recognition import Sign
from llmconv.convert.tokenizers.ids import special_ids
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import MalformedInput
from llmconv.tensors import LazyTensor

ZERO_CENTERED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
"""Names of the argument in Megatron core and in Megatron-LM."""

NEMO_TOKENIZER = "nemo_tokenizer"


@dataclass(frozen=True)
class _Run:
    """A save that is found: its files, and its arguments as far as it contains them."""

    source: str
    save: Save
    ranks: list[Rank]
    stored: Mapping[str, Any]

    def state(self, arguments: Arguments) -> RunState:
        """The whole tensors."""
        if self.save.distributed:
            return open_distributed(self.save.distributed, self.source)
        return join_ranks(self.ranks, arguments)


def _find(path: Path) -> _Run:
    save = find_save(path)
    ranks = [] if save.distributed else open_ranks(save)
    stored = read_nemo(save.path)
    if not stored:
        stored = read_common(save.distributed)[0] if save.distributed else dict(ranks[0].arguments)
    return _Run(path.name, save, ranks, stored)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    run = _find(path)
    has_own = run.stored.get("num_layers") is not None
    arguments = Arguments(run.source, run.stored) if has_own else arguments_of(config, run.source)
    given = {} if arguments.values is config else config
    old = run.save.nemo is None and any(rank.old for rank in run.ranks)
    warnings = check_arguments(arguments, described="model_type" in given, old=old)
    warnings += ignored_factor(arguments)
    family = family_of(arguments, given.get("model_type"))
    computed = to_config(arguments, family)
    state = run.state(arguments)
    side_files = _side_files(run.save, tokenizer)
    if not side_files:
        warnings.append("a Megatron checkpoint contains no tokenizer; give one with `--tokenizer` if you need it")
    padded = _padded_rows(state, run.source)
    vocabulary = true_vocabulary(arguments, padded, config, side_files, warnings)
    layout = _layout(arguments, family.model_type, vocabulary)
    bos, eos = special_ids(side_files)
    fields = {**computed, "vocab_size": vocabulary, "bos_token_id": bos, "eos_token_id": eos}
    settings = causal_lm_config({}, merged(fields, given, run.source, compared=has_own), run.source, warnings)
    tensors = to_hugging_face(state.tensors, layout)
    warnings += _rounded_norms(state, layout)
    settings = as_loaded(tensors, settings)
    return Checkpoint(
        path,
        FORMAT.name,
        tensors,
        settings,
        side_files,
        tuple(warnings),
        version=f"megatron {state.version}",
        shards=state.shards,
        dropped=state.dropped,
    )


def _padded_rows(state: RunState, source: str) -> int:
    embedding = state.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise MalformedInput(
            f"missing keys: `{source}` has no `{EMBEDDING}`",
            hint="the save is incomplete, or its model is not a GPT of Megatron",
        )
    return embedding.num_rows


def _layout(arguments: Arguments, model_type: str, vocabulary: int) -> Layout:
    dim = head_dim(arguments)
    return Layout(
        arguments.source,
        model_type,
        arguments.count("num_attention_heads"),
        query_groups(arguments),
        dim,
        arguments.flag("swiglu"),
        arguments.flag("rotary_interleaved"),
        int(dim * rotary_percent(arguments)),
        any(arguments.flag(name) for name in ZERO_CENTERED),
        is_tied(arguments),
        vocabulary,
    )


def _rounded_norms(state: RunState, layout: Layout) -> list[str]:
    """A warning where 1 + weight is rounded to 16 bits."""
    dtypes = norm_dtypes(state.tensors) - {"float32"} if layout.zero_centered else set()
    if not dtypes:
        return []
    return [
        f"the norms multiply with 1 + weight; the sums were rounded to {', '.join(sorted(dtypes))}: `--dtype float32` "
        "keeps them as Megatron computes them"
    ]


def _side_files(save: Save, tokenizer: Path | None) -> dict[str, bytes]:
    if tokenizer:
        return read_tokenizer(tokenizer)
    folder = save.path / NEMO2_CONTEXT / NEMO_TOKENIZER
    return read_side_files(folder) if folder.is_dir() else {}


def _peek(path: Path) -> Mapping[str, LazyTensor]:
    run = _find(path)
    return run.state(Arguments(run.source, run.stored)).tensors


FORMAT = Format(
    name="megatron",
    title="Megatron-LM, Megatron Core, NeMo: a folder with `iter_…`, its `mp_rank_…` files, or `torch_dist`",
    detect=is_save,
    sign=Sign(keys=(VERSION_KEY,)),
    open=_open,
    peek=_peek,
    covers="GPT-2, Llama 1 to 3, Mistral, Mixtral, Qwen 2, 2.5 and 3 (with experts, too), GPT-NeoX; ranks in any "
    "grid of tensor, pipeline, virtual and expert parallelism; the run's arguments give `config.json`",
)
