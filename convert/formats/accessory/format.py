"""LLaMA2-Accessory: a folder of `consolidated.NN-of-MM.model.pth` shards.

Layout (Alpha-VLLM/LLaMA2-Accessory `accessory/util/misc.py`, `save_checkpoint`): `{"model": {"llma.…": tensor}}` per
model-parallel rank, with or without `config.json` and `meta.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.convert.formats import Format
from llmconv.convert.formats.accessory import config as configs
from llmconv.convert.formats.accessory import read
from llmconv.convert.formats.meta import MetaTokenizer, find_tokenizer, tokenizer_for
from llmconv.convert.models.config_file import plain_fields, updated
from llmconv.convert.tokenizers import special_ids
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.not_a_model_folder import training_files_in
from llmconv.tensors import LazyTensor


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    base, drop = Path(config["base"]) if "base" in config else None, bool(config.get("drop"))
    own, base_shards = read.open_shards(path), read.open_shards(base) if base else []
    # `rope_scaling` is Accessory's field, unless it is Hugging Face's object
    objects = {name for name, value in config.items() if name == "rope_scaling" and isinstance(value, Mapping)}
    given = {name: value for name, value in config.items() if name in configs.FIELDS - objects}
    stored = (_stored_params(base) if base else {}) | _stored_params(path)
    params = configs.read_params(stored | given, read.plugin_family(path, chain(*own, *base_shards)), path.name)
    whole = _join(path, own, params)
    if base:
        # as in upstream's loader with a list of checkpoints: later tensors replace those of the base
        whole = _join(base, base_shards, params) | whole
    before = list(whole)
    warnings = read.leave_out(whole, params.family, path.name, drop=drop)
    lost = [name for name in before if name not in whole]
    if not any(name.startswith(("tok_embeddings.", "word_embeddings.", "embedding.")) for name in whole):
        raise InputRefused(
            f"`{(base or path).name}` is not a whole model: it holds only the {len(whole)} tensors that were trained",
            hint="give the folder of `consolidated.…` shards that training started from with `--base`",
        )
    tensors = read.to_hugging_face(whole, params, path.name)
    if pairs := sum(name.endswith(".lora_a.weight") for name in whole):
        warnings.append(f"merged {pairs} LoRA pairs as B·A; Accessory's LoRA has no alpha")
    settings = _config(path, params, tensors)
    tokens, more = _tokenizer(path, tokenizer, base, settings["vocab_size"])
    kept = read.EXTRA_FILES if tokenizer is None else ("generation_config.json",)
    extra_files = {name: content for name, content in read_side_files(path).items() if name in kept}
    others = {name: value for name, value in config.items() if name not in (*given, *FORMAT.options)}
    extra = plain_fields(others, warnings)
    norms = [name for name in ("norm.weight", "ln_f.weight") if own and name in own[0]]
    if any(len({shard[name].read().tobytes() for shard in own}) > 1 for name in norms):
        warnings.append("the norms differ between shards; those of shard 0 are used, as upstream does")
    settings = updated(settings | {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos}, extra)
    dropped = (*([f"{len(lost)} tensors: {read.kinds(lost)}"] if lost else []), *training_files_in(path))
    rest = ((*warnings, *more), "", len(own) + len(base_shards), dropped)
    side_files = {**extra_files, **tokens.files}
    return Checkpoint(path, FORMAT.name, tensors, settings, side_files, *rest, source_type=params.family)


def _stored_params(folder: Path) -> dict[str, Any]:
    """The content of Accessory's `config.json` or Meta's `params.json`."""
    file = next((folder / name for name in ("config.json", "params.json") if (folder / name).is_file()), None)
    content = read_json(file) if file else {}
    return dict(content["model"]) if isinstance(content.get("model"), Mapping) else content


def _join(
    folder: Path, shards: Sequence[dict[str, LazyTensor]], params: configs.AccessoryParams
) -> dict[str, LazyTensor]:
    if params.family == "internlm" and len(shards) > 1:
        raise UnsupportedInput(
            f"`{folder.name}` is an InternLM in {len(shards)} shards, which upstream's own code cannot run",
            hint="give the original checkpoint in one shard",
        )
    return read.join(shards, params.copied, params.experts, folder.name)


def _config(path: Path, params: configs.AccessoryParams, tensors: dict[str, LazyTensor]) -> dict[str, Any]:
    """The config; its sizes are compared with the tensors."""
    embedding = "transformer.word_embeddings.weight" if params.family == "falcon" else "model.embed_tokens.weight"
    settings = configs.to_config(params, tensors[embedding].num_rows, path.name)
    if settings["model_type"] == "llama":
        settings |= {switch: configs.has_biases(tensors, layers) for switch, layers in configs.SWITCHES.items()}
    return {**settings, "tie_word_embeddings": None}  # always stored as two matrices: the values decide


def _tokenizer(path: Path, given: Path | None, base: Path | None, vocabulary: int) -> tuple[MetaTokenizer, list[str]]:
    file = given or _find_tokenizer(path) or (_find_tokenizer(base) if base else None)
    tokens, warnings = tokenizer_for(file, vocabulary, path.name, since_3_1=False)
    if file and tokens.eos is None:
        bos, eos = special_ids(tokens.files)
        # a tokenizer without a token for the beginning begins with that for the end (upstream `model/tokenizer.py`)
        tokens = replace(tokens, bos=eos if bos is None else bos, eos=eos)
    return tokens, warnings


def _find_tokenizer(folder: Path) -> Path | None:
    """In upstream's order: `tokenizer.model`, else the folder if it has a Hugging Face tokenizer."""
    if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        return folder
    return find_tokenizer(folder)


FORMAT = Format(
    name="accessory",
    title="LLaMA2-Accessory: a folder of `consolidated.NN-of-MM.model.pth`",
    covers="any number of shards, whole or (with `--base`) only what was trained; the plugins `llama`, `llama_peft`, "
    "`mixtral`, `internlm`, `falcon`, and the language model of the others with `--drop`",
    detect=read.holds_shards,
    open=_open,
    options=("base", "drop"),
    peek=read.peek,
    save=read.save,
)
