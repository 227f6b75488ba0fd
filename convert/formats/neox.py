"""GPT-NeoX (EleutherAI/gpt-neox): runs in any grid of tensor and pipeline ranks become a GPT-NeoX, Llama or Mistral.

Layout (`megatron/checkpointing.py`, `model/gpt2_model.py`): `latest`, and per step `global_stepN/` with `configs/`
(YAML or JSON, merged), `mp_rank_MM_model_states.pt`, and `layer_NN-model_MM-model_states.pt`: the tensors of module NN
on tensor rank MM. Without pipeline (`pipe-parallel-size: 0`) `mp_rank_MM` has them all, as `sequential.NN.NAME` in
`module`. Module 0 is the embedding, i + 2 the layer i, L + 3 the last norm, L + 4 the head, if it is not tied.

Ranks (`mpu/layers.py`, `model/transformer.py`): rows of the embedding, of queries, keys and values, and of the first
matrix of the MLP are divided, columns of the second and of the output of attention. The biases of these two are on
every rank: with `gpt_j_residual` each rank adds its own before the sum over ranks, so the bias is their sum; without it
each adds the same one after the sum. Norms are equal, or nearly (without synchronized gradients): then their mean is
taken.

Rows: queries, keys and values alternate by head; with fewer key heads a rank has all its queries, keys, values, but
before 14 November 2024 (#1315) a part of its keys and values after each head's queries. A gated MLP is `w1` (gate),
`w3`, `w2`, since 7 September 2024 `linear1` (on each rank up, then gate) and `linear2`.

Defaults are those of `neox_arguments/neox_args.py`, also where upstream's `convert_neox_to_hf.py` has others: its RMS
epsilon is 1e-6 (here 1e-8), its GELU exact (with `bias_gelu_fusion` it is the tanh form, as in the released 20B), its
window a token shorter (`megatron/utils.py`, `get_attn_mask`: a token sees `sliding_window_width` before itself).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, own_file, read_side_files, read_small
from llmconv.convert import algebra, tokenizers
from llmconv.convert.assembly import with_tokenizer
from llmconv.convert.fields import Fields
from llmconv.convert.formats import Format
from llmconv.convert.models.completeness import as_loaded, is_buffer
from llmconv.convert.models.config_file import causal_lm_config, read_config_file
from llmconv.convert.state_dicts.files import tracked
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing, short
from llmconv.files.pickle_reader import TensorRef
from llmconv.files.torch_reader import open_torch_file
from llmconv.tensors import Array, LazyTensor, rounded

LAYER_FILE = re.compile(r"layer_(\d{2,6})-model_(\d{2,5})-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d{2,5})_model_states\.pt")
SEQUENTIAL = re.compile(r"sequential\.(\d{1,6})\.(.+)")
CONFIGS, POINTER = "configs", "latest"
EMBEDDING, HEAD, REWARD = "word_embeddings.weight", "final_linear.weight", "rm_linear.weight"
OWN = re.compile(r"(?:self_)?attention\.query_key_value\.|attention\.qkv\.|(?:word_embeddings|final_linear)\.weight$")
"""Names of GPT-NeoX's modules, and of Megatron-DeepSpeed's, which is refused by its name."""

Tensors = dict[str, LazyTensor]
Grid = dict[tuple[int, int], Tensors]
"""By module and tensor rank: own name, without the module's number, to tensor."""


@dataclass(frozen=True)
class _Save:
    """One step of a run, opened."""

    path: Path
    home: Path  # the folder of the run, or the step again
    parts: Grid
    file: str  # name of the file of module {0} on tensor rank {1}
    arguments: Mapping[str, Any]  # `args` in the file of rank 0: sizes; empty if it is missing
    version: str
    has_optimizer: bool


def is_neox(path: Path) -> bool:
    """Whether `path` is a step of GPT-NeoX, or of Megatron-DeepSpeed's pipelines, or contains one."""
    try:
        return path.is_dir() and (_is_step(path) or any(True for _ in _steps(path)))
    except PermissionError:  # llmconv looks into every given folder, which may contain anything
        return False


def _steps(path: Path) -> Iterator[Path]:
    return (entry for entry in sorted(path.iterdir()) if entry.is_dir() and _is_step(entry))


def _is_step(folder: Path) -> bool:
    names = sorted(entry.name for entry in folder.iterdir())
    if layers := [name for name in names if LAYER_FILE.fullmatch(name)]:
        found = (_content(folder / name) for name in layers[:3])
        return (folder / CONFIGS).is_dir() or any(OWN.match(str(key)) for content in found for key in content)
    first = next((name for name in names if RANK_FILE.fullmatch(name)), None)
    module = _content(folder / first).get("module") if first else None
    return isinstance(module, dict) and any(str(key).startswith(f"sequential.0.{EMBEDDING}") for key in module)


def _content(path: Path) -> Mapping[Any, Any]:
    """The dict in a torch file; empty for anything else, for detection."""
    try:
        content = open_torch_file(path).content
    except LlmconvError:
        return {}
    return content if isinstance(content, dict) else {}


def _find(path: Path) -> _Save:
    """The step at `path`, or the newest of the run; errors as in `tracked`, MalformedInput for damaged files."""
    step = path if _is_step(path) else tracked(path, {one.name: one for one in _steps(path)}, path / POINTER)
    above = step.absolute().parent
    home = path if path != step else above if (above / POINTER).is_file() else step
    names = sorted(entry.name for entry in step.iterdir() if entry.is_file())
    rank_files = {int(match[1]): step / name for name in names if (match := RANK_FILE.fullmatch(name))}
    layer_files = {match.groups(): step / match[0] for name in names if (match := LAYER_FILE.fullmatch(name))}
    contents = {rank: _opened(path) for rank, path in rank_files.items() if rank == 0 or not layer_files}
    parts: Grid = {}
    for (number, rank), file in layer_files.items():
        place = (int(number), int(rank))
        if place in parts:
            raise MalformedInput(f"`{step.name}` has two files of module {place[0]} on rank {place[1]}", hint=AGAIN)
        parts[place] = _tensors(file, _opened(file))
    for rank, content in contents.items() if not layer_files else ():
        modules = content.get("module")
        for key in modules if isinstance(modules, dict) else ():
            if not isinstance(modules, dict) or not (match := SEQUENTIAL.fullmatch(str(key))):
                raise MalformedInput(f"unexpected key in `mp_rank_{rank:02d}_model_states.pt`: {key!r:.80}", hint=AGAIN)
            parts.setdefault((int(match[1]), rank), {})[match[2]] = modules[key]
    if not layer_files:
        parts = {place: _tensors(rank_files[place[1]], leaves) for place, leaves in parts.items()}
    first = contents.get(0, {})
    arguments, release = first.get("args"), first.get("ds_version")
    return _Save(
        step,
        home,
        parts,
        "layer_{:02d}-model_{:02d}-model_states.pt" if layer_files else "mp_rank_{1:02d}_model_states.pt",
        arguments if isinstance(arguments, dict) else {},
        f"deepspeed {release[:40]}" if isinstance(release, str) and release.isprintable() else "",
        any("optim_states" in name for name in names) or isinstance(first.get("optimizer"), dict),
    )


AGAIN = "two saves are mixed, or files are damaged; copy the folder of one step again"


def _opened(path: Path) -> Mapping[Any, Any]:
    content = open_torch_file(path).content
    if not isinstance(content, dict):
        raise MalformedInput(f"`{path.name}` does not contain a dict", hint=AGAIN)
    return content


def _tensors(path: Path, leaves: Mapping[Any, Any]) -> Tensors:
    """Name to tensor, without buffers; UnsupportedInput for another object, or Megatron-DeepSpeed's names."""
    file, tensors = open_torch_file(path), Tensors()
    for key, leaf in leaves.items():
        name = str(key)
        if name.startswith("self_attention."):
            raise UnsupportedInput(
                f"`{path.name}` is of Megatron-DeepSpeed, such as BLOOM's trainer, not of GPT-NeoX (`{name[:60]}`)",
                hint="convert it to a Megatron-LM checkpoint with its `deepspeed_to_megatron.py`; llmconv reads that",
            )
        if is_buffer(f".{name}", len(leaf.shape) if isinstance(leaf, TensorRef) else -1):
            continue
        if not isinstance(leaf, TensorRef):
            hint = "save the model with plain tensors in 16 or 32 bits"
            raise UnsupportedInput(f"`{name[:80]}` in `{path.name}` is an object, not a plain tensor", hint=hint)
        tensors[name] = file.tensor(name, leaf)
    return tensors


class _Arguments(Fields):
    """The configuration of a run, under NeoXArgs' names with underscores."""

    def refused(self, name: str, why: str) -> UnsupportedInput:
        return UnsupportedInput(
            f"`{name}` of `{self.source}` is {short(self.values.get(name), 60)!r}: {why}",
            hint="use the model with GPT-NeoX itself, which has the code for it",
        )


def _read_configs(save: _Save) -> _Arguments:
    """The fields of all files in `configs`; InputRefused if there is none, MalformedInput if they contradict."""
    place = next((one / CONFIGS for one in (save.path, save.home) if (one / CONFIGS).is_dir()), None)
    files = sorted(one.name for one in place.iterdir() if one.suffix in (".yml", ".yaml", ".json")) if place else []
    if place is None or not files:
        raise InputRefused(
            f"`{save.path.name}` has no `{CONFIGS}` with the run's configuration, which says what the model computes",
            hint=f"copy the YAML files that the run was started with to `{save.path / CONFIGS}`",
        )
    merged: dict[str, Any] = {}
    for name in files:
        for key, value in read_config_file(own_file(place, name)).items():
            key = key.replace("-", "_")
            if key in merged and merged[key] != value:
                raise MalformedInput(f"two values of `{key}` in `{CONFIGS}`", hint="keep the files of one run there")
            merged[key] = value
    for key in ("num_layers", "hidden_size", "num_attention_heads", "model_parallel_size"):
        if (own := save.arguments.get(key)) is not None and merged.get(key, own) != own:
            raise MalformedInput(
                f"`{CONFIGS}` of `{save.path.name}` has the `{key}` {merged[key]!r:.40}, and its files {own!r:.40}",
                hint="copy the configuration of this run there",
            )
    return _Arguments(merged, save.path.name, "in `configs` of `{}`", "correct it there")


OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
REFUSED = {  # fields that change what is computed: harmless values, and what the others do
    "use_qk_layernorm": (OFF, "queries and keys are normed"),
    "use_mup": (OFF, "muP scales embedding, attention and logits"),
    "moe_num_experts": ((*OFF, 1), "layers have experts"),
    "te_mha": (OFF, "TransformerEngine rounds rotary angles to the dtype of the run"),
    "te_fp8_mha": (OFF, "TransformerEngine computes attention in 8 bits"),
    "te_layernorm_mlp": (OFF, "TransformerEngine's MLP has a GELU and an epsilon of its own"),
    "apply_residual_connection_post_layernorm": (OFF, "the residual is taken after the norm"),
    "geglu": (OFF, "the MLP is gated by a GELU"),
    "openai_gelu": (OFF, "the GELU is one of 2021, as `bias_gelu_fusion` today"),
    "gptj_residual": (OFF, "the residual is one of 2021, before `gpt_j_residual`"),
    "train_impl": ((*OFF, "normal", "dpo", "kto", "reinforce"), "a reward model has no head of words"),
}
USED = {
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "model_parallel_size", "norm", "activation"),
    *("max_position_embeddings", "layernorm_epsilon", "rms_norm_epsilon", "pos_emb", "rotary_pct", "rotary_emb_base"),
    *(
        "no_weight_tying",
        "attention_config",
        "bias_gelu_fusion",
        "gpt_j_residual",
        "gpt_j_tied",
        "sliding_window_width",
    ),
    *("soft_prompt_tuning", "num_unique_layers", "te_rowparallel", "rmsnorm_fusion", "vocab_file", "tokenizer_type"),
    "scaled_upper_triang_masked_softmax_fusion",
}
HARMLESS = re.compile(  # of training, files, speed; of the tensors' shapes; of parts that other fields turn on
    r"(?:.*_(?:fusion|path|paths|port|ports|ips|weights|initialization|dropout|init_method|file|interval|iters|epochs)"
    r"|(?:adlr|autotuning|char|checkpoint|clip|comet|comment|comms|coord|csv|curriculum|data|deepscale|deepspeed|do|dpo"
    r"|dump|dynamic|elasticity|eval|flops|fp32|gradient|hysteresis|init_method|kl|kto|launcher|load|local|log|loss"
    r"|lr|mamba|master|memory|min|mmap|mup|no_load|no_save|num_gpus|num_nodes|num_samples|num_workers|online"
    r"|optimizer|partition|pipe|precision|prescale|profile|recompute|reinforce|rope_fusion|rpe|s3|sample|save|scheduler"
    r"|slurm|sparse_gradients|steps_per|te_fp8|tensorboard|test|text_gen|train|use_bnb|use_comet|use_shared|use_wandb"
    r"|valid|wall_clock|wandb|warmup|weight|weighted|zero|moe)(?:_.*)?"
    r"|global_num_gpus|world_size|is_pipe_parallel|sequence_parallel|intermediate_size|mlp_multiple_of|mlp_type"
    r"|expansion_factor|seq_length|scalenorm_epsilon|opt_pos_emb_offset|sparsity_config|sparse_attention"
    r"|param_sharing_style|make_vocab_size_divisible_by|padded_vocab_size|use_flashattn_swiglu|fp16_lm_cross_entropy"
    r"|apply_query_key_layer_scaling|attention_softmax_in_fp32|rotary_save_freqs_buffer|gmlp_attn_dim|onnx_safe"
    r"|use_bias_in_(?:norms|attn_linear|mlp)|output_layer_parallelism|serve_model_weights|te_columnparallel|dim_att"
    r"|head_size|ffn_dim|expert_interval|fp16|bf16|amp|git_hash|config_files|finetune|batch_size|split|merge_file|seed"
    r"|iteration|rank|hostfile|include|exclude|user_script|short_seq_prob|eod_mask_loss|lazy_mpu_init|distributed_backend"
    r"|keep_last_n_checkpoints|extra_save_iters|contiguous_checkpointing|synchronize_each_layer|peak_theoretical_tflops"
    r"|decay_lr_to|override_lr_scheduler|use_checkpoint_lr_scheduler|activation_checkpointing|compression_training|communication_data_type|pack_impl|dataset_impl|z_loss"
    r"|allow_chopped|temperature|top_[pk]|return_logits|maximum_tokens|prompt_end|precompute_model_name|force_multi"
    r"|no_ssh_check|account|params|type|base_shapes_file|fused_kernels_build_path)"
)


def _check(arguments: _Arguments) -> None:
    """UnsupportedInput for a field that changes what is computed in a way that no class of transformers has."""
    for name, (harmless, why) in REFUSED.items():
        if arguments.values.get(name) not in harmless:
            raise arguments.refused(name, why)
    if (position := arguments.word("pos_emb", "learned")) != "rotary":
        raise _Arguments({"pos_emb": position}, arguments.source).refused("pos_emb", "positions are not rotary")
    kinds = set(_words(arguments.get("attention_config", default="global")))
    if not kinds <= {"global", "flash", "all"}:
        raise arguments.refused("attention_config", "layers are not of plain attention")
    if arguments.flag("gpt_j_tied") and arguments.flag("gpt_j_residual"):
        raise arguments.refused("gpt_j_tied", "attention and MLP share a norm, and transformers' GPT-NeoX has two")
    if arguments.table("soft_prompt_tuning").get("enabled", False):
        raise arguments.refused("soft_prompt_tuning", "a trained prompt stands before each text")
    if arguments.get("num_unique_layers", default=arguments.get("num_layers")) != arguments.get("num_layers"):
        raise arguments.refused("num_unique_layers", "layers share their weights")
    fused = arguments.flag("scaled_upper_triang_masked_softmax_fusion") and "flash" not in kinds
    if arguments.get("sliding_window_width") is not None and (fused or {"global", "flash"} <= kinds):
        raise arguments.refused("sliding_window_width", "not every kernel of this run heeds it")
    known = (name for name, value in arguments.values.items() if value not in OFF)
    if unknown := [name for name in known if not (name in USED or name in REFUSED or HARMLESS.fullmatch(name))]:
        raise UnsupportedInput(
            f"`{CONFIGS}` of `{arguments.source}` sets fields that llmconv does not know: {listing(unknown)}",
            hint="remove those that do not change what the model computes; use GPT-NeoX itself for one that does",
        )


def _words(value: Any) -> Iterator[str]:
    """The words in nested lists, whatever their depth: `read_config_file` bounds it."""
    if isinstance(value, list):
        for one in value:
            yield from _words(one)
    elif not isinstance(value, int):
        yield str(value)


PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "mish": "mish"}


def _family(arguments: _Arguments, layer: Mapping[str, Any]) -> str:
    """The `model_type` in transformers; UnsupportedInput if it has no such model. `layer` has a layer's names."""
    norm = arguments.word("norm", "layernorm").removeprefix("te_")
    activation = arguments.word("activation", "gelu")
    old = "mlp.w1.weight" in layer
    gated = activation in (("silu", "swish", "swiglu") if old else ("swiglu",))
    if norm == "layernorm" and activation in PLAIN and not old:
        if arguments.count("num_kv_heads", default=_heads(arguments)) != _heads(arguments):
            raise arguments.refused("num_kv_heads", "transformers' GPT-NeoX has as many key heads as queries")
        if arguments.get("sliding_window_width") is not None:
            raise arguments.refused("sliding_window_width", "transformers' GPT-NeoX has no window")
        return "gpt_neox"
    if norm != "rmsnorm" or not gated:
        gate = "with" if gated or old or activation not in PLAIN else "without"
        raise UnsupportedInput(
            f"`{arguments.source}` has the `norm` {norm[:40]!r} and the `activation` {activation[:40]!r} in an MLP "
            f"{gate} a gate, which no class of transformers has",
            hint="llmconv reads layernorm with gelu, relu, silu or mish, and rmsnorm with swiglu",
        )
    if arguments.flag("gpt_j_residual"):
        raise arguments.refused("gpt_j_residual", "transformers' Llama has no parallel residual")
    if arguments.number("rotary_pct", default=1.0, most=1.001) != 1:
        raise arguments.refused("rotary_pct", "transformers' Llama turns whole heads")
    if arguments.get("sliding_window_width") is None:
        return "llama"
    if "attention.query_key_value.bias" in layer or "mlp.linear1.bias" in layer:
        raise arguments.refused("sliding_window_width", "there are biases, which transformers' Mistral does not have")
    return "mistral"


def _heads(arguments: _Arguments) -> int:
    return arguments.count("num_attention_heads", most=1 << 16)


NEOX_NAMES = {
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    **dict.fromkeys(("mlp.dense_h_to_4h", "mlp.linear1"), "mlp.dense_h_to_4h"),
    **dict.fromkeys(("mlp.dense_4h_to_h", "mlp.linear2"), "mlp.dense_4h_to_h"),
}
LLAMA_NAMES = {
    **{f"attention.{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attention.dense": "self_attn.o_proj",
    **dict.fromkeys(("mlp.w1", "mlp.gate"), "mlp.gate_proj"),
    **dict.fromkeys(("mlp.w3", "mlp.up"), "mlp.up_proj"),
    **dict.fromkeys(("mlp.w2", "mlp.linear2"), "mlp.down_proj"),
}
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
ROW_PARALLEL = ("attention.dense", "mlp.dense_4h_to_h", "mlp.linear2", "mlp.w2")


@dataclass(frozen=True)
class _Joining:
    """How the tensors of a save become those of the model."""

    save: _Save
    family: str
    ranks: int
    heads: int
    key_heads: int
    old: bool  # the names of an MLP with a gate before September 2024
    summed: bool  # each rank adds its own bias
    averaged: list[str]  # gets the names of copies that differ

    def layer(self, number: int, stem: str) -> Iterator[tuple[str, LazyTensor]]:
        """The tensors of the module `number`, a layer, by Hugging Face's names after `stem`."""
        names = {**(NEOX_NAMES if self.family == "gpt_neox" else LLAMA_NAMES), **NORMS}
        for (module, kind), parts in self.parts(number).items():
            if module not in names:
                raise self.unexpected(number, f"{module}.{kind}")
            with self.fitting(number, module):
                yield f"{stem}{names[module]}.{kind}", self.joined(module, kind, parts)

    def parts(self, number: int) -> dict[tuple[str, str], list[LazyTensor]]:
        """By module and `weight` or `bias`, fused ones apart: the part of each rank."""
        found: dict[tuple[str, str], list[LazyTensor]] = {}
        for rank in range(self.ranks):
            own = self.save.parts[number, rank]
            if own.keys() != self.save.parts[number, 0].keys():
                odd = sorted(own.keys() ^ self.save.parts[number, 0].keys())
                raise MalformedInput(
                    f"ranks of module {number} of `{self.save.path.name}` differ: {listing(odd)}", hint=AGAIN
                )
            for name, tensor in own.items():
                module, _, kind = name.rpartition(".")
                module = module.removesuffix(".norm")  # TransformerEngine's norms are in a module of their own
                with self.fitting(number, name):
                    for part, one in self.unfused(module, tensor):
                        found.setdefault((part, "weight" if kind == "scale" else kind), []).append(one)
        return found

    def unfused(self, module: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
        """A rank's tensor as one or several; ValueError if its rows do not divide so."""
        if self.family == "gpt_neox" or module not in ("attention.query_key_value", "mlp.linear1"):
            yield module, tensor
        elif module == "mlp.linear1":
            yield from zip(("mlp.up", "mlp.gate"), algebra.split(tensor, 0, 2), strict=True)
        else:
            size = tensor.num_rows * self.ranks // (self.heads + 2 * self.key_heads)  # rows of a head
            counts = [size, *[size * self.key_heads // self.heads] * 2]
            if self.key_heads != self.heads and not self.old:
                counts = [size * count // self.ranks for count in (self.heads, self.key_heads, self.key_heads)]
            yield from zip(
                ("attention.q", "attention.k", "attention.v"), algebra.deal_rows(tensor, counts), strict=True
            )

    def joined(self, module: str, kind: str, parts: Sequence[LazyTensor]) -> LazyTensor:
        """The whole of the ranks' parts; ValueError if they do not fit together."""
        if module in NORMS or (module in ROW_PARALLEL and kind == "bias"):
            return self.copies(f"{module}.{kind}", parts, total=self.summed and module not in NORMS)
        return algebra.concat(parts, 1 if module in ROW_PARALLEL else 0)

    def copies(self, name: str, parts: Sequence[LazyTensor], *, total: bool = False) -> LazyTensor:
        """One of equal copies, their mean if they differ, or with `total` their sum; rounded once."""
        first = parts[0]
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise ValueError(f"ranks have the shapes {[part.shape for part in parts]}")
        if len(parts) == 1 or not total and all(algebra.equal(first, part) for part in parts[1:]):
            return first
        if not total:
            self.averaged.append(name)
        count = 1 if total else len(parts)

        def load(start: int, stop: int) -> Array:
            rows = [part.rows(start, stop).astype(np.float64) for part in parts]
            return rounded(np.sum(rows, axis=0) / count, first.dtype, name)

        return LazyTensor(first.dtype, first.shape, load)

    def outside(self, number: int, name: str) -> LazyTensor | None:
        """The embedding or the head, whole; None if the save does not have it."""
        own = [self.save.parts.get((number, rank), {}) for rank in range(self.ranks)]
        if others := [other for part in own for other in part if other != name]:
            raise self.unexpected(number, others[0])
        if not any(own):
            return None
        parts = [part[name] for part in own if part]
        with self.fitting(number, name):
            by_columns = self.ranks > 1 and name == HEAD and parts[0].shape[1:] != self.width  # parallelism "row"
            return algebra.concat(parts, 1 if by_columns else 0)

    @property
    def width(self) -> tuple[int, ...]:
        return self.save.parts[0, 0][EMBEDDING].shape[1:]

    def fitting(self, number: int, name: str) -> Any:
        return algebra.fitting(f"`{name[:80]}` of module {number} of `{self.save.path.name}` does not fit", AGAIN)

    def unexpected(self, number: int, name: str) -> MalformedInput:
        return MalformedInput(
            f"`{self.save.path.name}` contains tensors that no rule places; unexpected keys: `{name[:80]}` of module "
            f"{number}",
            hint="a GPT-NeoX, Llama or Mistral does not have them; the configuration may be another model's",
        )


def _require_parts(save: _Save, arguments: _Arguments) -> tuple[int, int]:
    """Numbers of layers and tensor ranks; InputRefused or MalformedInput unless all parts of these are there."""
    ranks = arguments.count("model_parallel_size", default=max(rank for _, rank in save.parts) + 1)
    layers, source = arguments.count("num_layers"), save.path.name
    head = [] if arguments.flag("no_weight_tying") is False else [layers + 4]
    wanted = ((number, rank) for rank in range(ranks) for number in (0, *range(2, layers + 2), layers + 3, *head))
    if (missing := next((place for place in wanted if place not in save.parts), None)) is not None:
        there = sorted({save.file.format(*place) for place in save.parts})
        raise InputRefused(
            f"`{source}` lacks module {missing[0]} of tensor rank {missing[1]} (`{save.file.format(*missing)}`), of "
            f"{layers} layers on {ranks} ranks; there are {listing(there)}",
            hint="copy the files of all ranks of this step, or correct the configuration in `configs`",
        )
    known = {0, *range(2, layers + 2), layers + 3, layers + 4}
    if odd := [place for place in save.parts if place[1] >= ranks or place[0] not in known and save.parts[place]]:
        raise MalformedInput(
            f"`{source}` has `{save.file.format(*odd[0])}` with module {odd[0][0]}, and its configuration {layers} "
            f"layers on {ranks} ranks",
            hint="correct the configuration in `configs`, or keep the files of one save",
        )
    return layers, ranks


def _model(save: _Save, arguments: _Arguments, warnings: list[str]) -> tuple[dict[str, Any], Tensors]:
    """The fields of `config.json` but for token ids, and the tensors in Hugging Face's names."""
    _check(arguments)
    layers, ranks = _require_parts(save, arguments)
    layer, heads = save.parts[2, 0], _heads(arguments)
    if any(REWARD in part for part in save.parts.values()):
        raise UnsupportedInput(f"`{save.path.name}` is a reward model (`{REWARD}`)", hint="convert it with GPT-NeoX")
    if EMBEDDING not in save.parts[0, 0]:
        raise MalformedInput(f"missing keys: module 0 of `{save.path.name}` has no `{EMBEDDING}`", hint=AGAIN)
    family = _family(arguments, layer)
    key_heads = arguments.count("num_kv_heads", default=heads, most=1 << 16)
    if heads % key_heads or heads % ranks or key_heads % ranks:
        raise arguments.invalid("num_kv_heads" if key_heads != heads else "num_attention_heads", key_heads)
    parallel = arguments.flag("gpt_j_residual")
    if parallel and arguments.flag("te_rowparallel") and ranks > 1:
        raise arguments.refused("te_rowparallel", "with `gpt_j_residual` the ranks' outputs are added up twice")
    joining = _Joining(save, family, ranks, heads, key_heads, "mlp.w1.weight" in layer, parallel, [])
    stack, norm, embedding, head = PLACES[family == "gpt_neox"]
    tensors = {embedding: joining.outside(0, EMBEDDING)}
    for number in range(layers):
        tensors |= joining.layer(number + 2, f"{stack}.{number}.")
    for (module, kind), parts in joining.parts(layers + 3).items():
        if module != "norm":
            raise joining.unexpected(layers + 3, f"{module}.{kind}")
        with joining.fitting(layers + 3, module):
            tensors[f"{norm}.{kind}"] = joining.copies(f"norm.{kind}", parts)
    untied = arguments.flag("no_weight_tying")
    tensors[head] = joining.outside(layers + 4, HEAD if untied else EMBEDDING)
    whole = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    warnings += _warnings(arguments, joining)
    first = f"{stack}.0.mlp.{'dense_h_to_4h' if family == 'gpt_neox' else 'gate_proj'}.weight"
    algebra.require([embedding, first, *[head] * untied], whole, save.path.name)
    config = {
        "model_type": family,
        "vocab_size": whole[embedding].num_rows,
        "hidden_size": arguments.count("hidden_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": whole[first].num_rows,
        "max_position_embeddings": arguments.count("max_position_embeddings"),
        "tie_word_embeddings": not untied,
    }
    biased = "attention.query_key_value.bias" in layer
    return config | _fields(arguments, family, key_heads, biased=biased, mlp_biased="mlp.linear1.bias" in layer), whole


PLACES = (  # of a Llama or Mistral, and of a GPT-NeoX: layers, last norm, embedding, head
    ("model.layers", "model.norm", "model.embed_tokens.weight", "lm_head.weight"),
    ("gpt_neox.layers", "gpt_neox.final_layer_norm", "gpt_neox.embed_in.weight", "embed_out.weight"),
)


def _fields(arguments: _Arguments, family: str, key_heads: int, *, biased: bool, mlp_biased: bool) -> dict[str, Any]:
    base = arguments.number("rotary_emb_base", default=10000.0)
    if family == "gpt_neox":
        activation = PLAIN[arguments.word("activation", "gelu")]
        fused = activation == "gelu" and arguments.flag("bias_gelu_fusion")
        return {
            "rotary_pct": arguments.number("rotary_pct", default=1.0, most=1.001),
            "rotary_emb_base": base,
            "use_parallel_residual": arguments.flag("gpt_j_residual"),
            "layer_norm_eps": arguments.number("layernorm_epsilon", default=1e-5),
            "hidden_act": "gelu_fast" if fused else activation,
            "attention_bias": biased,
        }
    window = arguments.count("sliding_window_width") + 1 if family == "mistral" else None
    return {
        "num_key_value_heads": key_heads,
        "rms_norm_eps": arguments.number("rms_norm_epsilon", default=1e-8),
        "rope_theta": base,
        "hidden_act": "silu",
        **({"sliding_window": window} if window else {"attention_bias": biased, "mlp_bias": mlp_biased}),
    }


def _warnings(arguments: _Arguments, joining: _Joining) -> Iterator[str]:
    source = joining.save.path.name
    if joining.averaged:
        names = listing(sorted(set(joining.averaged)))
        yield f"the ranks of `{source}` have {len(joining.averaged)} copies that differ; their mean is taken: {names}"
    if joining.family == "gpt_neox":
        return
    if joining.key_heads != joining.heads and not joining.old:
        yield (
            f"rows of queries, keys and values of `{source}` are read in the order since 14 November 2024; a run that "
            "began in the ten weeks before has another one: compare the text that it generates"
        )
    if not arguments.flag("rmsnorm_fusion") and arguments.word("norm") == "rmsnorm":
        eps, when = arguments.number("rms_norm_epsilon", default=1e-8), "this run" if joining.old else "before May 2025"
        yield f"norms add {eps:g} to the mean square, as in transformers; GPT-NeoX added it to the root ({when})"


def _tokenizer(save: _Save, arguments: _Arguments, given: Path | None, warnings: list[str]) -> dict[str, bytes]:
    """Tokenizer files: the given, those in the folder, or the run's `vocab_file` if one of its name lies there."""
    files = {**read_side_files(save.home), **read_side_files(save.path)}
    if given:
        return with_tokenizer(files, given)
    name, kind = PurePosixPath(arguments.word("vocab_file")).name, arguments.word("tokenizer_type")
    place = next((one for one in (save.path, save.home) if name and (one / name).is_file()), None)
    if place and kind == "HFTokenizer" and "tokenizer.json" not in files:
        files["tokenizer.json"] = read_small(own_file(place, name))
    if not files:
        warnings.append(f"`{save.path.name}` contains no tokenizer; give one with `--tokenizer` if you need it")
    return files


END = "<|endoftext|>"  # which begins and ends texts in GPT-NeoX's `HFTokenizer`


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    save, warnings = _find(path), list[str]()
    arguments = _read_configs(save)
    computed, tensors = _model(save, arguments, warnings)
    side_files = _tokenizer(save, arguments, tokenizer, warnings)
    bos, eos = tokenizers.special_ids(side_files)
    end = tokenizers.all_tokens(side_files).get(END)
    computed |= {"bos_token_id": end if bos is None else bos, "eos_token_id": end if eos is None else eos}
    settings = as_loaded(tensors, causal_lm_config(computed, config, path.name, warnings))
    dropped = ("the optimizer's state",) if save.has_optimizer else ()
    more = (side_files, tuple(warnings), save.version, len({save.file.format(*place) for place in save.parts}), dropped)
    return Checkpoint(path, FORMAT.name, tensors, settings, *more)


def _peek(path: Path) -> Tensors:
    parts = _find(path).parts
    one = all(rank == 0 for _, rank in parts)
    return {
        f"{number}.{name}" if one else f"rank {rank}: {number}.{name}": tensor
        for (number, rank), tensors in sorted(parts.items())
        for name, tensor in tensors.items()
    }


FORMAT = Format(
    name="neox",
    title="GPT-NeoX: a run with `latest`, or its `global_step…` with `layer_NN-model_MM-…` files and `configs`",
    detect=is_neox,
    open=_open,
    peek=_peek,
    covers="Pythia, GPT-NeoX-20B and other models with rotary positions: LayerNorm with a plain MLP as GPT-NeoX, "
    "RMSNorm with SwiGLU as Llama, with a window as Mistral; any number of tensor and pipeline ranks, or no pipeline",
)
