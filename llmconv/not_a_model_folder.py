"""Explains why a path is not a Hugging Face model folder, or its weights are no numbers: an error with the way out.

Uses only file names, first bytes and headers, so that every command can call it without importing a library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, word
from llmconv.files.paths import refuse_git_lfs
from llmconv.files.source_file import open_source
from llmconv.files.sources import TORCH_WEIGHTS

MANIFEST, MANIFEST_BYTES = "llmconv.json", 8 << 20
SINGLE = "quantized.safetensors"
MODEL_WEIGHTS = {"model.safetensors", "model.safetensors.index.json"}
# names of files with quantized weights and with the index of several
CODES = re.compile(r"quantized(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
NAME = re.compile(r"\w[\w.+-]{0,199}")  # a folder's name that a command line can contain as it is
# values of `--quant`; the manifest has the name of a method instead where the codes are those of the model
PRESET = re.compile(r"int[48](?:-[a-z]{1,20})?|a8w8")


def is_quantized_export(folder: Path) -> bool:
    """Whether a folder has quantized graphs of llmconv, and not the weights of a model."""
    if not (folder / MANIFEST).is_file():
        return False
    names = {entry.name for entry in folder.iterdir()}
    return not names & MODEL_WEIGHTS and any(map(CODES.fullmatch, names))


def source_of(folder: Path) -> str:
    """The name of the folder that the graphs were exported from; empty if the manifest has none."""
    source = _export_step(folder).get("source")
    return source if isinstance(source, str) and NAME.fullmatch(source) else ""


def export_again(folder: Path, more: str = "") -> str:
    """The command that makes a folder of quantized graphs again, with the options `more` that it lacks."""
    options = _export_step(folder).get("options")
    quant = options.get("quant") if isinstance(options, dict) else None
    preset = f"--quant {quant}" if isinstance(quant, str) and PRESET.fullmatch(quant) else ""
    return " ".join(["llmconv export", word(source_of(folder) or "MODEL"), "-o OUT", *filter(None, [preset, more])])


def refused_export(folder: Path, more: str = "") -> UnsupportedInput:
    """The error for a folder of quantized graphs in place of a model; `more` has options for the hint's command."""
    source = source_of(folder)
    named = f" (its manifest names `{source}`)" if source else ""
    hint = f"give the model that they were exported from{named}: `{export_again(folder, more)}`"
    return UnsupportedInput(f"`{folder}` contains graphs with quantized weights, not a model", hint=hint)


def _export_step(folder: Path) -> dict[str, Any]:
    """The last export in the manifest; empty if there is none, or the file is invalid."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes()) if path.is_file() and path.stat().st_size <= MANIFEST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    steps = content.get("steps") if isinstance(content, dict) else None
    found = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return next((step for step in reversed(found) if step.get("command") == "export"), {})


def described(matrices: Mapping[tuple[int, int], int]) -> str:
    """Quantized matrices by bits and size of a block (0: none), as `43 matrices (42 of 4 bits in blocks of 32, …)`."""
    total = sum(matrices.values())
    kinds = [
        f"{count:,} of {bits} bits {f'in blocks of {size}' if size else 'by column'}"
        for (bits, size), count in matrices.items()
    ]
    return f"{total:,} {'matrix' if total == 1 else 'matrices'}" + (f" ({', '.join(kinds)})" if kinds else "")


# first bytes of files that are mistaken for models
OTHER_FILES = {
    b"<!DOCTYPE html": "a web page; the download may need a login",
    b"<html": "a web page; the download may need a login",
    b"GGUF": "a GGUF file of llama.cpp",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, as Keras writes",
    b"\x7fELF": "a program",
    b"\x93NUMPY": "a numpy array",
}
ONNX_ADAPTER = b"TORT"  # bytes 4 to 8 of onnxruntime's adapter files
TO_HF = "convert a training checkpoint first: `llmconv to-hf SOURCE -o OUT`"
SUFFIXES_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
NESTED = 100  # most folders of a folder that are looked into for models
OLMO_CORE = "model_and_optim/.metadata"  # in a checkpoint of OLMo-core
TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
# names of torch files that are not weights
KINDS = {
    "the optimizer's state": re.compile(  # `model_optim_rng.pt` of Megatron has the weights
        r"(?!model_optim_rng)(?:.*[-_.])?optim(?:izers?)?(?:[-_.].*)?\.(?:pth?|bin|pdopt|ckpt|safetensors)|.*\.pdopt|.*master_weights.*"
    ),
    "the learning-rate schedule": re.compile(r"(?:lr_)?scheduler.*"),
    "the loss scale": re.compile(r"(?:grad_)?scaler.*"),
    "random number states": re.compile(r"(?:rng|random)_state.*|rank-specific.*"),
    "the schedule and random number states": re.compile(r"extra_state_world_size_.*"),
    "the trainer's state": re.compile(r"trainer_state\.json|training_args\.bin|.*\.other\.pth"),
    "the data loader's state": re.compile(r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin|(?:.*_)?dataloader(?:_.*)?\.pt"),
    "objects registered for checkpointing": re.compile(r"custom_checkpoint_\d+\.pkl"),
}
"""Description to file names: torch's, PaddleNLP's (`utils/env.py`), LLaMA2-Accessory's (`util/misc.py`),
accelerate's (`utils/constants.py`)."""


OTHER_LIBRARIES = {
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "flax_model.msgpack.index.json": "Flax",
    "saved_model.pb": "TensorFlow",
    "model.ckpt.index": "TensorFlow",
    "rust_model.ot": "rust-bert",
}
ZIP = b"PK\x03\x04"
HEAD = 300


def refused_model(path: Path) -> InputRefused:
    """The error for a path that is not a Hugging Face model folder."""
    found = _folder(path) if path.is_dir() else _file(path)
    return found or InputRefused(
        f"`{path}` is not a Hugging Face model folder: it has no `config.json`"
        if path.is_dir()
        else f"`{path}` is a file, not a Hugging Face model folder",
        hint=TO_HF,
    )


def known_refusal(path: Path) -> InputRefused | None:
    """Like `refused_model`, but None if the path is of no known kind."""
    return _folder(path) if path.is_dir() else _file(path)


def foreign_file(head: bytes, path: Path) -> UnsupportedInput | None:
    """The error for a file of another kind, from its first bytes; None if unknown. Raises it for a Git LFS pointer."""
    refuse_git_lfs(head, path.name)
    if head[4:8] == ONNX_ADAPTER:
        problem = f"`{path.name}` has LoRA factors for graphs, as `llmconv onnx-adapter` writes them"
        return UnsupportedInput(
            problem, hint=f"run it with its graphs: `llmconv generate FOLDER --adapter {word(path)}`"
        )
    kind = next((kind for magic, kind in OTHER_FILES.items() if head.startswith(magic)), None)
    if kind is None:
        return None
    hints = {
        "a GGU": f"convert it first: `llmconv to-hf {word(path)} -o OUT`",
        "a web": "log in (`hf auth login`) and download it again",
    }
    message = f"`{path.name}` is {kind}"
    return UnsupportedInput(message, hint=hints.get(kind[:5], "give a checkpoint or a Hugging Face model folder"))


def _part_of_a_model(path: Path) -> InputRefused | None:
    """The error for a file where a folder is needed: weights, or a file next to them."""
    if path.suffix == ".json" and _mark(path.parent) == "a model":
        return InputRefused(f"`{path.name}` is one file of a model folder", hint=f"give its folder: `{path.parent}`")
    if alone := adapter_file(path):
        return alone
    if path.suffix != ".safetensors":
        return None
    if (path.parent / "config.json").is_file():
        problem = f"`{path.name}` is a weights file, not a model folder"
        return InputRefused(problem, hint=f"give its folder: `{path.parent}`")
    hint = (
        f"put `config.json` next to it and give the folder, or run `llmconv to-hf {word(path)} --config CONFIG -o OUT`"
    )
    return InputRefused(f"`{path.name}` is a weights file without the model's `config.json`", hint=hint)


def _file(path: Path) -> InputRefused | None:
    try:
        with open_source(path) as file:
            head = file.read(HEAD)
    except OSError:
        return None
    if not head:
        return MalformedInput(f"`{path.name}` is empty", hint="copy it again from where it was saved")
    if found := foreign_file(head, path):
        return found
    if part := _part_of_a_model(path):
        return part
    if path.suffix == ".onnx":
        problem = f"`{path.name}` is an ONNX graph, not a model folder"
        return UnsupportedInput(problem, hint="give the Hugging Face folder that it was exported from")
    if kind := training_file_kind(path.name):
        problem = f"`{path.name}` is {kind}, not a model"
        return InputRefused(problem, hint="give the folder or file with the weights")
    if _is_torch_file(path):
        problem = f"`{path.name}` is a torch file, not a Hugging Face model folder"
        return InputRefused(problem, hint=f"convert it first: `llmconv to-hf {word(path)} -o OUT`")
    if head.startswith(ZIP) or head[257:262] == b"ustar":
        kind = "zip" if head.startswith(ZIP) else "tar"
        return UnsupportedInput(f"`{path.name}` is a {kind} archive", hint="unpack it and give the folder inside")
    return None


def _folder(folder: Path) -> InputRefused | None:
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return InputRefused(f"`{folder}` is an empty folder", hint="check that the copy or download is complete")
    checks: tuple[Callable[[Path, set[str]], InputRefused | None], ...] = (
        lambda folder, names: adapter_or_delta(folder),
        lambda folder, names: refused_export(folder) if is_quantized_export(folder) else None,
        lambda folder, names: _olmo_core(folder),
        _weights_of_other_libraries,
        _weights_without_config,
        _folders_inside,
        _config_alone,
    )
    return next((found for check in checks if (found := check(folder, names))), None)


def _olmo_core(folder: Path) -> InputRefused | None:
    """A checkpoint of OLMo-core, or the folder of a run that contains some as `step1000`."""
    steps = [one for one in sorted(folder.glob("step*"))[:NESTED] if (one / OLMO_CORE).is_file()]
    found = folder if (folder / OLMO_CORE).is_file() else max(steps, key=lambda one: one.stat().st_mtime, default=None)
    return of_olmo_core(found) if found else None


def of_olmo_core(folder: Path) -> UnsupportedInput:
    """The refusal of a checkpoint of OLMo-core, the folder of one step."""
    return UnsupportedInput(
        f"`{folder}` is a checkpoint of OLMo-core, whose files and names are its own",
        hint="OLMo-core's program writes a Hugging Face folder of it: `python "
        f"src/examples/huggingface/convert_checkpoint_to_hf.py -i {word(folder)} -o OUT`",
    )


def adapter_file(path: Path) -> InputRefused | None:
    """The error for the weights of an adapter in place of a model; None for any other file."""
    if not path.name.startswith("adapter_model.") or not (path.parent / "adapter_config.json").is_file():
        return None
    problem = f"`{path.name}` has the weights of an adapter, and not of a model"
    return UnsupportedInput(problem, hint=f"merge it first: `llmconv merge-lora BASE {word(path.parent)} -o OUT`")


def adapter_or_delta(folder: Path) -> InputRefused | None:
    """The error for a folder with an adapter or a delta in place of a model; None for any other."""
    if prompts := litgpt_prompts(folder):
        return prompts
    if (folder / "delta.json").is_file():
        message = f"`{folder}` is a delta, not a model"
        return UnsupportedInput(message, hint=f"use `llmconv delta apply BASE {word(folder)} -o OUT`")
    if (folder / "adapter_config.json").is_file():
        names = {entry.name for entry in folder.iterdir()}
        if names & MODEL_WEIGHTS and not any(name.startswith("adapter_model.") for name in names):
            problem = f"`{folder}` holds a model with an adapter that may not be merged"
            return UnsupportedInput(problem, hint=f"merge it first: `llmconv to-hf {word(folder)} -o OUT`")
        if names & MODEL_WEIGHTS:
            return UnsupportedInput(
                f"`{folder}` holds an adapter and a whole model, into which it may be merged already",
                hint=f"if it is, as torchtune saves an epoch, go on: `llmconv export {word(folder)}`; if not, merge: "
                f"`llmconv merge-lora BASE {word(folder)} -o OUT`",
            )
        base = adapter_base(folder)
        of = f" of `{base}`" if base else ""
        problem = f"`{folder}` is an adapter{of}, not a model"
        base = base if "/" in base else "BASE"  # a bare name is seldom a folder here, nor one of the Hub
        return UnsupportedInput(
            problem, hint=f"merge it first: `llmconv merge-lora {word(base)} {word(folder)} -o OUT`"
        )
    return None


LITGPT_PROMPTS = ("lit_model.pth.adapter_v2", "lit_model.pth.adapter")


def litgpt_prompts(path: Path) -> UnsupportedInput | None:
    """The error for what LitGPT's `finetune_adapter` and `finetune_adapter_v2` write; None for any other path."""
    names = [path.name] if path.is_file() else [name for name in LITGPT_PROMPTS if (path / name).is_file()]
    if not names or names[0] not in LITGPT_PROMPTS:
        return None
    problem = f"`{names[0]}` is a LLaMA-Adapter of LitGPT: prompts that each layer attends to through gates"
    return UnsupportedInput(
        problem,
        hint="no merged model equals it, and transformers has no such layers; run it with LitGPT, or train LoRA "
        "(`litgpt finetune_lora`)",
    )


def adapter_base(folder: Path) -> str:
    """The base model that a PEFT adapter declares, empty if it declares none."""
    try:
        config = json.loads((folder / "adapter_config.json").read_bytes()[: 1 << 20])
    except (OSError, ValueError, RecursionError):
        return ""
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if isinstance(base, str) else ""


def _is_torch_file(path: Path) -> bool:
    from llmconv.files.torch_reader import is_torch_file  # noqa: PLC0415 - a model folder needs no reader of pickles

    return path.suffix in SUFFIXES_OF_TORCH and is_torch_file(path)


def _weights_of_other_libraries(folder: Path, names: set[str]) -> InputRefused | None:
    if any(name.endswith(".safetensors") for name in names):
        return None
    if found := sorted(name for name in names if TORCH_WEIGHTS.fullmatch(name)):
        problem = f"the weights in `{folder}` are torch files (`{found[0]}`), not safetensors"
        return InputRefused(problem, hint=f"convert them: `llmconv to-hf {word(folder)} -o OUT`")
    if HQQ in names:
        return unread_codes(f"the weights in `{folder}`", HQQ, "HQQ")
    files = [folder / name for name in names if not training_file_kind(name)]
    if found := sorted(path.name for path in files if _is_torch_file(path)):
        problem = f"`{folder}` contains a torch checkpoint (`{found[0]}`) and no safetensors weights"
        return InputRefused(problem, hint=f"convert it: `llmconv to-hf {word(folder)} -o OUT`")
    if found := sorted(name for name in names if name in OTHER_LIBRARIES):
        return UnsupportedInput(
            f"the weights in `{folder}` are {OTHER_LIBRARIES[found[0]]} weights (`{found[0]}`)",
            hint="load them with transformers 4 (`from_tf=True` or `from_flax=True`) and save them with "
            "`save_pretrained`",
        )
    if found := sorted(name for name in names if name.lower().endswith(".gguf")):
        problem = f"`{folder}` contains a GGUF file of llama.cpp (`{found[0]}`)"
        return InputRefused(problem, hint=f"convert it: `llmconv to-hf {word(folder / found[0])} -o OUT`")
    graphs = sorted(folder.glob("*.onnx")) or sorted((folder / "onnx").glob("*.onnx"))
    if found := [path.relative_to(folder).as_posix() for path in graphs]:
        return UnsupportedInput(
            f"`{folder}` contains ONNX graphs (`{found[0]}`) and no model weights",
            hint="give the Hugging Face folder that they were exported from; to compare them: "
            f"`llmconv verify --graph {word(folder / found[0])} --reference HF_FOLDER`",
        )
    return None


SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")


def _weights_without_config(folder: Path, names: set[str]) -> InputRefused | None:
    weights = sorted(name for name in names if name.endswith((".safetensors", ".safetensors.index.json")))
    if not weights:
        return None
    if odd := next((name for name in weights if not (folder / name).is_file()), None):
        problem = f"`{folder}` contains no safetensors weights: `{odd}` is not a regular file"
        return MalformedInput(problem, hint="it is a folder, a pipe or a broken link; copy the folder again")
    if (folder / "config.json").is_file():
        shards = [match for name in weights if (match := SHARD.fullmatch(name))]
        count = int(shards[0][2]) if shards else 0
        if lost := sorted({*range(1, count + 1)} - {int(match[1]) for match in shards}):
            return MalformedInput(
                f"`{folder}` contains {len(shards)} of {count} shards, and no index; number {lost[0]} is missing",
                hint="copy or download the folder again; an interrupted download continues where it stopped",
            )
        problem = f"`{folder}` contains no `model.safetensors`, only `{weights[0]}`"
        return InputRefused(problem, hint=f"write it as a Hugging Face folder: `llmconv to-hf {word(folder)} -o OUT`")
    hint = f"put `config.json` into the folder, or run `llmconv to-hf {word(folder)} --config CONFIG -o OUT`"
    return InputRefused(f"`{folder}` contains weights (`{weights[0]}`), but no `config.json`", hint=hint)


def _folders_inside(folder: Path, names: set[str]) -> InputRefused | None:
    """A Trainer's output folder, or one with models and adapters inside."""
    steps = sorted(int(match[1]) for name in names if (match := TRAINER_FOLDER.fullmatch(name)))
    if steps:
        hint = f"give one of them, such as the last one: `{folder / f'checkpoint-{steps[-1]}'}`"
        return InputRefused(f"`{folder}` contains {len(steps)} Trainer checkpoint(s), but no model itself", hint=hint)
    found = {name: mark for name in sorted(names) if (mark := _mark(folder / name))}
    if not found:  # prime-rl has `weights/step_10`, others `checkpoints/step_10`
        below = [one for name in sorted(names)[:NESTED] for one in sorted((folder / name).glob("*"))[:NESTED]]
        found = {one.relative_to(folder).as_posix(): mark for one in below if (mark := _mark(one))}
    if not found:
        return None
    shown = ", ".join(f"`{name}` ({mark})" for name, mark in list(found.items())[:5])
    first = next((name for name, mark in found.items() if mark == "a model"), next(iter(found)))
    problem = f"`{folder}` is not a model itself; it contains {shown}"
    return InputRefused(problem, hint=f"give one of them: `{folder / first}`")


def _mark(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "an adapter"
    weights = (folder / "model.safetensors", folder / "model.safetensors.index.json")
    return "a model" if (folder / "config.json").is_file() and any(file.is_file() for file in weights) else ""


def _config_alone(folder: Path, names: set[str]) -> InputRefused | None:
    if "config.json" not in names:
        return None
    if not (folder / "config.json").is_file():
        problem = f"`config.json` in `{folder}` is not a regular file"
        return MalformedInput(problem, hint="it is a folder, a pipe or a broken link; copy the folder again")
    problem = f"`{folder}` contains no safetensors weights next to its `config.json`"
    if run := _weights_near(folder):
        known = f", `llmconv to-hf {word(run)} --config {word(folder / 'config.json')} -o OUT`"
        command = known if run.parent == folder.absolute().parent else f", `llmconv to-hf {word(run)} -o OUT`"
        is_model = any((run / name).is_file() for name in MODEL_WEIGHTS) and (run / "config.json").is_file()
        return InputRefused(f"{problem}; they are in `{run}`", hint="give that folder" + ("" if is_model else command))
    hint = "add `model.safetensors`, or shards with `model.safetensors.index.json`; is the copy complete?"
    return InputRefused(problem, hint=hint)


# files and folders with the weights of runs that keep config and tokenizer in a folder inside (verl: `huggingface/`)
RUN_WEIGHTS = re.compile(
    r"model_world_size_\d+_rank_\d+\.pt|\w+\.distcp|\.metadata|dist_ckpt|iter_\d{7}|pytorch_model_fsdp(?:_\d+|\.bin)"
    r"|(?:mp_rank_\d+|zero_pp_rank_\d+)\w*(?:\.pt)?|global_step\d+|consolidated\.\d+\.pth|lit_model\.pth"
    r"|(?:pytorch_)?model(?:-\d+-of-\d+)?\.(?:safetensors|bin)|model_state\w*\.pdparams"
)


def _weights_near(folder: Path) -> Path | None:
    """The folder above, if it has a run's weights, or a distributed checkpoint next to the folder."""
    above = folder.absolute().parent
    try:
        names = sorted(entry.name for entry in above.iterdir())
        if any(RUN_WEIGHTS.fullmatch(name) for name in names):
            return above
        others = [above / name for name in names[:NESTED] if name != folder.name]
        return next((one for one in others if (one / ".metadata").is_file()), None)
    except OSError:
        return None


def training_file_kind(name: str) -> str | None:
    """Description of a training file with this name, such as `the optimizer's state`; None for other files."""
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(name)), None)


def training_files_in(path: Path) -> tuple[str, ...]:
    """One phrase for each kind of training file in the folder `path`; empty for a single file."""
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    kinds = {kind: [name for name in names if pattern.fullmatch(name)] for kind, pattern in KINDS.items()}
    return tuple(f"{kind} ({listing(found)})" for kind, found in kinds.items() if found)


PLACES = ("compression_config", "text_config", "llm_config", "language_config")
UNREAD = {".weight._data": "quanto", "._weight_qdata": "torchao", ".W_q": "HQQ"}  # codes that llmconv does not read
CODES_OF = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
SCALES = re.compile(r"(?P<weight>.+\.weight)_scale(?:_inv|_2)?|(?P<module>.+)\.scales")
INTEGERS = re.compile(r"u?int(?:8|32)|float8\w*")  # of weights that are codes; those of MLX are words of 32 bits


def refuse_unexplained_codes(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises an error for codes that no `quantization_config` of the `config.json` explains, by the tensors' names.

    Composite models of some releases have it in `text_config`, and early ones of llm-compressor had another name. A
    model of plain weights may still have such a field. Some libraries save models without it (UnsupportedInput), and
    tools that write a configuration anew lose it (MalformedInput).
    """
    if config.get("quantization_config") or (codes := _codes(tensors)) is None:
        return
    name, library = codes
    if library in UNREAD.values():
        raise unread_codes("the weights", name, library)
    own = {"quantization_config", "config_groups"}
    if found := [place for place in PLACES if isinstance(one := config.get(place), Mapping) and own & one.keys()]:
        raise MalformedInput(
            f"the weights are codes, and their `quantization_config` is in `{found[0]}`, where nobody looks for it",
            hint="copy it to the top of `config.json`, under the name `quantization_config`",
        )
    old = "; old ones have it in `quantize_config.json` or `quant_config.json`, without `quant_method`"
    raise MalformedInput(
        f"the weights are codes{library and f' of {library}'} (`{name}`), and `config.json` has no "
        "`quantization_config`, which says what they mean",
        hint="copy the field from the `config.json` of the quantized model"
        + (old if name.endswith(".qweight") else ""),
    )


HQQ = "qmodel.pt"  # the weights that HQQ's own `save_quantized` writes


def unread_codes(subject: str, name: str, library: str) -> UnsupportedInput:
    """The error for codes of a library, in a tensor or a file `name`, that llmconv does not read."""
    problem = f"{subject} are codes of {library} (`{name}`), which are not supported"
    return UnsupportedInput(problem, hint=f"take the model they were made from, or let {library} save values")


def _codes(tensors: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of a tensor of codes, and what stores them (empty for several); None if there are none."""
    for name in tensors:
        for end, library in (*UNREAD.items(), *CODES_OF.items()):
            if name.endswith(end):
                return name, library
        scales = SCALES.fullmatch(name)
        own = str(scales["weight"] or f"{scales['module']}.weight") if scales else ""
        if scales and own in tensors and INTEGERS.fullmatch(tensors[own].dtype.name):
            return own, "" if scales["weight"] else "MLX"
    return None
