"""Opens training checkpoints of any known format in Hugging Face names."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.causal_lm import architecture, require_model_type
from llmconv.checkpoint import (
    ADAPTER_CONFIG,
    MODELOPT,
    Checkpoint,
    is_model_folder,
    open_checkpoint,
    read_json,
    read_small,
    sentence_files,
)
from llmconv.convert.assembly import dropped_outside, map_names, side_files_of
from llmconv.convert.deltas import is_recorded_delta
from llmconv.convert.formats import Format, adapter_format, by_name, detect, formats
from llmconv.convert.models.code_model import with_code
from llmconv.convert.models.completeness import check_complete, check_folder, why_incomplete
from llmconv.convert.models.config_file import CODE_FIELDS, OPTION, merged_configs, own_fields, trusted_code, updated
from llmconv.convert.models.transformers_source import auto_classes, causal_lm_classes, model_names
from llmconv.convert.state_dicts.files import are_of_ranks, weight_files
from llmconv.errors import (
    InputRefused,
    LlmconvError,
    MalformedInput,
    UnsupportedInput,
    UsageProblem,
    listing,
    short,
    word,
)
from llmconv.files.packing import unpacked
from llmconv.files.pickle_machine import Stub
from llmconv.files.source_file import open_source
from llmconv.files.sources import local_path, reading_safely
from llmconv.files.torch_reader import explain_no_zip, is_torch_file, open_torch_file
from llmconv.model_code import AUTO_MAP, has_code
from llmconv.not_a_model_folder import (
    NESTED,
    SUFFIXES_OF_TORCH,
    adapter_file,
    adapter_or_delta,
    foreign_file,
    is_quantized_export,
    known_refusal,
    litgpt_prompts,
    refuse_unexplained_codes,
    refused_export,
    training_file_kind,
    unread_codes,
)


def open_training(
    source: str | Path,
    format: str | None = None,
    config: tuple[Path, ...] = (),
    tokenizer: Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    rewrite: bool = False,
) -> Checkpoint:
    """Opens a checkpoint of any format, with its `options`; `rewrite`: also a Hugging Face folder; else as `to_hf`."""
    with reading_safely(source):
        path = local_path(source, in_parts=True)
        if is_recorded_delta(path):
            raise UnsupportedInput(
                f"`{path}` is a delta, not a model",
                hint=f"add it to its base: `llmconv delta apply BASE {word(path)} -o OUT`",
            )
        inside, found = (unpacked(path), by_name(format)) if format else recognized(path)
        given = {name: value for name, value in (options or {}).items() if value}
        if found is None and not is_model_folder(inside) and trusted_code(given):
            found = _plain_tensors(inside)
        if found is None and is_model_folder(inside) and (rewrite or _is_reward_model(read_json(inside / CONFIG))):
            return open_again(inside, path.name, config, tokenizer, searching_next_to(given, path, config))
        if found is None:
            raise explain(inside)
        if format and not found.detect(inside) and not (trusted_code(given) and found == _plain_tensors(inside)):
            raise UsageProblem(
                f"`{path.name}` is not of the format `{format}`",
                hint="leave out `--from`; formats are detected by content",
            )
        refuse_options(given, found.options, f"the format `{found.name}`")
        given = searching_next_to(given, path, config)
        opened = open_format(found, inside, path.name, {**merged_configs(config), **given}, tokenizer)
        return replace(opened, path=path)


def _plain_tensors(path: Path) -> Format | None:
    """The format of a state dict in names that only a model's own code knows; None for anything else."""
    for name in ("safetensors", "torch"):
        found = by_name(name)
        try:
            if found.peek and found.peek(path):
                return found
        except InputRefused:
            continue
    return None


def searching_next_to(options: Mapping[str, Any], path: Path, config: tuple[Path, ...]) -> dict[str, Any]:
    """The options of `to_hf`; consent to code then includes that next to the user's, checkpoint's or base's config."""
    if (code := trusted_code(options)) is None:
        return dict(options)
    folder = path if path.is_dir() else path.absolute().parent
    above = [home for home in folder.absolute().parents[:2] if (home / "config.json").is_file()]
    given = [place if place.is_dir() else place.absolute().parent for place in config]
    base = [options["base"]] if options.get("base") else []
    return {**options, OPTION: replace(code, others=(*given, folder, *above, *base))}


def recognized(path: Path) -> tuple[Path, Format | None]:
    """The unpacked checkpoint at a path and its format; of a folder without a format, the only checkpoint file."""
    inside = unpacked(path)
    if is_quantized_export(inside):
        return inside, None
    found = detect(inside)
    is_other = found or is_model_folder(inside) or (inside / ADAPTER_CONFIG).is_file()
    files = checkpoint_files(inside) if inside.is_dir() and not is_other else []
    if len({file.resolve() for file in files}) == 1:  # links to it count as one
        kind = detect(files[0])
        return (files[0], kind) if kind or not _explain_nested(inside) else (inside, None)
    return inside, found


def open_format(
    found: Format, inside: Path, name: str, config: Mapping[str, Any], tokenizer: Path | None
) -> Checkpoint:
    """Opens the unpacked checkpoint `inside` with fields and options of `config`, and checks it; see `to_hf`."""
    opened = found.open(inside, config, tokenizer)
    code = trusted_code(config)
    if code and has_code(opened.config, opened.side_files):
        return with_code(opened, code, name)
    plain = opened
    if opened.config.get("quantization_config"):
        from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint  # noqa: PLC0415 - of few models

        quantized = quantized_checkpoint(opened)
        plain = quantized.plain if quantized else opened
    # a class that is neither the causal one of its type nor an encoder's: one with images, a classifier
    named, kind = architecture(plain.config), str(plain.config.get("model_type"))
    other = named not in ("", causal_lm_classes().get(kind)) and named not in auto_classes("MASKED_LM").values()
    check = check_folder if other and not plain.config.get(AUTO_MAP) else check_complete
    notes = check(plain.tensors, plain.config, name) if opened.tensors else []
    return replace(opened, warnings=(*opened.warnings, *notes))


CONFIG = "config.json"
DROPPED_CODE = "dropped {} from the configuration: no code comes from a checkpoint, except with `--trust-remote-code`"


def open_again(
    folder: Path, name: str, config: tuple[Path, ...], tokenizer: Path | None, options: Mapping[str, Any]
) -> Checkpoint:
    """The model of a Hugging Face folder, every tensor under its own name, with fields of the `config` files replaced.

    With the option `quant` of `dequantize`, quantized weights are the values of their codes in float32; else the codes
    stay as they are. Raises UsageProblem for `options` of training formats, UnsupportedInput for weights that are
    quantized in an unknown way, MalformedInput for a damaged folder or another model's config.
    """
    refuse_options(options, (OPTION, "drop", "quant"), "a Hugging Face folder")
    stored = open_checkpoint(folder)
    opened = _plain(stored, name, options.get("quant"))
    has_codes = opened is not stored and options.get("quant") != "dequantize"
    if has_codes and options.get("drop"):
        hint = "give `--quant dequantize` for the values of the codes, or leave `--drop` out"
        raise UnsupportedInput(f"`--drop` leaves out no parts of codes, which `{name}` has", hint=hint)
    given = _without_codes(merged_configs(config), stored.config, name)
    settings = updated(opened.config, given)
    require_model_type(settings, name)
    notes: list[str] = []
    if _is_reward_model(settings):
        opened, settings, notes = _as_classifier(opened, settings, name)
    own = own_fields(opened.config, {**given, **options}, name)
    code = [field for field in CODE_FIELDS if settings.pop(field, None)]
    warnings = [*stored.warnings, *([DROPPED_CODE.format(listing(code))] if code and not own else [])]
    if options.get("drop"):
        opened = _without_others(opened, settings, name)
    settings |= {AUTO_MAP: own[AUTO_MAP]} if own else {}
    side_files = {**side_files_of(folder, tokenizer), **sentence_files(folder)}
    result = replace(opened, config=settings, side_files=side_files)
    if (trusted := trusted_code(options)) and has_code(settings, side_files):
        return with_code(result, trusted, name)
    try:
        warnings += notes + check_folder(result.tensors, result.config, result.path.name)
    except MalformedInput as why:
        if config and not why_incomplete(opened.tensors, opened.config, opened.path.name):
            raise MalformedInput(
                f"the weights are not those of the configuration: {why.message}",
                hint="give `--config` the configuration of these weights, or leave it out",
            ) from why
        raise
    if has_codes:
        from llmconv.quantized_weights.quantized_checkpoint import settings_of  # noqa: PLC0415 - of few models

        fields = settings | settings_of(stored.config)
        own = {file: read_small(folder / file) for file in OF_CODES if (folder / file).is_file()}
        result = replace(result, tensors=stored.tensors, config=fields, side_files={**side_files, **own})
        result = replace(result, dequantized=frozenset())
    return replace(result, warnings=tuple(warnings))


def _without_codes(given: Mapping[str, Any], stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Fields of `--config` without settings of codes; UsageProblem for others than those of the weights in `stored`."""
    parts = [given, *(part for part in given.values() if isinstance(part, Mapping))]
    found = [part["quantization_config"] for part in parts if "quantization_config" in part]
    if not found:
        return given
    from llmconv.quantized_weights.quantized_checkpoint import without_settings  # noqa: PLC0415 - of few models

    own = stored.get("quantization_config")
    if any(one != own for one in found):
        is_plain = "plain" if own is None else "as its own says"
        raise UsageProblem(
            f"`--config` has another `quantization_config` than `{name}`, whose weights are {is_plain}",
            hint="take it out of the file",
        )
    return without_settings(given)


OF_CODES = (MODELOPT, "quantize_config.json", "quant_config.json")  # files of ModelOpt, AutoGPTQ and AutoAWQ


def _plain(opened: Checkpoint, name: str, choice: str | None) -> Checkpoint:
    """The checkpoint, if it is quantized with the values of its codes; `choice` is the option `quant`."""
    if not opened.config.get("quantization_config"):
        refuse_unexplained_codes(opened, opened.config)
        if choice:
            raise UsageProblem(f"`--quant {choice}` is given, but `{name}` is not quantized", hint="leave it out")
        return opened
    from llmconv.quantized_weights.quantized_checkpoint import quantized_checkpoint  # noqa: PLC0415 - of few models

    found = quantized_checkpoint(opened)
    return found.plain if found else opened


REWARD, CRITIC = "RewardModel", "CriticModel"
"""The classes of OpenRLHF's reward and value models (`models/model.py`): a decoder, and a Linear [1, hidden].

The Linear has no bias, and the name of `--value_head_prefix`: `score` by default, `value_head` before 0.4. A value
model has a number for each token, a reward model takes that of the last one, as classifiers of transformers do.
"""
HEADS = ("score.weight", "value_head.weight", "reward_head.weight")


def _is_reward_model(config: Mapping[str, Any]) -> bool:
    return architecture(config) in (REWARD, CRITIC)


def _as_classifier(
    opened: Checkpoint, config: Mapping[str, Any], name: str
) -> tuple[Checkpoint, dict[str, Any], list[str]]:
    """A reward or value model as the classifier of one label that computes the same; UnsupportedInput: none does."""
    kind, own = str(config.get("model_type")), architecture(config)
    what = "reward" if own == REWARD else "value"
    hidden = (config.get("text_config") or config).get("hidden_size")
    classifier = auto_classes("SEQUENCE_CLASSIFICATION").get(kind)
    heads = [key for key in (f"{config.get('value_head_prefix')}.weight", *HEADS) if key in opened.tensors]
    if heads and opened.tensors[heads[0]].shape != (1, hidden):
        shape = list(opened.tensors[heads[0]].shape)
        raise UnsupportedInput(
            f"`{name}` is a {what} model of OpenRLHF (`{own}`), whose `{heads[0]}` has the shape {shape}, not "
            f"[1, {hidden}]",
            hint="gather the head where it was trained, and save it again",
        )
    if classifier is None or not heads:
        raise UnsupportedInput(
            f"`{name}` is a {what} model of OpenRLHF (`{own}`), and no classifier of transformers is the same",
            hint="give a `--config` with the class in `architectures`",
        )
    tensors = {HEADS[0] if key == heads[0] else key: tensor for key, tensor in opened.tensors.items()}
    notes = [f"OpenRLHF's `{own}` is written as the {classifier} that computes the same, with one label"]
    notes += ["the classifier has the value of the last token alone"] if own == CRITIC else []
    if config.get("normalize_reward"):
        mean, std = (str(config.get(name))[:20] for name in ("mean", "std"))
        notes.append(f"{what}s are not normalized: OpenRLHF's are (r - {mean}) / {std}, which is left to the caller")
    labels = {"architectures": [classifier], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return replace(opened, tensors=tensors), {**config, **labels}, notes


def _without_others(opened: Checkpoint, config: Mapping[str, Any], name: str) -> Checkpoint:
    """A language model without tensors outside of it, such as TRL's value head; UsageProblem: it is another class."""
    kind = str(config.get("model_type"))
    if architecture(config) not in ("", causal_lm_classes().get(kind)):
        raise UsageProblem(
            f"`--drop` leaves out what is not of a language model, and `{name}` is a {architecture(config)[:80]}",
            hint="leave it out",
        )
    _, others, _ = map_names([*opened.tensors], model_names(kind), name)
    kept = {key: tensor for key, tensor in opened.tensors.items() if key not in others}
    return replace(opened, tensors=kept, dropped=(*opened.dropped, *dropped_outside(others, name, drop=True)))


def refuse_options(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises UsageProblem for the first given option that has no effect for the format `what`."""
    if foreign := sorted({*given} - {*known}):
        raise UsageProblem(f"`--{foreign[0].replace('_', '-')}` does not apply to {what}", hint="leave it out")


PACKED = re.compile(r"\.(?:(?:pth?|bin|ckpt)\.(?:gz|bz2|xz|lzma|lz4|zst)|tar(?:\.\w+)?|tgz)$")


def checkpoint_files(folder: Path) -> list[Path]:
    """The torch, safetensors and packed files of a folder, in name order; never an optimizer's or a trainer's state."""
    found = {entry for entry in folder.iterdir() if entry.is_file() and not training_file_kind(entry.name)}
    torch = {entry for entry in found if entry.suffix in SUFFIXES_OF_TORCH and is_torch_file(entry)}
    packed = {entry for entry in found if PACKED.search(entry.name)}
    return sorted(torch | packed | {*weight_files(folder)})


def explain(path: Path) -> LlmconvError:
    """The error for a path that matches no known format."""
    if problem := litgpt_prompts(path) or adapter_file(path):
        return problem
    if kind := adapter_format(path):
        return UnsupportedInput(
            f"`{path.name}` is an adapter of {kind.title}",
            hint=f"merge it: `llmconv merge-lora BASE {word(path)} -o OUT`",
        )
    return _explain_folder(path) if path.is_dir() else _explain_file(path)


def _explain_folder(folder: Path) -> LlmconvError:
    if is_quantized_export(folder):
        return refused_export(folder)
    if found := adapter_or_delta(folder):
        return found
    names = {entry.name for entry in folder.iterdir()}
    if is_model_folder(folder):
        from llmconv.quantized_weights.quantized_checkpoint import unsupported  # noqa: PLC0415 - to explain alone

        if problem := unsupported(read_json(folder / CONFIG)):  # no command reads it: nobody goes on with another one
            return problem
        return UnsupportedInput(
            f"`{folder}` already is a Hugging Face model folder",
            hint="go on with `merge-lora` or `export`; `--dtype` and `--max-shard-size` write it anew, and with "
            "`--quant dequantize` codes become their values",
        )
    if any(name.endswith((".pdiparams", ".pdmodel")) for name in names):
        return UnsupportedInput(
            f"`{folder}` is a static graph of Paddle, which is not converted back",
            hint="give the folder with `model_state.pdparams` that it was exported from",
        )
    if "checkpoint" in names and any(name.startswith("zero_to_fp32") or name == "latest" for name in names):
        return UnsupportedInput(
            f"`{folder}` is a Lightning checkpoint that DeepSpeed wrote",
            hint=f"give the folder inside: `{folder / 'checkpoint'}`",
        )
    checkpoints = checkpoint_files(folder)
    if not any(map(detect, checkpoints)) and (nested := _explain_nested(folder)):
        return nested
    if checkpoints:
        return InputRefused(
            f"`{folder}` contains {len(checkpoints)} checkpoint files, and not as the shards of one",
            hint=f"name the file, such as `{checkpoints[-1]}`",
        )
    return known_refusal(folder) or _explain_run(folder) or _unknown(folder)


def _explain_run(folder: Path) -> LlmconvError | None:
    """The error for a folder of a run, whose checkpoints are folders in it."""
    inner = [entry for entry in sorted(folder.iterdir())[:NESTED] if entry.is_dir()]
    kinds = {entry: kind.name for entry in inner if (kind := recognized(entry)[1])}
    if not kinds:
        return None
    words = [f"`{entry.name}` (`{kind}`)" for entry, kind in kinds.items()]
    return InputRefused(
        f"`{folder.name}` is not a checkpoint itself; it contains {', '.join(words[:5])}",
        hint=f"give one of them: `{[*kinds][-1]}`",
    )


def _explain_nested(folder: Path) -> LlmconvError | None:
    """The error for a step's folder with a distributed checkpoint inside, as prime-rl, NeMo RL and slime save it."""
    from llmconv.convert.state_dicts.distributed import is_folder  # noqa: PLC0415 - only for a refusal

    with suppress(PermissionError):
        below = [entry for depth in ("*", "*/*", "*/*/*", "*/*/*/*") for entry in sorted(folder.glob(depth))[:NESTED]]
        own = [entry for entry in below if not _is_of_training(entry.relative_to(folder))]
        found = [one for one in own if is_folder(one) or (one.is_dir() and are_of_ranks(weight_files(one)))]
        if found:
            inner = found[0].relative_to(folder).as_posix()
            words = [home / "tokenizer" for home in found[0].parents[:2] if (home / "tokenizer").is_dir()]
            more = f", and its tokenizer with `--tokenizer {words[0]}`" if words else ""
            return InputRefused(
                f"`{folder.name}` is not a checkpoint itself; `{inner}` in it is a distributed one",
                hint=f"give that folder: `{found[0]}`; `config.json` may be given with `--config`{more}",
            )
    return None


def _is_of_training(inner: Path) -> bool:
    """Whether a folder, or one that it is in, has the state of an optimizer or a data loader, and no model."""
    return any(training_file_kind(f"{part}.pt") for part in inner.parts)


def _explain_file(path: Path) -> LlmconvError:
    if not path.is_file():
        return InputRefused(f"`{path}` is not a regular file", hint="give a file or a folder")
    if not path.stat().st_size:
        return MalformedInput(f"`{path.name}` is empty", hint="copy it again from where it was saved")
    with open_source(path) as file:
        head, is_zip = file.read(300), zipfile.is_zipfile(file)
    left = training_file_kind(path.name)
    if left and not path.name.endswith("_optim_states.pt"):  # DeepSpeed's optimizer has the weights
        files = checkpoint_files(path.parent)
        hint = f"give the weights next to it: `{files[0]}`" if files else "give the file or folder with the weights"
        return InputRefused(f"`{path.name}` is {left}, not the model's weights", hint=hint)
    if path.suffix not in SUFFIXES_OF_TORCH and is_zip and not is_torch_file(path):
        return known_refusal(path) or _unknown(path)
    if head.startswith(b"PK") or is_torch_file(path):
        return _explain_torch_file(path)
    if foreign := known_refusal(path) if path.suffix == ".onnx" else foreign_file(head, path):
        return foreign
    no_zip = explain_no_zip(path, head)
    return no_zip if isinstance(no_zip, UnsupportedInput) else _unknown(path)


def _explain_torch_file(path: Path) -> LlmconvError:
    try:
        content = open_torch_file(path).content
    except LlmconvError as problem:
        return problem
    if isinstance(content, Stub):
        return UnsupportedInput(
            f"`{path.name}` is a whole object (`{short(content.function, 80)}`), pickled with its class",
            hint="load it where its code is, and save its `state_dict()`",
        )
    if whole := _checkpoint_of(path, content):
        return InputRefused(f"`{path.name}` is one file of {whole}", hint=f"give its folder, `{path.parent}`")
    if isinstance(content, dict) and any(isinstance(one, dict) and "W_q" in one for one in content.values()):
        return unread_codes("the weights", path.name, "HQQ")
    keys = ", ".join(f"`{key}`" for key in list(content)[:4]) if isinstance(content, dict) else "not a dict"
    return UnsupportedInput(
        f"`{path.name}` is a torch file, but not of a known training format (it contains {keys})",
        hint=KNOWN.format(", ".join(formats())),
    )


def _checkpoint_of(path: Path, content: Any) -> str:
    """The checkpoint of several files that a torch file is one of; empty if there is none."""
    if isinstance(content, dict) and ("ds_version" in content or path.name.endswith("_optim_states.pt")):
        return "a DeepSpeed checkpoint"
    return f"a checkpoint ({whole.title})" if (whole := detect(path.parent)) else ""


def _unknown(path: Path) -> LlmconvError:
    return UnsupportedInput(
        f"`{path.name or path}` is not of a training format that llmconv knows", hint=KNOWN.format(", ".join(formats()))
    )


KNOWN = "known formats: {}; `llmconv formats` describes each"
