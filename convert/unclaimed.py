"""What a path is that no format claims, so that the error can name it and the way out."""

from __future__ import annotations

from pathlib import Path

from llmconv.convert.formats import formats
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput
from llmconv.torch_file import explain_no_zip, is_torch_file, open_torch_file

FOREIGN = {
    b"GGUF": "a GGUF file of llama.cpp",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, as Keras writes",
    b"\x7fELF": "a program",
    b"\x93NUMPY": "a numpy array",
}
"""First bytes of files that people take for checkpoints."""


def explain(path: Path) -> LlmconvError:
    """The error for a path that is of no known format."""
    return _explain_folder(path) if path.is_dir() else _explain_file(path)


def _explain_folder(folder: Path) -> LlmconvError:
    names = {entry.name for entry in folder.iterdir()}
    if any(name.endswith(".distcp") for name in names):
        return UnsupportedInput(
            f"`{folder}` is a sharded (DCP) checkpoint",
            hint="join it first: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE`",
        )
    if "adapter_config.json" in names:
        return UnsupportedInput(f"`{folder}` is an adapter", hint="use `llmconv merge-lora BASE ADAPTER -o OUT`")
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return UnsupportedInput(
            f"`{folder}` already is a Hugging Face folder", hint="go on with `merge-lora` or `export`"
        )
    if any(name.endswith((".pdiparams", ".pdmodel")) for name in names):
        return UnsupportedInput(
            f"`{folder}` is a static graph of Paddle, which is not converted back",
            hint="give the folder with `model_state.pdparams` that it was exported from",
        )
    if "composer_metadata.json" in names:
        return UnsupportedInput(
            f"`{folder}` is a Composer checkpoint in the newer folder layout", hint="this layout comes later"
        )
    checkpoints = sorted(name for name in names if name.endswith((".pt", ".pth")) and is_torch_file(folder / name))
    if checkpoints:
        return InputRefused(
            f"`{folder}` is a folder with {len(checkpoints)} checkpoint file(s), not one of them",
            hint=f"name the file, such as `{folder / checkpoints[-1]}`",
        )
    return _unknown(folder)


def _explain_file(path: Path) -> LlmconvError:
    if not path.is_file():
        return InputRefused(f"`{path}` is no regular file", hint="give a file or a folder")
    with open(path, "rb") as file:
        head = file.read(300)
    if head.startswith(b"PK"):
        try:
            content = open_torch_file(path).content
        except LlmconvError as problem:
            return problem
        keys = ", ".join(f"`{key}`" for key in list(content)[:4]) if isinstance(content, dict) else "no dict"
        return UnsupportedInput(
            f"`{path.name}` is a torch file, but of no known training format (it holds {keys})", hint=_known()
        )
    foreign = next((what for magic, what in FOREIGN.items() if head.startswith(magic)), None)
    if foreign:
        return UnsupportedInput(f"`{path.name}` is {foreign}, no training checkpoint", hint=_known())
    no_zip = explain_no_zip(path, head)
    return no_zip if isinstance(no_zip, UnsupportedInput) else _unknown(path)


def _unknown(path: Path) -> LlmconvError:
    return UnsupportedInput(f"`{path}` is of no training format that llmconv knows", hint=_known())


def _known() -> str:
    return f"known formats: {', '.join(formats())}; `llmconv formats` tells what each looks like"
