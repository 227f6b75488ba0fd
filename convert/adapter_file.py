"""onnx_adapter: the factors of a LoRA adapter as a file of onnxruntime, for graphs of `export --lora-inputs`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmconv.argument_checks import checked
from llmconv.checkpoint import ADAPTER_CONFIG, is_model_folder
from llmconv.errors import InputRefused, OutputFailed, UsageProblem
from llmconv.files.paths import Written, output_path
from llmconv.files.safe_folder import Folder, parents_made, require_parents
from llmconv.files.sources import fetches, local_path

SUFFIX = ".onnx_adapter"


@dataclass(frozen=True)
class AdapterFile:
    """The file that was written.

    Attributes:
        path: the file.
        modules: the modules that have factors, in order.
        nbytes: size of the file.
    """

    path: Path
    modules: tuple[str, ...]
    nbytes: int


@fetches
@checked
def onnx_adapter(
    folder: str | Path,
    adapter: str | Path,
    output: Written,
    *,
    alpha: float | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> AdapterFile:
    """Writes the factors of a LoRA adapter by the names of the inputs of a folder's graphs.

    A is stored as it is, B times alpha/rank (rsLoRA: alpha/√rank), in float64 and rounded once to float32.

    Args:
        folder: the base with graphs of `export --lora-inputs`.
        adapter: a LoRA adapter that `merge-lora` reads.
        output: the file to write; its name ends with `.onnx_adapter`.
        alpha: `lora_alpha` if the adapter's files do not contain it.
        overwrite: replace an existing file.
        dry_run: check everything, write nothing.

    Raises:
        InputRefused: `output` exists, the graphs have no inputs for factors of the adapter, or a file is missing.
        MalformedInput: an adapter for another base, incomplete, or not finite.
        UnsupportedInput: another kind of adapter than LoRA or rsLoRA.
        UsageProblem: another file name.
        OutputFailed: writing failed.
    """
    path = output_path(output)
    if path.suffix != SUFFIX:
        raise UsageProblem(f"`{path.name}` does not end with `{SUFFIX}`", hint=f"give `-o {path.stem}{SUFFIX}`")
    if path.exists() and not (overwrite and path.is_file()):
        raise InputRefused(f"`{path}` exists", hint="give another name, or `--overwrite` to replace a file")
    require_parents(path)
    base = local_path(folder)
    if (base / ADAPTER_CONFIG).is_file() and not is_model_folder(base) and is_model_folder(Path(adapter)):
        raise InputRefused(
            f"the arguments are swapped: FOLDER `{folder}` is an adapter, and ADAPTER `{adapter}` is a model",
            hint=f"give the folder of the graphs first: `llmconv onnx-adapter {adapter} {folder} -o {path}`",
        )
    from llmconv.convert.lora_factors import adapter_file  # noqa: PLC0415 - imports onnxruntime

    modules, content = adapter_file(base, adapter, alpha)
    if not dry_run:
        try:
            with parents_made(path), Folder.open(path.parent) as place:
                place.write(path.name, content)
        except OSError as error:
            raise OutputFailed(
                f"`{path}` cannot be written: {error.strerror or error}",
                hint="check the folder and the free disk space",
            ) from error
    return AdapterFile(path, modules, len(content))
