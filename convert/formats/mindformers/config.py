"""The configuration of a MindFormers run: `model.model_config` of its YAML, or plain fields of the same names.

Source: mindformers `models/*/*_config.py` (names and defaults) and `configs/*/*.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.convert.adapters.low_rank_sum import LoraProduct, add_products
from llmconv.convert.adapters.other_tools import LayerSizes, pair_up
from llmconv.convert.algebra import deal_rows, fitting
from llmconv.convert.fields import Fields
from llmconv.convert.models.config_file import OPTION, read_config_file
from llmconv.convert.models.model_config import ModelSettings
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor

OPTIONS = ("qkv_layout", "strategy", OPTION)
LAYER_LIMIT = 10_000  # more layers than any model has; a loop over them must end


@dataclass(frozen=True)
class RunConfig(Fields):
    """The fields of `model_config`, with those that the user adds."""

    hint: str = "the configuration belongs to another model; give the YAML file of the run with `--config`"
    arch: str = ""  # class of the model, such as `LlamaForCausalLM`; empty where it is unknown
    lora: Mapping[str, Any] = field(default_factory=dict)  # `pet_config`, the LoRA settings of the run
    file_name: str = ""  # of the YAML file next to the checkpoint; empty where the user gives the configuration

    def get(self, *names: str, default: Any = None) -> Any:
        """As of any fields, with numbers that YAML 1.1 reads as text (`1e-5`); InputRefused if a required one lacks."""
        if (value := super().get(*names, default=default)) is None:
            raise InputRefused(
                f"the configuration of `{self.source}` has no `{names[0]}`",
                hint="give the run's YAML with `--config run.yaml`, and its `pretrained_model_dir` if it has one",
            )
        with suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def layers(self, *names: str, default: int | None = None) -> int:
        """The number of layers, under the first of `names` (`num_layers` if there are none)."""
        return self.count(*(names or ("num_layers",)), default=default, most=LAYER_LIMIT)

    def tokens(self, **defaults: int | None) -> dict[str, Any]:
        """The special token ids, such as `bos_token_id`, that are set or have a default."""
        found = {name: self.values.get(name, default) for name, default in defaults.items()}
        lists = {name: value if isinstance(value, list) and value else [value] for name, value in found.items()}
        return {name: found[name] for name, ids in lists.items() if all(type(one) is int and one >= 0 for one in ids)}


WHOLE = {"model", "architectures", "num_layers", "num_hidden_layers"}
"""Any of these fields makes a configuration complete, rather than a few fields that the user adds."""


def read_run_config(path: Path, given: Mapping[str, Any]) -> RunConfig:
    """The only YAML next to a checkpoint, and the user's fields; a whole configuration of the user's replaces it."""
    file_name, run = ("", given) if {*given} & WHOLE else _run_yaml(path)
    run = {**run, **given}
    model = _section(run, "model")
    # fields next to `model` are from elsewhere: added by the user, or from a `config.json`
    fields = {**_section(model, "model_config"), **{name: value for name, value in run.items() if name != "model"}}
    classes = run.get("architectures")
    arch = str(_section(model, "arch").get("type") or (classes[0] if isinstance(classes, list) and classes else ""))
    lora = {**_section(model, "pet_config"), **_section(fields, "pet_config")}
    lora |= {name: run[name] for name in ("lora_alpha", "lora_rank") if name in run}
    return RunConfig(fields, path.name, arch=arch, lora=lora, file_name=file_name)


def _section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}


def _run_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and content of the run's YAML file, if exactly one lies in the folder (or next to the file)."""
    folder = path if path.is_dir() else path.parent
    runs = []
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")):
        try:
            content = read_config_file(file)
        except MalformedInput:  # a YAML file of something else: the user did not name it
            continue
        if _section(_section(content, "model"), "model_config"):
            runs.append((file.name, content))
    return runs[0] if len(runs) == 1 else ("", {})


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _llama_names(root: str, embedding: str, norm: str, gate: str, up: str) -> dict[str, str | None]:
    """The table of one Llama-like model; the models differ in a few words only."""
    layer, target = f"{root}.layers.{{}}", "model.layers.{}"
    names: dict[str, str | None] = {
        f"{root}.{embedding}.embedding_weight": EMBEDDING,
        f"{root}.{embedding}.embedding_table": EMBEDDING,
        f"{layer}.attention_norm.weight": f"{target}.input_layernorm.weight",
        f"{layer}.ffn_norm.weight": f"{target}.post_attention_layernorm.weight",
        f"{layer}.feed_forward.{gate}.weight": f"{target}.mlp.gate_proj.weight",
        f"{layer}.feed_forward.{up}.weight": f"{target}.mlp.up_proj.weight",
        f"{layer}.feed_forward.w2.weight": f"{target}.mlp.down_proj.weight",
        f"{root}.{norm}.weight": "model.norm.weight",
        "lm_head.weight": HEAD,
    }
    for kind in ("weight", "bias"):
        names |= {f"{layer}.attention.w{part}.{kind}": f"{target}.self_attn.{part}_proj.{kind}" for part in "qkvo"}
    return names


LLAMA = _llama_names("model", "tok_embeddings", "norm_out", "w1", "w3")


# Qwen computes w1(x)·silu(w3(x)): its gate is w3 (research/qwen/qwen_model.py, QwenFeedForward)
QWEN = _llama_names("transformer", "wte", "ln_f", "w3", "w1")


CORE: dict[str, str | None] = {  # names since 1.6, which are Megatron's (`toolkit/weight_convert/qwen3`)
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": HEAD,
    "decoder.layers.{}.input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
    "decoder.layers.{}.pre_mlp_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "decoder.layers.{}.self_attention.q_layernorm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "decoder.layers.{}.self_attention.k_layernorm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "decoder.layers.{}.mlp.gating.weight": "model.layers.{}.mlp.gate_proj.weight",
    "decoder.layers.{}.mlp.hidden.weight": "model.layers.{}.mlp.up_proj.weight",
    "decoder.layers.{}.mlp.linear_fc2.weight": "model.layers.{}.mlp.down_proj.weight",
    **{
        f"decoder.layers.{{}}.self_attention.linear_{source}.{kind}": f"model.layers.{{}}.self_attn.{part}_proj.{kind}"
        for source, part in (("q", "q"), ("k", "k"), ("v", "v"), ("proj", "o"))
        for kind in ("weight", "bias")
    },
}

GLM_LAYER = "transformer.encoder.layers.{}"
GLM: dict[str, str | None] = {
    "transformer.embedding.embedding_weight": EMBEDDING,
    "transformer.embedding.embedding_table": EMBEDDING,
    "transformer.embedding.word_embeddings.embedding_weight": EMBEDDING,
    "transformer.embedding.word_embeddings.embedding_table": EMBEDDING,
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": HEAD,
    f"{GLM_LAYER}.input_layernorm.weight": "model.layers.{}.input_layernorm.weight",
    f"{GLM_LAYER}.post_attention_layernorm.weight": "model.layers.{}.post_attention_layernorm.weight",
    f"{GLM_LAYER}.self_attention.dense.weight": "model.layers.{}.self_attn.o_proj.weight",
    f"{GLM_LAYER}.mlp.dense_h_to_4h.weight": "model.layers.{}.mlp.gate_up_proj.weight",
    f"{GLM_LAYER}.mlp.dense_left.weight": "model.layers.{}.mlp.gate_proj.weight",
    f"{GLM_LAYER}.mlp.dense_right.weight": "model.layers.{}.mlp.up_proj.weight",
    f"{GLM_LAYER}.mlp.dense_4h_to_h.weight": "model.layers.{}.mlp.down_proj.weight",
}
for _kind in ("weight", "bias"):
    GLM[f"{GLM_LAYER}.self_attention.query_key_value.{_kind}"] = f"model.layers.{{}}.self_attn.query_key_value.{_kind}"
    for _part in "qkv":
        GLM[f"{GLM_LAYER}.self_attention.w{_part}.{_kind}"] = f"model.layers.{{}}.self_attn.{_part}_proj.{_kind}"

DENSE = ("dense1", "dense2", "dense3")  # Queries, keys and values


def _linear_names(root: str, modules: dict[str, str]) -> dict[str, str | None]:
    """A table for modules that all have a weight and a bias (`gamma` and `beta` where they are norms)."""
    names: dict[str, str | None] = {}
    for source, target in modules.items():
        pairs = (("gamma", "weight"), ("beta", "bias")) if "norm" in source or "ln_f" in source else ()
        for old, new in pairs or (("weight", "weight"), ("bias", "bias")):
            names[f"{root}{source}.{old}"] = f"{target}.{new}"
    return names


GPT2 = _linear_names(
    "backbone.",
    {
        "blocks.{}.layernorm1": "transformer.h.{}.ln_1",
        "blocks.{}.layernorm2": "transformer.h.{}.ln_2",
        **{f"blocks.{{}}.attention.{part}": f"transformer.h.{{}}.attn.{part}" for part in DENSE},
        "blocks.{}.attention.projection": "transformer.h.{}.attn.c_proj",
        "blocks.{}.output.mapping": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.output.projection": "transformer.h.{}.mlp.c_proj",
        "layernorm": "transformer.ln_f",
    },
) | {
    "backbone.embedding.word_embedding.embedding_table": "transformer.wte.weight",
    "backbone.embedding.position_embedding.embedding_table": "transformer.wpe.weight",
}

BLOOM = _linear_names(
    "",
    {
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "blocks.{}.layernorm1": "transformer.h.{}.input_layernorm",
        "blocks.{}.layernorm2": "transformer.h.{}.post_attention_layernorm",
        **{f"blocks.{{}}.attention.{part}": f"transformer.h.{{}}.self_attention.{part}" for part in DENSE},
        "blocks.{}.attention.projection": "transformer.h.{}.self_attention.dense",
        "blocks.{}.output.mapping": "transformer.h.{}.mlp.dense_h_to_4h",
        "blocks.{}.output.projection": "transformer.h.{}.mlp.dense_4h_to_h",
        "ln_f": "transformer.ln_f",
    },
) | {"embedding.word_embedding.embedding_table": "transformer.word_embeddings.weight"}


# ChatGLM-6B (`models/glm/convert_reversed.py`); the rotary frequencies are computed
CHATGLM_6B: dict[str, str | None] = {
    "transformer.word_embeddings.embedding_table": "transformer.word_embeddings.weight",
    "transformer.word_embeddings.weight": "transformer.word_embeddings.weight",
    "lm_head.weight": HEAD,
    **{
        f"transformer.{norm}.{old}": f"transformer.{norm}.{new}"
        for norm in ("layers.{}.input_layernorm", "layers.{}.post_attention_layernorm", "final_layernorm")
        for old, new in (("gamma", "weight"), ("beta", "bias"))
    },
    **{
        name: name
        for part in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        for name in (f"transformer.layers.{{}}.{part}.weight", f"transformer.layers.{{}}.{part}.bias")
    },
    "transformer.layers.{}.attention.rotary_emb.inv_freq": None,
}
LAYOUTS = ("plain", "interleaved")


FUSED = (  # names of the fused matrices, with those of their parts: queries, keys and values, or gate and up
    (re.compile(r"(.+\.attention)\.(?:w_qkv|w)\.(weight|bias)"), ("wq", "wk", "wv")),
    (re.compile(r"(.+\.feed_forward)\.w_gate_hidden\.(weight|bias)"), ("w1", "w3")),
    (re.compile(r"(.+\.self_attention)\.linear_qkv\.(weight|bias)"), ("linear_q", "linear_k", "linear_v")),
    (re.compile(r"(.+\.mlp)\.linear_fc1\.(weight|bias)"), ("gating", "hidden")),
)


def unfuse(run: RunConfig, tensors: Mapping[str, LazyTensor], heads: LayerSizes) -> dict[str, LazyTensor]:
    """Splits the `FUSED` tensors, such as `w_qkv` (in 1.0 `w`) into `wq`, `wk` and `wv`; the others stay.

    Until 1.4 the parts follow each other; since 1.5 each key/value head follows its queries, and gate and up rows
    alternate (mindformers `utils/convert_utils.py`, `qkv_concat_hf2mg`, `ffn_concat_hf2mg`), under the same names. If
    names do not decide, the run's `qkv_layout` does (else InputRefused); MalformedInput for a wrong number of rows.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        found = next(((match, parts) for sign, parts in FUSED if (match := sign.fullmatch(name))), None)
        if found is None:
            result[name] = tensor
            continue
        match, parts = found
        layout = layout_of(run, name)
        with fitting(f"`{name}` of `{run.source}` cannot be split"):
            if len(parts) == 3:
                rows = split_qkv(tensor, heads, layout)
            else:  # gate and up
                rows = deal_rows(tensor, [tensor.num_rows // 2 if layout == "plain" else 1] * 2)
        result |= {f"{match[1]}.{part}.{match[2]}": tensor for part, tensor in zip(parts, rows, strict=True)}
    return result


def layout_of(run: RunConfig, name: str) -> str:
    """`plain` or `interleaved`, from names, the class of the model, or the user's `qkv_layout` (else InputRefused)."""
    if ".linear_" in name:  # Megatron's names exist since 1.6 only
        return "interleaved"
    if ".attention.w." in name and run.arch:  # Llama's in 1.0 only; InternLM2 has its own order, which never changed
        return "interleaved" if run.arch.startswith("InternLM2") else "plain"
    asked = run.values.get("qkv_layout")
    if asked in LAYOUTS:
        return str(asked)
    raise InputRefused(
        f"`{run.source}` holds fused matrices (`{name}`), and the file does not contain the order of their rows",
        hint="give `--qkv-layout plain` if MindFormers up to 1.4 wrote it, `--qkv-layout interleaved` since 1.5",
    )


def split_qkv(tensor: LazyTensor, heads: LayerSizes, layout: str) -> list[LazyTensor]:
    """Queries, keys, values of [(queries + 2 keys) * dim, …] in a layout of `LAYOUTS`; ValueError for other sizes."""
    rows = heads.attention
    if tensor.num_rows != sum(rows):
        raise ValueError(f"expected {sum(rows)} rows, got {tensor.num_rows}")
    return deal_rows(tensor, rows if layout == "plain" else [count // heads.keys for count in rows])


@dataclass(frozen=True)
class ConvertedModel:
    """A model in Hugging Face names: tensors, content of `config.json`, and warnings for the user."""

    tensors: dict[str, LazyTensor]
    config: dict[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MindFormersModel:
    """A model in MindFormers' names: tensors, class of the model, and the fields of its `model_config`."""

    tensors: dict[str, LazyTensor]
    arch: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class MindFormersFamily:
    """The conversion of one model family in both directions."""

    sign: re.Pattern[str]  # matches a tensor name that only this family has
    names: Mapping[str, str | None]  # of its tensors, to those of Hugging Face; fused ones aside
    # MindFormers' tensors to Hugging Face's, and back by `model_type`: ValueError for a wrong shape
    build: Callable[[RunConfig, dict[str, LazyTensor]], ConvertedModel]
    store: Mapping[str, Callable[[ModelSettings, dict[str, LazyTensor], str], MindFormersModel]] = field(
        default_factory=dict
    )


def heads_of(run: RunConfig, hidden: int) -> LayerSizes:
    """The head sizes in the configuration; MalformedInput if they contradict the hidden size."""
    queries = run.count("num_heads", "num_attention_heads")
    keys = run.count("n_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_query_groups", default=queries)
    dim = run.count("head_dim", "kv_channels", default=max(1, hidden // queries))
    if queries % keys or ("head_dim" not in run.values and "kv_channels" not in run.values and queries * dim != hidden):
        raise MalformedInput(
            f"{queries} heads and {keys} key/value heads do not match the hidden size {hidden} of `{run.source}`",
            hint="the configuration belongs to another model; give the YAML file of the run with `--config`",
        )
    return LayerSizes(queries, keys, dim)


def finish(run: RunConfig, tensors: dict[str, LazyTensor], config: dict[str, Any]) -> ConvertedModel:
    """With `tie_word_embeddings` in the config: the run's without an output head, else null, and its values decide."""
    tied = run.flag("tie_word_embeddings") if HEAD not in tensors else None
    return ConvertedModel(tensors, {**config, "tie_word_embeddings": tied})


def refuse_model(run: RunConfig, what: str, reason: str) -> UnsupportedInput:
    """The error for a model (`what`) that transformers cannot express exactly; `reason` is the difference."""
    return UnsupportedInput(
        f"`{run.source}` is {what}, which has no exact equal in transformers: {reason}",
        hint="convert it with MindFormers' own `convert_weight.py --reversed` and run it with the model's own code",
    )


def require_embedding(run: RunConfig, embedding: LazyTensor | None) -> LazyTensor:
    """The word embedding, [vocabulary, hidden]; MalformedInput if there is none, or it is not a matrix."""
    if embedding is None or len(embedding.shape) != 2:
        raise MalformedInput(
            f"`{run.source}` has no embedding", hint="the checkpoint is partial, or of one pipeline stage"
        )
    return embedding


def check_embedding_sizes(run: RunConfig, embedding: LazyTensor) -> dict[str, int]:
    """`vocab_size` and `hidden_size` from the shape of the embedding; MalformedInput if the configuration differs."""
    sizes = dict(zip(("vocab_size", "hidden_size"), embedding.shape, strict=True))
    for name, size in sizes.items():
        if run.count(name, default=size) != size:
            raise MalformedInput(
                f"shape mismatch for the embedding of `{run.source}`: it is {list(embedding.shape)}, the configuration "
                f"declares `{name}` {run.count(name)}",
                hint="the configuration belongs to another model, or these are the shards of one rank",
            )
    return sizes


LORA = re.compile(r"(?P<module>.+)\.(?:mindpet_delta_|tk_delta_)?(?P<part>lora_[ab])(?:\.weight)?", re.IGNORECASE)
IN_OUT = re.compile(r"\.(?:projection|mapping)\.weight$")  # weights of gpt2 and bloom that are stored as [in, out]


def merge_lora(run: RunConfig, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Adds `B·A·alpha/r` (mindpet `LoRADense`), with a warning; InputRefused: no base, no alpha; MalformedInput."""
    plain, pairs = {n: t for n, t in tensors.items() if not LORA.fullmatch(n)}, pair_up(tensors, LORA, run.source)
    if not pairs:
        return plain, ()
    if not any(f"{module}.weight" in plain for module in pairs):
        raise InputRefused(
            f"`{run.source}` holds LoRA parameters only ({len(pairs)} pairs), without the base weights",
            hint="convert the full checkpoint of the run, which holds both, or merge them into the converted base: "
            "`llmconv merge-lora BASE FILE --alpha A -o OUT`",
        )
    if run.lora.get("lora_alpha") is None:
        raise InputRefused(
            f"`{run.source}` holds {len(pairs)} LoRA pairs, but its configuration has no `lora_alpha`",
            hint='give the YAML file of the run with its `pet_config`, or a JSON file such as `{"lora_alpha": 16}`',
        )
    alpha = RunConfig(run.lora, run.source).number("lora_alpha", least=-1e15)
    for module, pair in pairs.items():
        base, name = plain.get(f"{module}.weight"), f"{module}.weight"
        if base is None or IN_OUT.search(name):
            raise MalformedInput(
                f"the LoRA pair of `{name}` in `{run.source}` is incomplete or of an unsupported kind",
                hint="merge it first with MindFormers' `transform_ckpt_lora.py`",
            )
        shape = (pair.b.shape[0], pair.a.shape[1])
        if base.shape != shape or run.lora.get("lora_rank") not in (None, pair.rank):
            raise MalformedInput(
                f"shape mismatch for the LoRA pair of `{name}` in `{run.source}`: the weight is {list(base.shape)}, "
                f"B·A is {list(pair.b.shape)}·{list(pair.a.shape)}",
                hint="the pairs, or `lora_rank` of the configuration, belong to another run",
            )
        plain[name] = add_products(base, [LoraProduct(pair.a, pair.b, alpha / pair.rank)], base.dtype)
    return plain, (f"merged {len(pairs)} LoRA pairs with `lora_alpha` {alpha:g}",)
