"""PaddleNLP: `config.json` next to `model_state*.pdparams` or Paddle's own safetensors, whole, sharded or one per rank.

Layout: `pdparams.py` (the pickle), `read.py` (the folder), `names.py` (the names). Linear weights are [in, out]. Its
safetensors files have the names of Hugging Face's, but Paddle's tensor names and layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_json
from llmconv.convert.formats import Format
from llmconv.convert.formats.paddle.config import (
    ALIBI,
    TWO_POSITIONS,
    number,
    own_kind,
    read_generation_config,
    to_config,
    to_own_config,
)
from llmconv.convert.formats.paddle.names import FAMILIES, apply_rules
from llmconv.convert.formats.paddle.read import (
    ADAPTER_FILES,
    has_pdparams,
    is_pdparams,
    names_paddle,
    open_ranks,
    peek,
    weight_files,
)
from llmconv.convert.formats.paddle.write import read_paddle_tokenizer, save
from llmconv.convert.models.code_model import baichuan, chatglm, needs_code
from llmconv.convert.models.config_file import OPTION, trusted_code, with_architecture, without_code
from llmconv.convert.state_dicts.files import training_files_in
from llmconv.convert.tokenizers import read_tokenizer
from llmconv.errors import InputRefused, UnsupportedInput, listing
from llmconv.tensors import LazyTensor

QUANTIZED = (".quant_weight", ".quant_scale", ".weight_scale", ".activation_quanter")
HEAD = "lm_head.weight"


def _detect(path: Path) -> bool:
    if path.is_file():
        return is_pdparams(path) or (path.suffix == ".safetensors" and names_paddle(path))
    return path.is_dir() and (has_pdparams(path) or names_paddle(path))


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    found = next((match for name in names if (match := ADAPTER_FILES.fullmatch(name))), None)
    if found and found[1] == "prefix":
        raise UnsupportedInput(
            f"`{path.name}` is a prefix (`{found[0]}`), not a model",
            hint="convert the model that it was trained on",
        )
    if found:
        raise UnsupportedInput(
            f"`{path.name}` is a LoRA adapter (`{found[0]}`), not a model",
            hint="convert its base model with `to-hf`, then `llmconv merge-lora BASE ADAPTER_FILES -o OUT`",
        )
    folder = path if path.is_dir() else path.parent
    stored = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    fields = {name: value for name, value in config.items() if name != OPTION}
    paddle, dropped = without_code({**stored, **fields})
    if not paddle:
        raise InputRefused(f"`{path.name}` has no `config.json` next to it", hint="give the run's with `--config`")
    warnings: list[str] = []
    if dropped:
        warnings.append(f"dropped {listing(dropped)} from the configuration: no code comes from a checkpoint")
    own, code = own_kind(paddle), trusted_code(config)
    if own:
        code = needs_code(code, path.name, *(ALIBI if own == "baichuan" else TWO_POSITIONS))
    settings = to_own_config(paddle, path.name) if own else to_config(paddle, path.name, warnings)
    family = FAMILIES[paddle["model_type"]]
    ranks = open_ranks(path, paddle)
    if len(ranks) > 1 and not family.tensor_parallel:
        raise UnsupportedInput(
            f"`{path.name}` is a {paddle['model_type']} split over {len(ranks)} tensor-parallel ranks",
            hint="join it with PaddleNLP's `merge_tp_and_pp_params.py` first",
        )
    _refuse_quantized(path, ranks[0])
    shapes = {name: tensor.shape for name, tensor in ranks[0].items()}
    tensors = apply_rules(family.rules(settings, shapes), ranks, number(settings, family.layers, path.name), path.name)
    if own and code:
        build = baichuan if own == "baichuan" else chatglm
        tensors, settings = build(tensors, settings, code, path.name)
    else:
        _tie(tensors, settings, path)
        settings = with_architecture(settings)
    side_files = {**_tokenizer(tokenizer, folder, paddle["model_type"], warnings), **read_generation_config(folder)}
    release = stored.get("paddlenlp_version")
    return Checkpoint(
        path,
        FORMAT.name,
        tensors,
        settings,
        side_files,
        tuple(warnings),
        version=f"paddlenlp {release}" if isinstance(release, str) else "",
        shards=len(weight_files(path)),
        dropped=training_files_in(path),
        source_type=str(paddle["model_type"]),
    )


def _refuse_quantized(path: Path, names: Iterable[str]) -> None:
    if found := [name for name in names if name.endswith(QUANTIZED)]:
        raise UnsupportedInput(
            f"`{path.name}` is quantized: it holds {listing(found)}",
            hint="give the weights from before quantization; Paddle's packed ones are ordered for its GPU kernels",
        )


def _tie(tensors: Mapping[str, LazyTensor], settings: dict[str, Any], path: Path) -> None:
    """Sets `tie_word_embeddings`: true without a head, else as stored, null where the values decide."""
    declared = settings.get("tie_word_embeddings")
    if HEAD not in tensors:
        if declared is False:
            raise InputRefused(
                f"`{path.name}` has no output head, and its configuration does not tie it to the embedding",
                hint="if it was trained this way, give a configuration with `tie_word_embeddings` true",
            )
        settings["tie_word_embeddings"] = True
    else:
        settings["tie_word_embeddings"] = declared  # PaddleNLP leaves out its default, true: then the values decide


def _tokenizer(given: Path | None, folder: Path, model_type: str, warnings: list[str]) -> dict[str, bytes]:
    if given is None:
        return read_paddle_tokenizer(folder, model_type, warnings)
    files = read_paddle_tokenizer(given, model_type, warnings) if given.is_dir() else {}
    return files or read_tokenizer(given)


FORMAT = Format(
    name="paddle",
    title="PaddleNLP: a folder of `config.json` and `model_state*.pdparams`, or its safetensors",
    covers="llama (and Baichuan-7B), mistral, qwen, qwen2, bloom, gpt, chatglm2/3; with their own code "
    "(`--code`) Baichuan-13B and ChatGLM-6B; whole, sharded, or one file per "
    "tensor- and pipeline-parallel rank",
    detect=_detect,
    open=_open,
    peek=peek,
    options=(OPTION,),
    save=save,
)
