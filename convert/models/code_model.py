"""Weights of a model with its own code: its Python files are copied, and its class defines which tensors it has.

The files are copied as data (`llmconv/model_code.py`). With the caller's consent (`TrustedCode`) they run once, on the
meta device, so that the stored names and shapes are compared with the model's before anything is written.

Baichuan-13B, Baichuan 2 13B and ChatGLM-6B are computed by their own code alone, which the caller gives with `--code`:
tensors get its names, those of the published `pytorch_model.bin.index.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import Checkpoint, parse_object
from llmconv.convert.algebra import fitting, fuse
from llmconv.convert.models.blueprint import check_floats, refuse_gaps, refuse_shapes
from llmconv.convert.models.completeness import check_complete, is_buffer
from llmconv.convert.models.config_file import OPTION, TrustedCode, localized, own_fields, without_code
from llmconv.errors import MalformedInput, UnsupportedInput, listing
from llmconv.model_code import AUTO_MAP, REPOSITORY, TOKENIZER_CONFIG, collect_code, holds, model_class, references
from llmconv.output.plan import json_bytes
from llmconv.tensors import BY_NAME, Array, LazyTensor

UNSTORED = (
    "the code computes {}, which no weights contain: transformers 5 loads such buffers without their values, unless "
    "`_init_weights` of the code computes them again; llmconv's own commands do"
)


def with_code(checkpoint: Checkpoint, code: TrustedCode, source: str) -> Checkpoint:
    """The checkpoint with the Python files of its configs (`auto_map`), compared with the model that they build.

    The caller trusts `code`. Raises MalformedInput for missing files (`collect_code`), keys or shapes, UnsupportedInput
    if the code does not build a model.
    """
    side_files = dict(checkpoint.side_files)
    tokenizer = parse_object(side_files.get(TOKENIZER_CONFIG, b"{}"), TOKENIZER_CONFIG)
    if code.given and AUTO_MAP in tokenizer:
        tokenizer = {**tokenizer, AUTO_MAP: localized(tokenizer[AUTO_MAP])}
        side_files[TOKENIZER_CONFIG] = json_bytes(tokenizer)
    names = references(checkpoint.config, tokenizer)
    folder = code.folder(names)
    if (missing := next((name for name in names if not holds(folder, [name])), None)) is not None:
        repository, separated, _ = missing.rpartition(REPOSITORY)
        where = (
            f"another repository (`{repository[:80]}`), and nothing is downloaded" if separated else "another folder"
        )
        raise MalformedInput(
            f"`auto_map` names `{missing[:80]}`, which is not in `{folder}` but in {where}",
            hint="give a local folder with the model's Python files and `config.json` with `--code`",
        )
    files = collect_code(folder, names)
    done = "copied, and was run to check the weights" if model_class(checkpoint.config) else "copied"
    note = f"the code in `{folder}` is {done}: {listing(list(files))}"
    carried = replace(checkpoint, side_files={**side_files, **files}, warnings=(*checkpoint.warnings, note))
    if model_class(checkpoint.config):
        return _as_code_has_it(carried, folder, source)
    return replace(carried, warnings=(*carried.warnings, *check_complete(carried.tensors, carried.config, source)))


def unstored_buffers(model: Any) -> list[str]:
    """Names of the buffers that are not in the state dict of a model, except those of transformers' own modules."""
    return [
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        if not type(module).__module__.startswith(("transformers.", "torch."))
        for key in sorted(module._non_persistent_buffers_set)
    ]


def _as_code_has_it(checkpoint: Checkpoint, folder: Path, source: str) -> Checkpoint:
    """The tensors that the code's model has; buffers of old versions that it computes are left out."""
    from llmconv.convert.models.meta_model import NotBuildable, code_model, gaps_of  # noqa: PLC0415 - torch
    from llmconv.runtime.custom_code import custom_classes, custom_code_errors  # noqa: PLC0415 - onnxruntime

    try:
        with custom_code_errors(folder):
            model = code_model(*custom_classes(folder, checkpoint.config), checkpoint.config)
            # without the one prefix that a trainer gave every name
            known, tensors = model.state_dict().keys(), dict(checkpoint.tensors)
            longest = max(known, key=len, default="")
            prefixes = {name.removesuffix(longest) for name in tensors if name.endswith(f".{longest}")}
            prefix = prefixes.pop() if len(prefixes) == 1 and not known & tensors.keys() else ""
            if all(name.startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
            gaps = gaps_of(model, {name: tensor.shape for name, tensor in tensors.items()})
    except NotBuildable as problem:
        raise UnsupportedInput(
            f"the code in `{folder}` builds no model that the weights could be compared with: {problem}",
            hint="it may be for another version of transformers, or the configuration is of another model; `-v` shows "
            "more",
        ) from problem

    computed = [name for name in gaps.unexpected if name in tensors and is_buffer(name, len(tensors[name].shape))]
    unexpected = [name for name in gaps.unexpected if name not in computed]
    refuse_gaps(gaps.missing, unexpected, str(checkpoint.config.get("model_type"))[:60], source)
    refuse_shapes(gaps.mismatched, source)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in computed}
    check_floats({name: tensor for name, tensor in tensors.items() if name.endswith(".weight")}, source)
    dropped = [f"{len(computed)} buffers, which the model computes"] if computed else []
    notes = [UNSTORED.format(listing(names))] if (names := unstored_buffers(model)) else []
    return replace(
        checkpoint, tensors=tensors, dropped=(*checkpoint.dropped, *dropped), warnings=(*checkpoint.warnings, *notes)
    )


HEAD = "lm_head.weight"
EMBEDDINGS = {"baichuan": "model.embed_tokens.weight", "chatglm": "transformer.word_embeddings.weight"}
# Fields that Baichuan has under Llama's names
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
Model = tuple[dict[str, LazyTensor], dict[str, Any]]
"""Tensors by the names of the code, and the content of `config.json`."""


def needs_code(code: TrustedCode | None, source: str, what: str, reason: str) -> TrustedCode:
    """The consent with a folder of code, else UnsupportedInput; `reason`: how `what` differs from transformers."""
    if code is None or code.given is None:
        raise UnsupportedInput(
            f"`{source}` is {what}: {reason}",
            hint="only its own code computes it; give a folder with that with `--code FOLDER --trust-remote-code`",
        )
    return code


def baichuan(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], code: TrustedCode, source: str) -> Model:
    """A Llama with ALiBi as Baichuan-13B: queries, keys and values are one matrix, `W_pack`, in this order.

    `tensors` and `config` are Llama's; the head of a Baichuan 2 is not normalized, since its code does that. `code` has
    the code of a `baichuan`. Raises MalformedInput if the heads are grouped, or the code is that of another model.
    """
    if config.get("num_key_value_heads") not in (None, config["num_attention_heads"]):
        raise MalformedInput(
            f"`{source}` has fewer key heads than query heads, which no Baichuan has", hint="give its own configuration"
        )
    with fitting(f"queries, keys and values of `{source}` cannot be joined"):
        packed = fuse(tensors, [f"self_attn.{one}_proj" for one in "qkv"], "self_attn.W_pack", counts=(1, 1, 1))
    fields = {name: config[name] for name in SIZES}
    fields["model_max_length"] = config.get("max_position_embeddings", 4096)
    return _with_head(packed, "baichuan"), _config(code, "baichuan", fields, source)


def chatglm(tensors: Mapping[str, LazyTensor], config: Mapping[str, Any], code: TrustedCode, source: str) -> Model:
    """ChatGLM-6B in its code's names, with stored frequencies, the embedding as head; MalformedInput: another code."""
    named = _with_head(dict(tensors), "chatglm")
    size = config["hidden_size"] // config["num_attention_heads"] // 2
    for layer in range(config["num_layers"]):
        named.setdefault(f"transformer.layers.{layer}.attention.rotary_emb.inv_freq", _frequencies(size))
    return named, _config(code, "chatglm", config, source)


def _with_head(tensors: dict[str, LazyTensor], kind: str) -> dict[str, LazyTensor]:
    return tensors if HEAD in tensors else {**tensors, HEAD: tensors[EMBEDDINGS[kind]]}


def _config(code: TrustedCode, kind: str, fields: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The `config.json` of the code's folder with the sizes of the checkpoint."""
    own = own_fields({}, {"model_type": kind, OPTION: code}, source) or {}
    return {**without_code(code.declared())[0], **fields, "model_type": kind, AUTO_MAP: own[AUTO_MAP]}


def _frequencies(size: int) -> LazyTensor:
    """`[size / 2]`, float16: 10000^(-2i/size), as ChatGLM-6B's `RotaryEmbedding` has them."""

    def load(start: int, stop: int) -> Array:
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        values: Array = (1 / np.float32(10000) ** exponents).astype(np.float16)
        return values[start:stop]

    return LazyTensor(BY_NAME["float16"], (len(range(0, size, 2)),), load)
