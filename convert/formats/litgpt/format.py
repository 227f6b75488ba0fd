"""LitGPT: `lit_model.pth` next to `model_config.yaml`, with the tokenizer and often the `config.json` of the origin.

Layout (Lightning-AI/litgpt `utils.py`, `save_config`, `copy_config_files`): a state dict, flat or under `model`.
Without a `config.json` one is made from the YAML; otherwise the two must agree. Names (`model.py`,
`scripts/convert_lit_checkpoint.py`) have a table per family. Rows of `attn.qkv` are all queries, all keys, all values;
of `attn.attn`, its name until the end of 2024, the queries, key and value of one group after the other.

LoRA (`lora.py`): `lit_model.pth.lora` next to `hyperparameters.yaml`: `<module>.lora_A` [r, in], `.lora_B` [out, r],
scale lora_alpha/lora_r; in the fused `attn.qkv` A stacks one matrix for each trained part (queries, keys, values), and
B stacks their rows, each part in its own order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.adapters import other_tools
from llmconv.convert.adapters.adapter import Adapter
from llmconv.convert.algebra import concat, deal_rows, fitting, fuse, interleave_rows, renamed, slice_rows
from llmconv.convert.assembly import config_folder, contents_around, second_models, side_files_of, stored_config
from llmconv.convert.formats import AdapterFormat, Format, has_sign_of
from llmconv.convert.formats.litgpt import config as configs
from llmconv.convert.models.completeness import WRAPPERS, as_loaded
from llmconv.convert.models.config_file import causal_lm_config, read_config_file
from llmconv.convert.state_dicts.files import Sign, require_state
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.not_a_model_folder import litgpt_prompts
from llmconv.tensors import LazyTensor

FUSED = ("gpt_neox", "falcon")
"""Families that fuse queries, keys and values group by group, as LitGPT did until the end of 2024."""


def to_hugging_face(
    stored: Mapping[str, LazyTensor], lit: configs.LitConfig, family: str, source: str
) -> dict[str, LazyTensor]:
    """The model's tensors in Hugging Face's names, split and joined lazily; MalformedInput for wrong keys or shapes."""
    if lit.n_layer * max(1, lit.n_expert) > len(stored):
        raise MalformedInput(
            f"`{source}` holds {len(stored)} tensors, too few for {lit.n_layer} layers",
            hint="`model_config.yaml` belongs to another model, or the checkpoint is partial",
        )
    current = {_new_name(name): tensor for name, tensor in stored.items()}
    if len(current) != len(stored):
        raise MalformedInput(
            f"duplicate key in `{source}`: a fused matrix has both its old and its new name",
            hint="two checkpoints are mixed in one file",
        )
    # everything else is compared with the model of the configuration afterwards
    fused = {name: tensor for name, tensor in stored.items() if ".attn.qkv." in _new_name(name)}
    odd = [name for name, tensor in fused.items() if tensor.num_rows != lit.n_query_groups * sum(group_counts(lit))]
    if odd:
        raise MalformedInput(
            f"shape mismatch in `{source}` for {len(odd)} fused matrices: {listing(odd)}",
            hint="`model_config.yaml` belongs to another model, or the weights contain adapters that are not merged",
        )
    by_group = any(_new_name(name) != name for name in stored)
    parts: dict[str, LazyTensor] = {}
    for name, tensor in current.items():
        stem, dot, kind = name.rpartition(".")
        if not stem.endswith(".attn.qkv") or family in FUSED and by_group:
            parts[name] = tensor
        else:
            qkv = deal_rows(tensor, [count if by_group else count * lit.n_query_groups for count in group_counts(lit)])
            if family in FUSED:
                parts[name] = interleave_rows(qkv, group_counts(lit))
            elif family == "phi3":
                parts[name] = concat(qkv, 0)
            else:
                root = stem.removesuffix("qkv")
                parts |= {f"{root}{one}{dot}{kind}": part for one, part in zip("qkv", qkv, strict=True)}
    if family == "phi3":
        with fitting(f"gate and up of `{source}` cannot be joined", "copy the checkpoint again"):
            parts = fuse(parts, ("mlp.fc_1", "mlp.fc_2"), "mlp.fc")
    return renamed(parts, table_of(lit, family), source)


def _new_name(name: str) -> str:
    return name.replace(".attn.attn.", ".attn.qkv.")


def group_counts(lit: configs.LitConfig) -> tuple[int, int, int]:
    """Number of rows of queries, key and value in one group."""
    return lit.n_head // lit.n_query_groups * lit.head_size, lit.head_size, lit.head_size


LAYER = "transformer.h.{}"


def _table(layer: str, modules: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, str | None]:
    """Names of the weights and biases of a layer's modules, and of those outside the layers."""
    pairs = {f"{LAYER}.{source}": f"{layer}.{target}" for source, target in modules.items()} | dict(outer)
    return {f"{source}.{kind}": f"{target}.{kind}" for source, target in pairs.items() for kind in ("weight", "bias")}


MLP = {"mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}
QKV = {f"attn.{one}": f"self_attn.{one}_proj" for one in "qkv"}
NORMS = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
OUTER = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
LLAMA = _table(
    "model.layers.{}",
    {
        **NORMS,
        **QKV,
        **MLP,
        "attn.proj": "self_attn.o_proj",
        "attn.norm_q": "self_attn.q_norm",
        "attn.norm_k": "self_attn.k_norm",
        "mlp.gate": "block_sparse_moe.gate",
    },
    OUTER,
)
GEMMA2 = LLAMA | {
    f"{LAYER}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    f"{LAYER}.norm_2.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    f"{LAYER}.post_mlp_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
PHI3 = LLAMA | {
    f"{LAYER}.attn.qkv.weight": "model.layers.{}.self_attn.qkv_proj.weight",
    f"{LAYER}.mlp.fc.weight": "model.layers.{}.mlp.gate_up_proj.weight",
}
PHI = _table(
    "model.layers.{}",
    {**QKV, "norm_1": "input_layernorm", "attn.proj": "self_attn.dense", "mlp.fc": "mlp.fc1", "mlp.proj": "mlp.fc2"},
    OUTER | {"transformer.ln_f": "model.final_layernorm"},
)
DENSE = {"mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}
NEOX = _table(
    "gpt_neox.layers.{}",
    {**NORMS, **DENSE, "attn.qkv": "attention.query_key_value", "attn.proj": "attention.dense"},
    {"transformer.wte": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out"},
)
FALCON_ATTENTION = {"attn.qkv": "self_attention.query_key_value", "attn.proj": "self_attention.dense"}
FALCON_OUTER = {
    "transformer.wte": "transformer.word_embeddings",
    "transformer.ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
}
FALCON = _table(LAYER, {**DENSE, **FALCON_ATTENTION, "norm_1": "input_layernorm"}, FALCON_OUTER)
FALCON_40B = _table(LAYER, {**DENSE, **FALCON_ATTENTION, "norm_1": "ln_attn", "norm_2": "ln_mlp"}, FALCON_OUTER)

TABLES = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
    "olmo2": GEMMA2,
    "phi3": PHI3,
    "phi": PHI,
    "gpt_neox": NEOX,
    "falcon": FALCON,
}


def table_of(lit: configs.LitConfig, family: str) -> dict[str, str | None]:
    """LitGPT's names to those of `family`, with the experts of `lit`."""
    if family == "falcon" and not lit.shared_attention_norm:
        return FALCON_40B
    table, moe = TABLES.get(family, LLAMA), "model.layers.{}.block_sparse_moe"
    if family == "qwen3_moe":
        table = table | {f"{LAYER}.mlp.gate.weight": "model.layers.{}.mlp.gate.weight"}
        experts: dict[str, str | None] = {
            f"{LAYER}.mlp.experts.{number}.{source}.weight": f"model.layers.{{}}.mlp.experts.{number}.{target}.weight"
            for number in range(lit.n_expert)
            for source, target in (("fc_1", "gate_proj"), ("fc_2", "up_proj"), ("proj", "down_proj"))
        }
        return table | experts
    experts = {
        f"{LAYER}.mlp.experts.{number}.{source}.weight": f"{moe}.experts.{number}.{target}.weight"
        for number in range(lit.n_expert)
        for source, target in (("fc_1", "w1"), ("fc_2", "w3"), ("proj", "w2"))
    }
    return table | experts


FILE = "lit_model.pth"
ADAPTERS = ("lora_", "adapter_", "gating_factor")
HEADS = ("lm_head.weight", "embed_out.weight")
OWN_NAMES = re.compile(  # names that no other system has (its `model.py`)
    r"^(?:_orig_mod\.|module\.|_forward_module\.)*transformer\.h\.\d+\.(?:attn\.(?:attn|qkv)|norm_[12])\."
)


def _file(path: Path) -> Path:
    return path / FILE if path.is_dir() else path


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    if problem := litgpt_prompts(path):
        raise problem
    found = require_state(_file(path))
    warnings = second_models(found)
    if names := [name for name in found.state if any(part in name for part in ADAPTERS)]:
        raise UnsupportedInput(
            f"`{path.name}` holds adapters that are not merged: {listing(names)}",
            hint="LoRA: merge it into the converted base, `llmconv merge-lora BASE lit_model.pth.lora -o OUT`; the "
            "other adapters have no equivalent in transformers",
        )
    lit = configs.read_settings(config_folder(path), path.name)
    stored = configs.text_part(stored_config(path))
    family, declared = configs.family_of(lit, path.name), stored.get("model_type")
    if declared in configs.SAME_FUNCTION.get(family, ()):  # the `config.json` decides, if it computes the same
        family = str(declared)
    computed = configs.to_config(lit, family, path.name)
    settings = causal_lm_config(configs.reconcile(stored, computed, path.name, warnings), config, path.name, warnings)
    plain = {unwrapped(name): tensor for name, tensor in found.tensors().items()}
    tensors = to_hugging_face(plain, lit, family, path.name)
    settings["tie_word_embeddings"] = None  # LitGPT always keeps two matrices: their values decide
    settings = as_loaded(tensors, settings)
    side_files = side_files_of(path, tokenizer)
    if not set(side_files) - {"generation_config.json"}:
        warnings.append(f"`{path.name}` has no tokenizer next to it; give one with `--tokenizer` if you need it")
    version = "litgpt before 2025" if any(".attn.attn." in name for name in found.state) else "litgpt"
    return Checkpoint(
        path, FORMAT.name, tensors, settings, side_files, tuple(warnings), version, 1, contents_around(found)
    )


def unwrapped(name: str) -> str:
    """The name without what trainers put before it."""
    return WRAPPERS.sub("", name)


FORMAT = Format(
    name="litgpt",
    title="LitGPT: `lit_model.pth` next to `model_config.yaml`, or the folder of both",
    detect=lambda path: has_sign_of("litgpt", _file(path)),
    sign=Sign(names=OWN_NAMES),
    open=_open,
    covers="Llama 2 and 3, Code Llama, TinyLlama, Mistral, Mixtral, Phi 1.5 to 4, Qwen 2, 2.5 and 3 (also MoE), "
    "Gemma 1 to 3 (text), Pythia, Falcon, OLMo 1 and 2, StableLM; fused matrices of both ages",
    peek=lambda path: require_state(_file(path)).tensors(),
)


LORA_FILE, HYPERPARAMETERS = "lit_model.pth.lora", "hyperparameters.yaml"
FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])")
FUSED_FACTOR = re.compile(r"(?P<root>.+\.attn)\.(?:qkv|attn)\.(?P<part>lora_[AB])")
PARTS = {"q": "lora_query", "k": "lora_key", "v": "lora_value"}
TRAINED = {"lora_query": True, "lora_key": False, "lora_value": True}
"""The parts of the fused matrix that `litgpt finetune lora` trains by default."""


def open_litgpt_adapter(path: Path, base: Checkpoint, alpha: float | None = None) -> Adapter:
    """Opens a LitGPT LoRA, the file or its folder; `alpha` is for one without `hyperparameters.yaml`.

    Raises InputRefused for a missing file, MalformedInput for another base, UnsupportedInput for another family.
    """
    file = path / LORA_FILE if path.is_dir() else path
    lit, source = configs.read_settings(file.parent, file.name), file.parent.name
    family, kind = configs.family_of(lit, source), str(base.config.get("model_type"))
    if kind != family and kind not in configs.SAME_FUNCTION.get(family, ()):
        raise UnsupportedInput(
            f"`{source}` was trained on a {family}, the base is a {kind[:40]}",
            hint="give the base that the adapter was trained on",
        )
    if lit.n_expert > len(base):
        raise MalformedInput(
            f"`{source}` declares {lit.n_expert} experts, more than the base has tensors",
            hint="`model_config.yaml` belongs to another model; copy the adapter's folder again",
        )
    settings = file.parent / HYPERPARAMETERS
    hyperparameters = read_config_file(settings) if settings.is_file() else {}
    tensors = {unwrapped(name): tensor for name, tensor in require_state(file).tensors().items()}
    table = table_of(lit, kind)
    if left := sorted(name for name in tensors if not FACTOR.fullmatch(name)):
        raise other_tools.unplaced(
            left, [f"{name.removesuffix('.weight')}.lora_A" for name in table], source, "LitGPT's LoRA"
        )
    factors = other_tools.pair_up(_split_fused(tensors, hyperparameters, lit, source), FACTOR, source)
    if kind in (*FUSED, "phi3"):  # the base fuses several modules
        attention, counts = [lit.n_head * lit.head_size, *[lit.n_query_groups * lit.head_size] * 2], group_counts(lit)
        factors = other_tools.join_modules(
            factors,
            ("attn.q", "attn.k", "attn.v"),
            "attn.qkv",
            attention,
            source,
            lambda parts: interleave_rows(parts, counts) if kind in FUSED else concat(parts, 0),
        )
    if kind == "phi3":
        sides = (lit.intermediate_size, lit.intermediate_size)
        factors = other_tools.join_modules(factors, ("mlp.fc_1", "mlp.fc_2"), "mlp.fc", sides, source)
    placed = other_tools.renamed(factors, table, source, "LitGPT's LoRA")
    for module, own in placed.items():  # without the rows of the head with which LitGPT pads the vocabulary
        weight = base.get(f"{module}.weight")
        if weight is not None and weight.num_rows < own.b.num_rows == lit.padded_vocab_size:
            placed[module] = own.with_rows(partial(slice_rows, start=0, stop=weight.num_rows))
    names = {"r": "lora_r", "lora_alpha": "lora_alpha"}
    fields = {name: hyperparameters[old] for name, old in names.items() if old in hyperparameters}
    return other_tools.as_adapter([file], settings if settings.is_file() else None, fields, placed, alpha)


def _split_fused(
    tensors: Mapping[str, LazyTensor], hyperparameters: Mapping[str, Any], lit: configs.LitConfig, source: str
) -> dict[str, LazyTensor]:
    """Splits the factors of fused matrices into `attn.q`, `attn.k` and `attn.v`; the others stay."""
    rows = [lit.n_head * lit.head_size, *[lit.n_query_groups * lit.head_size] * 2]
    parts = zip(PARTS.items(), rows, strict=True)
    trained = [(one, size) for (one, name), size in parts if hyperparameters.get(name, TRAINED[name])]
    apart: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if not (match := FUSED_FACTOR.fullmatch(name)):
            apart[name] = tensor
            continue
        sizes = [size for _, size in trained]
        if match["part"] == "lora_A":
            sizes = [tensor.num_rows // max(1, len(trained))] * len(trained)
        if not tensor.shape or sum(sizes) != tensor.num_rows or not trained:
            raise MalformedInput(
                f"`{name}` of `{source}` has {tensor.num_rows} rows, which do not match "
                f"{', '.join(PARTS[one] for one, _ in trained) or 'nothing'}",
                hint=f"copy `{HYPERPARAMETERS}` of the run next to it; it lists the trained parts of the fused matrix",
            )
        for (one, _), start, size in zip(trained, accumulate(sizes, initial=0), sizes, strict=False):
            apart[f"{match['root']}.{one}.{match['part']}"] = slice_rows(tensor, start, start + size)
    return apart


ADAPTER = AdapterFormat(
    "LitGPT (`lit_model.pth.lora` next to `hyperparameters.yaml`)",
    lambda path: (path / LORA_FILE).is_file() if path.is_dir() else path.name == LORA_FILE and path.is_file(),
    open_litgpt_adapter,
)
