"""Composer (LLM Foundry) monolithic `.pt`: `state.model`, `state.integrations.huggingface`, and much that is not read.

Layout (mosaicml/composer `core/state.py`, `utils/checkpoint.py`, `models/huggingface.py`): the state dict of a
ComposerModel, so each Hugging Face name has one `model.` in front, and wrappers may have left theirs anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.configs import with_architecture, without_code
from llmconv.convert.formats import Format
from llmconv.convert.mapping import equal, listing
from llmconv.convert.tokenizers.embedded_files import plain, restore_files
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.pickle_data import TensorRef
from llmconv.pickle_machine import Stub
from llmconv.tensors import LazyTensor
from llmconv.torch_file import TorchFile, is_torch_file, open_torch_file

WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\."
)

DROPPED = re.compile(
    r"\.rotary_emb\.inv_freq$"  # a buffer that models compute; rounded in bfloat16 checkpoints
    r"|\._extra_state$"  # Transformer Engine's scaling factors
)
CAUSAL_MASK = re.compile(r"\.(?:attn|attention)\.(?:masked_)?bias$")
"""Buffers of GPT-2 and its kin in old files: rank 4, and a scalar."""

LAYER = re.compile(r"\.(\d+)\.")
UNEVEN_FIELDS = ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "layers_block_type", "moe_layers")
"""Configuration fields of models whose layers do not all have the same weights."""

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def _detect(path: Path) -> bool:
    if not is_torch_file(path):
        return False
    content = open_torch_file(path).content
    return isinstance(content, dict) and "state" in content


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    file = open_torch_file(path)
    state = _mapping(file.content, "state")
    model = _mapping(state, "model")
    if not model:
        raise InputRefused(
            f"`{path.name}` has no `state.model`, so there are no weights in it",
            hint="it was saved without the model; give another checkpoint of the run",
        )
    integration = _mapping(_mapping(state, "integrations"), "huggingface")
    _refuse_adapter(path, model, _mapping(integration, "model"))
    warnings: list[str] = []
    settings = _config(path, _mapping(integration, "model"), config, warnings)
    refs = _tensor_refs(path, model, warnings)
    settings = _untie(file, refs, settings, warnings)
    tensors = {name: file.tensor(name, ref) for name, ref in refs.items()}
    _check_complete(path, tensors, settings)
    side_files = read_tokenizer(tokenizer) if tokenizer else _tokenizer(path, integration, warnings)
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, tuple(warnings))


def _mapping(parent: Any, key: str) -> dict[Any, Any]:
    """The dict under `key`, or an empty one: every branch of a Composer checkpoint may be missing."""
    value = parent.get(key) if isinstance(parent, dict) else None
    return value if isinstance(value, dict) else {}


def _refuse_adapter(path: Path, model: Mapping[Any, Any], integration: Mapping[Any, Any]) -> None:
    if integration.get("peft_config") or any("lora_" in str(key) for key in model):
        raise UnsupportedInput(
            f"`{path.name}` is a PEFT (LoRA) run; its adapter is not part of a plain model",
            hint="save the adapter with PEFT and use `llmconv merge-lora BASE ADAPTER`; reading it here comes later",
        )


def _config(
    path: Path, integration: Mapping[Any, Any], given: Mapping[str, Any], warnings: list[str]
) -> dict[str, Any]:
    embedded = plain(_mapping(_mapping(integration, "config"), "content"), path.name)
    config, dropped = without_code({**embedded, **given})
    if "model_type" not in config:
        raise InputRefused(
            f"`{path.name}` holds no model configuration", hint="give the model's `config.json` with `--config`"
        )
    if dropped:
        warnings.append(f"dropped {listing(dropped)} from the configuration: no code comes from a checkpoint")
    if config["model_type"] == "mpt":
        raise UnsupportedInput(
            f"`{path.name}` is an MPT of LLM Foundry, whose code is not part of transformers",
            hint="MPT comes later; transformers' own MPT differs and would give wrong results silently",
        )
    return with_architecture(config)


def _tensor_refs(path: Path, model: Mapping[Any, Any], warnings: list[str]) -> dict[str, TensorRef]:
    """Hugging Face name to tensor, without wrappers, buffers and whatever is no tensor."""
    names = {key: WRAPPERS.sub("", str(key)) for key in model}
    prefix = "model." if all(name.startswith("model.") for name in names.values()) else ""
    refs: dict[str, TensorRef] = {}
    skipped: list[str] = []
    for key, value in model.items():
        name = names[key].removeprefix(prefix)
        if DROPPED.search(name) or _is_mask(name, value):
            continue
        if isinstance(value, Stub) or name in refs:
            problem = "is doubled" if name in refs else "is an object that was not rebuilt, no plain tensor"
            raise UnsupportedInput(
                f"`{name}` in `{path.name}` {problem}", hint="save a full (unsharded, unquantized) state dict"
            )
        if isinstance(value, TensorRef):
            refs[name] = value
        else:
            skipped.append(name)
    if skipped:
        warnings.append(f"skipped {len(skipped)} values that are no tensors: {listing(skipped)}")
    return refs


def _is_mask(name: str, value: Any) -> bool:
    return bool(CAUSAL_MASK.search(name)) and isinstance(value, TensorRef) and len(value.shape) in (0, 4)


def _untie(file: TorchFile, refs: dict[str, TensorRef], config: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Drops an output head that is the embedding, as transformers stores tied weights; the config then says so."""
    head = next((name for name in HEADS if name in refs), None)
    embedding = next((name for name in refs if name.endswith(EMBEDDINGS)), None)
    if head is None or embedding is None:
        return config
    same_place = _place(refs[head]) == _place(refs[embedding])
    if not same_place and not config.get("tie_word_embeddings"):
        return config
    if same_place or equal(file.tensor(head, refs[head]), file.tensor(embedding, refs[embedding])):
        del refs[head]
        return {**config, "tie_word_embeddings": True}
    warnings.append(f"the configuration ties `{head}` to `{embedding}`, but they differ; both are kept")
    return {**config, "tie_word_embeddings": False}


def _place(ref: TensorRef) -> tuple[Any, ...]:
    return (ref.storage.key, ref.offset, ref.shape, ref.stride)


def _check_complete(path: Path, tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> None:
    """Every layer of the config is there and no other, so that nothing is left to random initialisation."""
    wanted = next((config[field] for field in LAYER_COUNTS if field in config), None)
    layers: dict[int, set[str]] = {}
    for name in tensors:
        if number := LAYER.search(name):
            layers.setdefault(int(number[1]), set()).add(name[number.end() :])
    if wanted is not None and set(layers) != set(range(wanted)):
        raise MalformedInput(
            f"`{path.name}` has {len(layers)} layers, its configuration says {wanted}",
            hint="the configuration is of another model, or the checkpoint is partial",
        )
    uneven = [f"{number}.{rest}" for number, parts in layers.items() for rest in set.union(*layers.values()) - parts]
    if uneven and not any(field in config for field in UNEVEN_FIELDS):
        raise MalformedInput(
            f"`{path.name}` lacks tensors that other layers have: {listing(sorted(uneven))}",
            hint="the checkpoint is partial; transformers would fill the gaps with random weights",
        )
    _check_ends(path, tensors, config)


def _check_ends(path: Path, tensors: Mapping[str, LazyTensor], config: Mapping[str, Any]) -> None:
    """The embedding fits the vocabulary, and there is an output head where it is not tied."""
    embedding = next((tensors[name] for name in tensors if name.endswith(EMBEDDINGS)), None)
    vocabulary = config.get("vocab_size")
    if embedding is not None and vocabulary is not None and embedding.shape[0] != vocabulary:
        raise MalformedInput(
            f"the embedding in `{path.name}` has {embedding.shape[0]} rows, `vocab_size` is {vocabulary}",
            hint="the configuration is of another model; give the right one with `--config`",
        )
    if config.get("tie_word_embeddings") is False and not any(head in tensors for head in HEADS):
        raise MalformedInput(
            f"`{path.name}` has no output head, and its configuration does not tie it to the embedding",
            hint="give a configuration with `tie_word_embeddings` true, if that is how it was trained",
        )


def _tokenizer(path: Path, integration: Mapping[Any, Any], warnings: list[str]) -> dict[str, bytes]:
    files, left_out = restore_files(_mapping(integration, "tokenizer"), path.name)
    if left_out:
        warnings.append(f"left out {listing(left_out)}: not among the files a tokenizer needs")
    if not files:
        warnings.append(f"`{path.name}` holds no tokenizer; give one with `--tokenizer` if you need it")
    return files


FORMAT = Format(
    name="composer",
    title="Composer / LLM Foundry checkpoint (one .pt file)",
    detect=_detect,
    open=_open,
)
