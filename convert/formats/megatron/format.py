"""Megatron-LM, Megatron Core and NeMo: files of ranks in any grid, and distributed checkpoints (`torch_dist`).

NeMo's configuration, `model_config.yaml` of NeMo 1 or `context/model.yaml` of NeMo 2, is read as Megatron's arguments.
Sources: NeMo 1.20 to 2.4, `megatron_gpt_model.py` and `megatron_base_model.py` (`build_transformer_config`),
`llm/gpt/model/base.py`; Megatron Bridge saves the same fields as NeMo 2 in `run_config.yaml`. The run's arguments give
`config.json`, the sizes of the grid and the order of fused rows (Megatron core `transformer/attention.py`,
`get_query_key_value_tensors`): for each group of queries, its queries, its key and its value; gate rows before up rows.
Fused matrices are split, and every name is checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, read_side_files, transposed
from llmconv.convert import algebra
from llmconv.convert.formats import Format
from llmconv.convert.formats.megatron import config as configs
from llmconv.convert.formats.megatron import save_folder
from llmconv.convert.formats.megatron.experts import Arguments
from llmconv.convert.formats.megatron.join_ranks import Rank, join_ranks, open_distributed, open_ranks, read_common
from llmconv.convert.models.completeness import as_loaded
from llmconv.convert.models.config_file import causal_lm_config, read_config_file
from llmconv.convert.state_dicts.files import Sign
from llmconv.convert.tokenizers import read_tokenizer, special_ids, vocabulary_size
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, short
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor, cast, in_memory, rounded

NEMO2_FILE, BRIDGE_FILE = "model.yaml", "run_config.yaml"

RENAMED = {
    "bias": "add_bias_linear",
    "encoder_seq_length": "max_position_embeddings",
    "num_moe_experts": "num_experts",
    "qkv_bias": "add_qkv_bias",
    "rotary_percentage": "rotary_percent",
    "rope_scaling": "use_rope_scaling",
    "rope_scaling_factor": configs.OWN_FACTOR,
    "scale_factor": configs.OWN_FACTOR,
    "scale_positional_embedding": "use_rope_scaling",
    "seq_len_interpolation_factor": configs.INTERPOLATION,
    "seq_length": "max_position_embeddings",
}
# Settings of NeMo that change the model, and the values with which they do not
ONLY_VALUE: dict[str, tuple[Any, ...]] = {
    "apply_embedding_scaling": configs.OFF,
    "attention_type": ("multihead", *configs.OFF),
    "drop_layers": configs.OFF,
    "headscale": configs.OFF,
    "hyena": configs.OFF,
    "mcore_customization_config": configs.OFF,
    "megatron_legacy": configs.OFF,
    "normalize_attention_scores": (None, True),
    "transformer_block_type": ("pre_ln", *configs.OFF),
}
GATED = ("swiglu", "fast-swiglu")
# Constants of Llama 3.1's frequencies, which NeMo 2 stores; Megatron core has no others
SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
# First letters of settings that concern speed and memory alone
UNREAD = ("_", "activations_checkpoint", "bias_activation", "get_", "num_micro_batches", "transformer_engine")
READ = ("activation", "activation_func", "share_embeddings_and_output_weights", *ONLY_VALUE)
SILU, GELU = ".silu", ".gelu"


def read_nemo(folder: Path) -> dict[str, Any]:
    """Arguments of NeMo or Megatron Bridge, or none; MalformedInput: another file, UnsupportedInput: a setting."""
    if (folder / save_folder.NEMO_CONFIG).is_file():
        fields = read_config_file(folder / save_folder.NEMO_CONFIG)
        inner = fields.get("model")
        config = inner if isinstance(inner, dict) and "num_layers" in inner else fields
        for name, allowed in ONLY_VALUE.items():
            if config.get(name) not in allowed:
                raise _unsupported(folder.name, name, config[name])
        activation = config.get("activation", "gelu")
        if activation not in (*GATED, "gelu"):
            raise _unsupported(folder.name, "activation", activation)
        norm = str(config.get("normalization", "layernorm")).lower()
        fused = config.get("bias_activation_fusion", True) is not False or bool(config.get("openai_gelu"))
        made = {
            "swiglu": activation in GATED,
            "bias_gelu_fusion": fused,
            "openai_gelu": False,
            "untie_embeddings_and_output_weights": config.get("share_embeddings_and_output_weights", True) is False,
            "normalization": "LayerNorm" if norm == "layernorm1p" else norm,
            "layernorm_zero_centered_gamma": norm == "layernorm1p" or bool(config.get("layernorm_zero_centered_gamma")),
        }
        return _renamed({name: value for name, value in config.items() if name != "max_position_embeddings"}) | made
    for file, field in ((folder / save_folder.NEMO2_CONTEXT / NEMO2_FILE, "config"), (folder / BRIDGE_FILE, "model")):
        if file.is_file():
            return _transformer_config(read_config_file(file).get(field), file)
    return {}


def _transformer_config(config: Any, file: Path) -> dict[str, Any]:
    """The fields of a TransformerConfig, as NeMo 2 and Megatron Bridge write them."""
    if not isinstance(config, dict) or "num_layers" not in config:
        raise MalformedInput(f"`{file.name}` does not describe a language model", hint="copy the checkpoint again")
    target = config.get("activation_func")
    word = str(target.get("_target_", target) if isinstance(target, dict) else target)
    gated = config.get("gated_linear_unit") is True
    if not word.endswith(SILU if gated else GELU):
        kind = str(config.get("_target_", "")).rpartition(".")[2]
        of = f"{file.name}` of a `{kind}" if kind else file.name
        raise _unsupported(of, "activation_func", word.rpartition(".")[2])
    scaled = config.get("rope_type", "yarn") != "rope" and config.get("rotary_scaling_factor") not in (None, 1)
    if scaled and config.get("multi_latent_attention") is True and "original_max_position_embeddings" not in config:
        # before core 0.14, see `config._latent_scaling`
        raise _unsupported(file.name, "rotary_scaling_factor", config["rotary_scaling_factor"])
    made = {
        "swiglu": gated,
        "bias_gelu_fusion": config.get("bias_activation_fusion") is True,
        "untie_embeddings_and_output_weights": config.get("share_embeddings_and_output_weights", True) is False,
    }
    if "old_context_len" in config:
        if any(config.get(name) != value for name, value in SCALING.items()):
            raise _unsupported(file.name, "low_freq_factor, high_freq_factor or old_context_len", "of its own")
        made["use_rope_scaling"] = True
    return _renamed(config) | made


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in config.items() if not name.startswith(UNREAD) and name not in READ}
    for name, value in left.items():
        # a tuple is written as a call; other calls stay, so that one of an argument is refused
        inner = value.get("_args_") if isinstance(value, dict) and value.get("_target_") == "builtins.tuple" else None
        if isinstance(inner, list) and inner and isinstance(inner[0], list):
            left[name] = tuple(inner[0])
    return {RENAMED.get(name, name): value for name, value in left.items()}


def _unsupported(source: str, name: str, value: Any) -> UnsupportedInput:
    return UnsupportedInput(
        f"`{source}` declares `{name}` {short(value)}, which is unsupported",
        hint="convert it with NeMo's own exporter, which builds the model with its own code",
    )


# Names of an adapter's weights (Megatron Bridge `peft/adapter_wrapper.py`, NeMo `collections/llm/peft`)
ADAPTER = re.compile(r"\.(?:adapter|adapter_\w+)\.(?:\w+\.)?linear_(?:in|out)\.")

# Names of the argument in Megatron core and in Megatron-LM
ZERO_CENTERED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")


@dataclass(frozen=True)
class _Run:
    """A save that is found: its files, and its arguments as far as it contains them."""

    source: str
    save: save_folder.Save
    ranks: list[Rank]
    stored: Mapping[str, Any]

    def state(self, arguments: Arguments) -> save_folder.RunState:
        if self.save.distributed:
            return open_distributed(self.save.distributed, self.source)
        return join_ranks(self.ranks, arguments)


def _find(path: Path) -> _Run:
    save = save_folder.find_save(path)
    ranks = [] if save.distributed else open_ranks(save)
    if not (stored := read_nemo(save.path)):
        stored = read_common(save.distributed)[0] if save.distributed else dict(ranks[0].arguments)
    return _Run(path.name, save, ranks, stored)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    run = _find(path)
    has_own = run.stored.get("num_layers") is not None
    arguments = Arguments(run.stored, run.source) if has_own else configs.arguments_of(config, run.source)
    given = {} if arguments.values is config else config
    arguments, of_stage = configs.with_layers_of_stage(arguments)
    old = run.save.nemo is None and any(rank.old for rank in run.ranks)
    warnings = configs.check_arguments(arguments, described="model_type" in given, old=old)
    warnings += [*of_stage, *configs.ignored_factor(arguments)]
    family = configs.family_of(arguments, given.get("model_type"))
    computed = configs.to_config(arguments, family)
    state = run.state(arguments)
    tensors, dropped = dict(state.tensors), state.dropped
    heads = {name: match[1] for name in tensors if (match := save_folder.MTP_LAYER.fullmatch(name))}
    if family.mtp:
        computed["num_nextn_predict_layers"] = len(set(heads.values()))
    elif heads:  # the model's logits do not depend on them
        tensors = {name: tensor for name, tensor in tensors.items() if name not in heads}
        dropped = (*dropped, f"{len(heads)} tensors of heads that predict later tokens")
    folder = run.save.path / save_folder.NEMO2_CONTEXT / "nemo_tokenizer"
    own = read_side_files(folder) if folder.is_dir() else {}
    if not (side_files := read_tokenizer(tokenizer) if tokenizer else own):
        warnings.append("a Megatron checkpoint contains no tokenizer; give one with `--tokenizer` if you need it")
    embedding = tensors.get(save_folder.EMBEDDING)
    if adapter := next((name for name in tensors if ADAPTER.search(name)), None):
        raise UnsupportedInput(
            f"`{run.source}` is of a run with an adapter of Megatron Bridge or NeMo (`{adapter}`), which is not merged",
            hint="write it as PEFT's with Megatron Bridge (`AutoBridge.export_adapter_ckpt`), and merge that: "
            "`llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    if embedding is None or len(embedding.shape) != 2:
        raise MalformedInput(
            f"missing keys: `{run.source}` has no `{save_folder.EMBEDDING}`",
            hint="the save is incomplete, or its model is not a GPT of Megatron",
        )
    vocabulary = true_vocabulary(arguments, embedding.num_rows, config, side_files, warnings)
    dim = configs.head_dim(arguments)
    layout = Layout(
        arguments.source,
        family.model_type,
        arguments.count("num_attention_heads"),
        configs.query_groups(arguments),
        dim,
        arguments.flag("swiglu"),
        arguments.flag("rotary_interleaved"),
        int(dim * configs.rotary_percent(arguments)),
        any(arguments.flag(name) for name in ZERO_CENTERED),
        configs.is_tied(arguments),
        vocabulary,
        arguments.count("num_layers"),
    )
    bos, eos = special_ids(side_files)
    fields = {**computed, "vocab_size": vocabulary, "bos_token_id": bos, "eos_token_id": eos}
    settings = causal_lm_config({}, configs.merged(fields, given, run.source, compared=has_own), run.source, warnings)
    dtypes = {tensor.dtype.name for name, tensor in tensors.items() if NORM.search(name)} - {"float32"}
    if family.sigmoid:
        tensors = with_expert_biases(tensors)
    tensors = to_hugging_face(tensors, layout)
    if layout.zero_centered and dtypes:
        warnings.append(
            f"the norms multiply with 1 + weight; the sums were rounded to {', '.join(sorted(dtypes))}: `--dtype "
            "float32` keeps them as Megatron computes them"
        )
    settings = as_loaded(tensors, settings)
    more = (tuple(warnings), f"megatron {state.version}", state.shards, dropped)
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, *more)


FORMAT = Format(
    name="megatron",
    title="Megatron-LM, Megatron Core, NeMo: a folder with `iter_…`, its `mp_rank_…` files, or `torch_dist`",
    detect=save_folder.is_save,
    sign=Sign(keys=(save_folder.VERSION_KEY,)),
    open=_open,
    peek=lambda path: (run := _find(path)).state(Arguments(run.stored, run.source)).tensors,
    covers="GPT-2, Llama 1 to 3, Mistral, Mixtral, Qwen 2, 2.5 and 3 (with experts, too), GPT-NeoX, DeepSeek-V2 and "
    "V3, GLM-4.5 with experts, with heads of later tokens; ranks in any grid of tensor, pipeline, virtual and expert "
    "parallelism; the run's arguments give `config.json`",
)


NORM = re.compile(r"(?:layernorm|layer_norm|\b[eh]norm)\.weight$")
HEAD_NORM = re.compile(r"\.[qk]_layernorm\.(?:weight|bias)$")
WHOLE_QKV = ("gpt_neox", "gpt2")  # families that keep queries, keys and values in one matrix


@dataclass(frozen=True)
class Layout:
    """How the tensors of a run are laid out, and what they become."""

    source: str
    model_type: str
    heads: int
    groups: int
    head_dim: int
    gated: bool  # the first feed-forward matrix has gate and up rows
    interleaved: bool  # rotary positions turn neighboring rows (2i, 2i + 1) of a head, not its halves
    rotary_dim: int  # rows of a head that are turned
    zero_centered: bool  # norms multiply with 1 + weight
    tied: bool  # the output head is the embedding
    vocabulary: int  # rows of the embedding that are kept
    layers: int  # of the model, without those that predict later tokens


def to_hugging_face(tensors: Mapping[str, LazyTensor], layout: Layout) -> dict[str, LazyTensor]:
    """The model's tensors in Hugging Face's names, from core's whole ones; MalformedInput for wrong keys or shapes."""
    converted: dict[str, LazyTensor] = {}
    unknown = []
    for name, tensor in _one_embedding(tensors, layout).items():
        what = f"`{name}` {list(tensor.shape)} of `{layout.source}` does not match the arguments"
        with algebra.fitting(what, "the arguments are of another model"):
            parts = dict(_parts(name, tensor, layout))
        for own, part in parts.items():
            if (target := save_folder.hugging_face_name(own, layout.model_type, layout.layers)) is None:
                unknown.append(name)
            else:
                converted[target] = part
    if unknown:
        raise MalformedInput(
            f"`{layout.source}` contains {len(unknown)} tensors that a {layout.model_type} does not have; unexpected "
            f"keys: {listing(unknown)}",
            hint="convert it with Megatron Bridge, which builds the model with Megatron's own code",
        )
    return converted


ROUTER = re.compile(r"(.+\.mlp\.router\.)weight")


def with_expert_biases(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors, and zeros for biases of experts that the run did not have: transformers' router adds one."""
    routers = ((match[1], tensor) for name, tensor in tensors.items() if (match := ROUTER.fullmatch(name)))
    missing = {
        f"{stem}expert_bias": in_memory(np.zeros(tensor.num_rows, np.float32), BY_NAME["float32"])
        for stem, tensor in routers
        if f"{stem}expert_bias" not in tensors
    }
    return {**tensors, **missing}


def _one_embedding(tensors: Mapping[str, LazyTensor], layout: Layout) -> dict[str, LazyTensor]:
    """The tensors without the copy of a tied embedding that the last pipeline stage keeps."""
    kept = dict(tensors)
    if not layout.tied or save_folder.HEAD not in kept:
        return kept
    copy, embedding = kept.pop(save_folder.HEAD), kept.get(save_folder.EMBEDDING)
    if embedding is None or (copy.shape, copy.dtype) != (embedding.shape, embedding.dtype):
        raise MalformedInput(
            f"the embedding of `{layout.source}` is missing, or its copy in the last pipeline stage has another shape",
            hint="copy the files of all ranks of one save again",
        )
    difference = UnsupportedInput(
        f"the first and last pipeline stage of `{layout.source}` hold different embeddings, which the run tied",
        hint="ranks of different saves are mixed; copy all ranks of one save again",
    )
    return {**kept, save_folder.EMBEDDING: algebra.replicated([embedding, copy], difference)}


def _parts(name: str, tensor: LazyTensor, layout: Layout) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors that one is split into, by the names that `hugging_face_name` knows; ValueError for a wrong shape."""
    module, _, kind = name.rpartition(".")
    if module.endswith(f".{save_folder.QKV}"):
        yield from _attention(name.removesuffix(f"linear_qkv.{kind}"), kind, tensor, layout)
    elif layout.gated and save_folder.FC1.search(name):
        for part, rows in zip(("gate", "up"), algebra.split(tensor, 0, 2), strict=True):
            yield f"{module.removesuffix('linear_fc1')}{part}.{kind}", rows
    elif name in (save_folder.EMBEDDING, save_folder.HEAD):
        yield name, algebra.slice_rows(tensor, 0, layout.vocabulary)
    elif layout.model_type == "gpt2" and kind == "weight" and len(tensor.shape) == 2 and ".layers." in name:
        yield name, transposed(tensor)
    else:
        own = _by_halves(tensor, layout) if HEAD_NORM.search(name) else tensor
        yield name, plus_one(own) if layout.zero_centered and NORM.search(name) else own


def _attention(stem: str, kind: str, tensor: LazyTensor, layout: Layout) -> Iterator[tuple[str, LazyTensor]]:
    counts = [layout.heads // layout.groups * layout.head_dim, layout.head_dim, layout.head_dim]
    rows = sum(counts) * layout.groups
    if tensor.num_rows != rows:
        raise ValueError(f"expected {rows} rows, got {tensor.num_rows}")
    *turned, values = algebra.deal_rows(tensor, counts)
    parts = [*(_by_halves(part, layout) for part in turned), values]
    if layout.model_type not in WHOLE_QKV:
        for word, part in zip("qkv", parts, strict=True):
            yield f"{stem}{word}.{kind}", part
    elif layout.model_type == "gpt_neox":
        yield f"{stem}qkv.{kind}", algebra.interleave_rows(parts, counts)
    else:
        whole = algebra.concat(parts, 0)
        yield f"{stem}qkv.{kind}", transposed(whole) if kind == "weight" else whole


def _by_halves(tensor: LazyTensor, layout: Layout) -> LazyTensor:
    """Rows of heads in the order in which transformers turns them."""
    if not layout.interleaved:
        return tensor
    rest = range(layout.rotary_dim, layout.head_dim)
    return algebra.permute_rows(tensor, [*algebra.rope_order(layout.rotary_dim), *rest])


def plus_one(tensor: LazyTensor) -> LazyTensor:
    """1 + weight, summed in float32 and rounded once to the dtype of the result."""
    wide = cast(tensor, BY_NAME["float32"])

    def into(dtype: DType) -> LazyTensor:
        def load(start: int, stop: int) -> Array:
            return rounded(wide.rows(start, stop) + np.float32(1), dtype, "a norm")

        return LazyTensor(dtype, tensor.shape, load, into)

    return into(tensor.dtype)


def true_vocabulary(
    arguments: Arguments,
    padded: int,
    given: Mapping[str, Any],
    tokenizer: Mapping[str, bytes],
    warnings: list[str],
) -> int:
    """The number of tokens: the user's `vocab_size` (in `given`), else that of the tokenizer.

    `padded` is the number of rows of the embedding; `warnings` gets a line where the tokenizer cuts off rows. Raises
    InputRefused if neither is known, MalformedInput for more tokens than rows.
    """
    asked, counted = given.get("vocab_size"), vocabulary_size(tokenizer)
    size = asked if asked is not None else counted
    if size is None and arguments.values.get("vocab_size") == padded:
        return padded
    if size is None:
        raise InputRefused(
            f"the embedding of `{arguments.source}` has {padded} rows, and it does not contain how many are tokens",
            hint=f"give the tokenizer with `--tokenizer`, or `vocab_size` with `--config` ({padded} keeps all rows)",
        )
    if type(size) is not int or not 0 < size <= padded:
        raise MalformedInput(
            f"the embedding of `{arguments.source}` has {padded} rows, the vocabulary {short(size)} tokens",
            hint="give the tokenizer and the configuration of this model",
        )
    if asked is None and size < padded:
        warnings.append(
            f"the tokenizer has {size} tokens: the other {padded - size} rows of the embedding were cut off as padding"
        )
    return size
