"""Finds the save in a Megatron or NeMo folder, and names its tensors: core's names, older ones, and Hugging Face's.

Layout (Megatron-LM `training/checkpointing.py`, `get_checkpoint_name`): `iter_0000100/mp_rank_TT[_PPP][_EEE]/` with
`model_optim_rng.pt`, and `latest_checkpointed_iteration.txt` above; NeMo `nlp_overrides.py` and `lightning/io/pl.py`.
Names: Megatron core `models/gpt/gpt_model.py`; its Transformer Engine modules contain the norm before them. Older
models (Megatron-LM 2.5 to core 0.15, `megatron/{model,legacy/model}/{language_model,transformer}.py`) nest dicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmconv.checkpoint import json_object
from llmconv.convert.state_dicts.distributed import is_folder
from llmconv.convert.state_dicts.files import tracked
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, listing
from llmconv.files.torch_reader import is_torch_file, open_torch_file
from llmconv.tensors import LazyTensor

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
QKV, PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,9})\.(.+)")  # one that predicts later tokens
EXPERT = re.compile(r"((?:decoder|mtp)\.layers\.\d{1,9}\.mlp\.experts)\.(\d{1,9})\.(.+)")
# Experts of Transformer Engine's grouped linear layers, numbered at the end
GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d{1,9})$")
FC1 = re.compile(r"\.linear_fc1\.(?:weight|bias)$")

OLD_MODULES = {
    **dict.fromkeys(("attention.query_key_value", "self_attention.query_key_value"), QKV),
    **dict.fromkeys(("attention.dense", "self_attention.dense"), PROJECTION),
    "input_norm": "input_layernorm",
    **dict.fromkeys(("post_attention_norm", "post_attention_layernorm"), "pre_mlp_layernorm"),
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
WRAPPERS = re.compile(r"^(?:module\.|model\.)+")
OLD_STACK = re.compile(r"^language_model\.(?:encoder|transformer)\.")
OLD_LAYER = re.compile(r"^(decoder\.layers\.\d{1,9}\.)(.+)\.(weight|bias)$")
# Values that the model computes, or that only scale numbers of 8 bits
IGNORED = re.compile(r"(?:^|\.)(?:_extra_state(?:/.*)?|inv_freq|core_attention\..*_extra_state.*|position_ids)$")
# The name of the layer within one of `MTP_LAYER`, until core 0.16 and since
INNER = re.compile(r"^(mtp\.layers\.\d{1,9}\.)(?:transformer_layer|mtp_model_layer)\.")


def core_name(name: str) -> str:
    """The name of a tensor in Megatron core, from that in any version; unknown names are returned unchanged."""
    name = WRAPPERS.sub("", name)
    if name == "word_embeddings_for_head.weight" or name == "language_model.output_layer.weight":
        return HEAD
    if name.startswith("language_model.embedding."):
        return name.removeprefix("language_model.")
    if OLD_STACK.match(name):
        name = "decoder." + OLD_STACK.sub("", name)
        name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
        if match := OLD_LAYER.match(name):
            return f"{match[1]}{OLD_MODULES.get(match[2], match[2])}.{match[3]}"
    for fused, apart in FUSED_NORMS.items():
        name = name.replace(fused, apart)
    name = INNER.sub(r"\1", name).replace(".mlp.experts.local_experts.", ".mlp.experts.")
    return GROUPED.sub(r".mlp.experts.\3.\1.\2", name)


COMMON = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
LLAMA_LAYER = {
    **COMMON,
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.q": "self_attn.q_proj",
    "self_attention.k": "self_attn.k_proj",
    "self_attention.v": "self_attn.v_proj",
    PROJECTION: "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.{}.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up": "mlp.experts.{}.up_proj",
    "mlp.experts.{}.linear_fc2": "mlp.experts.{}.down_proj",
    "mlp.shared_experts.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared_experts.up": "mlp.shared_expert.up_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
GLM_LAYER = {
    **{name: target.replace("shared_expert.", "shared_experts.") for name, target in LLAMA_LAYER.items()},
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
DEEPSEEK_LAYER = {
    **GLM_LAYER,
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}
MIXTRAL_LAYER = {
    **LLAMA_LAYER,
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.{}.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.{}.linear_fc2": "block_sparse_moe.experts.{}.w2",
}
NEOX_LAYER = {
    **COMMON,
    "self_attention.qkv": "attention.query_key_value",
    PROJECTION: "attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.qkv": "attn.c_attn",
    PROJECTION: "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
Table = tuple[str, Mapping[str, str], Mapping[str, str]]
LLAMA_TABLE: Table = (
    "model.layers",
    LLAMA_LAYER,
    {EMBEDDING: "model.embed_tokens.weight", "decoder.final_layernorm.": "model.norm.", HEAD: "lm_head.weight"},
)
TABLES: dict[str, Table] = {
    "mixtral": ("model.layers", MIXTRAL_LAYER, LLAMA_TABLE[2]),
    "glm4_moe": ("model.layers", GLM_LAYER, LLAMA_TABLE[2]),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("model.layers", DEEPSEEK_LAYER, LLAMA_TABLE[2])),
    "gpt_neox": (
        "gpt_neox.layers",
        NEOX_LAYER,
        {
            EMBEDDING: "gpt_neox.embed_in.weight",
            "decoder.final_layernorm.": "gpt_neox.final_layer_norm.",
            HEAD: "embed_out.weight",
        },
    ),
    "gpt2": (
        "transformer.h",
        GPT2_LAYER,
        {
            EMBEDDING: "transformer.wte.weight",
            POSITIONS: "transformer.wpe.weight",
            "decoder.final_layernorm.": "transformer.ln_f.",
            HEAD: "lm_head.weight",
        },
    ),
}
"""By `model_type`: the stack of layers, names in a layer (of modules, `{}` for an expert, or tensors), and outside."""


def hugging_face_name(name: str, model_type: str, layers: int) -> str | None:
    """The name in transformers' files of a tensor with split matrices; None if the family has no such tensor.

    `name` is Megatron core's, with `self_attention.q`, `.k`, `.v` (or `.qkv`) and `mlp.gate`, `.up` after a split.
    Layers that predict later tokens follow the `layers` of the model, as in DeepSeek-V3 and GLM-4.5.
    """
    stack, layer, outside = TABLES.get(model_type, LLAMA_TABLE)
    more = MTP_LAYER.fullmatch(name)
    if not (match := more or LAYER.fullmatch(name)):
        return next(
            (
                target + name.removeprefix(own)
                for own, target in outside.items()
                if name == own or (own.endswith(".") and name in (f"{own}weight", f"{own}bias"))
            ),
            None,
        )
    number = int(match[1]) + (layers if more else 0)
    if match[2] in layer:
        return f"{stack}.{number}.{layer[match[2]]}"
    module, _, kind = match[2].rpartition(".")
    expert = re.search(r"(?<=\.experts\.)\d{1,9}(?=\.)", module)
    template = re.sub(r"(?<=\.experts\.)\d{1,9}(?=\.)", "{}", module)
    if kind not in ("weight", "bias") or template not in layer:
        return None
    return f"{stack}.{number}.{layer[template].format(expert[0] if expert else '')}.{kind}"


TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
VERL_STEP = "global_step_"  # begins the folders next to verl's file of that name
STEP_MODEL = "model"  # the folder of the model in a step of slime's runs with FSDP
ITERATION = re.compile(r"iter_(\d{7,12})")
RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?|tp_rank_(\d{2,5})_pp_rank_(\d{3,5})")
# A rank's file; the second if the distributed optimizer of 2022 kept its part elsewhere, the third in NeMo 1
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
BACKEND_FILE, COMMON_FILE = "metadata.json", "common.pt"
NEMO_CONFIG, NEMO_WEIGHTS, NEMO2_WEIGHTS, NEMO2_CONTEXT = "model_config.yaml", "model_weights", "weights", "context"
SMALL = 4096
VERSION_KEY = "checkpoint_version"  # A key of a rank's file that no other system has


@dataclass(frozen=True)
class Save:
    """One save in the folder `path`."""

    path: Path
    # the numbers in a rank's folder name (two or three; one where neither pipeline nor expert parallelism is used) to
    # its file; empty for a distributed checkpoint
    rank_files: Mapping[tuple[int, ...], Path]
    distributed: Path | None = None  # the folder of a distributed checkpoint; None where there are files of ranks
    nemo: Path | None = None  # the folder with NeMo's config; None for Megatron-LM


def is_save(path: Path) -> bool:
    """Whether `path` is a folder of Megatron or NeMo, the file of a rank, or its folder, which `find_save` refuses."""
    if not path.is_dir():
        return _is_rank_file(path)
    try:
        return (
            _is_rank_folder(path)
            or _is_place(path)
            or ((path / TRACKER).is_file() and not any(path.glob(f"{VERL_STEP}*")) and not plain_steps(path))
            or any(map(_is_place, _iterations(path)))
        )
    except PermissionError:  # llmconv looks into every given folder, which may contain anything
        return False


def _is_rank_file(path: Path) -> bool:
    try:
        content = open_torch_file(path).content if is_torch_file(path) else None
    except LlmconvError:
        return False
    return isinstance(content, dict) and VERSION_KEY in content and any(key in content for key in ("model", "model0"))


def _is_rank_folder(folder: Path) -> bool:
    is_named = RANK.fullmatch(folder.absolute().name) and not (folder / NEMO_CONFIG).is_file()
    return bool(is_named) and any((folder / name).is_file() for name in RANK_FILES)


def _is_place(folder: Path) -> bool:
    """Whether a folder is one save."""
    return bool(_ranks(folder)) or is_megatron_distributed(folder) or _nemo_weights(folder) is not None


def is_megatron_distributed(folder: Path) -> bool:
    """Whether `folder` is a distributed checkpoint that Megatron wrote, which torch's format leaves to this one."""
    return _backend(folder) is not None or (is_folder(folder) and (folder / COMMON_FILE).is_file())


def _backend(folder: Path) -> str | None:
    file = folder / BACKEND_FILE
    if not file.is_file() or file.stat().st_size > SMALL:
        return None
    backend = json_object(file.read_bytes()).get("sharded_backend")
    return backend if isinstance(backend, str) else None


def _ranks(folder: Path) -> dict[tuple[int, ...], Path]:
    """The numbers of each rank to its file."""
    found = {}
    for entry in sorted(folder.iterdir()):
        file = next((entry / name for name in RANK_FILES if (entry / name).is_file()), None)
        if file and (match := RANK.fullmatch(entry.name)):
            found[tuple(int(number) for number in match.groups() if number is not None)] = file
    return found


def _iterations(path: Path) -> list[Path]:
    return [
        entry
        for entry in sorted(path.iterdir())
        if entry.is_dir() and (ITERATION.fullmatch(entry.name) or entry.name == RELEASE)
    ]


def plain_steps(path: Path) -> dict[str, Path]:
    """The steps of a run of slime with FSDP by name: folders of torch's distributed checkpoints, none of Megatron's."""
    try:
        steps = {step.name: [one for one in (step, step / STEP_MODEL) if is_folder(one)] for step in _iterations(path)}
        return {name: found[0] for name, found in steps.items() if found and not is_megatron_distributed(path / name)}
    except PermissionError:  # as in `is_save`
        return {}


def named(word: str) -> str:
    """The name of a save from the word in the tracker's file, which is mostly its number."""
    return f"iter_{int(word):07d}" if word.isdecimal() and len(word) < 13 else word


def _nemo_weights(folder: Path) -> Path | None:
    """The folder of weights in an unpacked NeMo checkpoint; None if it is none."""
    if (folder / NEMO2_CONTEXT).is_dir() and is_folder(folder / NEMO2_WEIGHTS):
        return folder / NEMO2_WEIGHTS
    if not (folder / NEMO_CONFIG).is_file():
        return None
    single = next((folder for name in RANK_FILES if (folder / name).is_file()), None)
    return folder / NEMO_WEIGHTS if (folder / NEMO_WEIGHTS).is_dir() else single


def find_save(path: Path) -> Save:
    """The save at `path`: the newest of a run, or the one in the tracker file.

    Raises InputRefused for several saves without it or the folder of one rank, MalformedInput if there is none, or not
    the tracked one, UnsupportedInput for a container that is not read.
    """
    if path.is_file():
        match = RANK.fullmatch(path.parent.name)
        numbers = tuple(int(number) for number in (match.groups() if match else ()) if number is not None)
        return Save(path.parent, {numbers or (0,): path})
    if _is_rank_folder(path):
        above = path.parent if path.name else path.absolute().parent  # `.` has no name
        raise InputRefused(
            f"`{path.absolute().name}` is the folder of one rank of a Megatron save",
            hint=f"give the folder above it: `{above}`",
        )
    folder = path
    if not _is_place(path):
        saves = {entry.name: entry for entry in _iterations(path) if _is_place(entry)}
        folder = tracked(path, saves, path / TRACKER, named)
    if (weights := _nemo_weights(folder)) and weights != folder:
        _refuse_other_backends(weights)
        return Save(folder, {}, weights, folder)
    if is_megatron_distributed(folder):
        _refuse_other_backends(folder)
        return Save(folder, {}, folder)
    if weights == folder and not _ranks(folder):
        file = next(folder / name for name in RANK_FILES if (folder / name).is_file())
        return Save(folder, {(0,): file}, nemo=folder)
    ranks = _ranks(folder)
    if len({len(numbers) for numbers in ranks}) > 1:
        raise MalformedInput(
            f"`{folder.name}` contains ranks of two runs: {listing([file.parent.name for file in ranks.values()])}",
            hint="two saves were written into one folder; keep the folders of one of them",
        )
    return Save(folder, ranks, nemo=folder if (folder / NEMO_CONFIG).is_file() else None)


def _refuse_other_backends(folder: Path) -> None:
    backend = _backend(folder)
    if backend not in (None, "torch_dist"):
        raise UnsupportedInput(
            f"`{folder.name}` is a distributed checkpoint in the format `{backend[:40] if backend else backend}`",
            hint="load it with a Megatron core that has it (zarr: up to 0.12), and save it as `torch_dist`",
        )


@dataclass(frozen=True)
class RunState:
    """The model of an opened checkpoint."""

    # Megatron core's name, with the layer's number in the whole model, to the whole tensor; gate and up rows of a gated
    # feed-forward follow each other, rows of queries, keys and values alternate by group
    tensors: Mapping[str, LazyTensor]
    shards: int  # number of files with weights
    version: str  # of the layout, for `inspect`
    dropped: tuple[str, ...] = ()  # as in Checkpoint
