"""Explains why a path matches no known format: the error names what it is, and the way out."""

from __future__ import annotations

import zipfile
from pathlib import Path

from llmconv.convert.deltas import DELTA_FILE
from llmconv.convert.formats import adapter_format, formats
from llmconv.convert.opening.unclaimed_files import checkpoint_files
from llmconv.convert.state_dicts.files import SUFFIXES
from llmconv.convert.state_dicts.safetensors_files import is_model_folder
from llmconv.convert.state_dicts.training_files import training_file_kind
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput
from llmconv.files.pickles.machine import Stub
from llmconv.files.source_file import open_source
from llmconv.files.torch.reader import explain_no_zip, is_torch_file, open_torch_file
from llmconv.not_a_model_folder import foreign_file, known_refusal
from llmconv.quantized_export import is_quantized_export, refused_export

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

OF_DEEPSPEED = "_optim_states.pt"
"""Suffix of DeepSpeed's optimizer files."""


def explain(path: Path) -> LlmconvError:
    """The error for a path that matches no known format."""
    if kind := adapter_format(path):
        return UnsupportedInput(
            f"`{path.name}` is an adapter of {kind.title}",
            hint=f"merge it: `llmconv merge-lora BASE {path.name} -o OUT`",
        )
    return _explain_folder(path) if path.is_dir() else _explain_file(path)


def _explain_folder(folder: Path) -> LlmconvError:
    if is_quantized_export(folder):
        return refused_export(folder)
    names = {entry.name for entry in folder.iterdir()}
    if DELTA_FILE in names:
        return UnsupportedInput(f"`{folder}` is a delta", hint="use `llmconv delta apply BASE DELTA -o OUT`")
    if "adapter_config.json" in names:
        return UnsupportedInput(f"`{folder}` is an adapter", hint="use `llmconv merge-lora BASE ADAPTER -o OUT`")
    if is_model_folder(folder):
        return UnsupportedInput(
            f"`{folder}` already is a Hugging Face model folder",
            hint="go on with `merge-lora` or `export`; `--dtype` and `--max-shard-size` write it anew",
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
    if checkpoints:
        return InputRefused(
            f"`{folder}` contains {len(checkpoints)} checkpoint files, and not as the shards of one",
            hint=f"name the file, such as `{checkpoints[-1]}`",
        )
    return known_refusal(folder) or _unknown(folder)


def _explain_file(path: Path) -> LlmconvError:
    if not path.is_file():
        return InputRefused(f"`{path}` is not a regular file", hint="give a file or a folder")
    if not path.stat().st_size:
        return MalformedInput(f"`{path.name}` is empty", hint="copy it again from where it was saved")
    with open_source(path) as file:
        head, is_zip = file.read(300), zipfile.is_zipfile(file)
    left = training_file_kind(path.name)
    if left and not path.name.endswith(OF_DEEPSPEED):  # whose optimizer holds the weights
        return InputRefused(f"`{path.name}` is {left}, not the model's weights", hint=_weights_next_to(path))
    if path.suffix not in SUFFIXES and is_zip and not is_torch_file(path):
        return known_refusal(path) or _unknown(path)
    if head.startswith(b"PK") or is_torch_file(path):
        return _explain_torch(path)
    foreign = known_refusal(path) if path.suffix == ".onnx" else foreign_file(head, path.name)
    if foreign:
        return foreign
    no_zip = explain_no_zip(path, head)
    return no_zip if isinstance(no_zip, UnsupportedInput) else _unknown(path)


def _explain_torch(path: Path) -> LlmconvError:
    try:
        content = open_torch_file(path).content
    except LlmconvError as problem:
        return problem
    if isinstance(content, Stub):
        return UnsupportedInput(
            f"`{path.name}` is a whole object (`{str(content.function)[:80]}`), pickled with its class",
            hint="load it where its code is, and save its `state_dict()`",
        )
    if isinstance(content, dict) and "ds_version" in content:
        return InputRefused(
            f"`{path.name}` is one file of a DeepSpeed checkpoint", hint=f"give its folder, `{path.parent}`"
        )
    keys = ", ".join(f"`{key}`" for key in list(content)[:4]) if isinstance(content, dict) else "not a dict"
    return UnsupportedInput(
        f"`{path.name}` is a torch file, but not of a known training format (it contains {keys})", hint=_known()
    )


def _weights_next_to(path: Path) -> str:
    files = checkpoint_files(path.parent)
    return f"give the weights next to it: `{files[0]}`" if files else "give the file or folder with the weights"


def _unknown(path: Path) -> LlmconvError:
    return UnsupportedInput(f"`{path.name or path}` is not of a training format that llmconv knows", hint=_known())


def _known() -> str:
    return f"known formats: {', '.join(formats())}; `llmconv formats` describes each"
