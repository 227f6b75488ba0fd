"""onnx_adapter: the factors of a LoRA adapter, for graphs of `export --lora-inputs`, and as a file of onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmconv.argument_checks import checked
from llmconv.checkpoint import ADAPTER_CONFIG, is_model_folder, open_checkpoint
from llmconv.convert.adapters.base_checks import warn_of_origin
from llmconv.convert.adapters.low_rank_sum import LoraProduct
from llmconv.convert.adapters.merging import merged
from llmconv.convert.adapters.targets import WeightChange
from llmconv.convert.opening_adapters import open_adapters
from llmconv.errors import InputRefused, OutputFailed, UnsupportedInput, UsageProblem, listing, word
from llmconv.files.paths import Written, output_path
from llmconv.files.safe_folder import Folder, parents_made, require_parents
from llmconv.files.sources import fetches, local_path
from llmconv.output.manifest import graph_entries
from llmconv.progress import warn_all
from llmconv.runtime.extra_inputs import factor_names
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.onnxruntime.lora_names import declared_factors, encode_adapter, module_of, require_factors
from llmconv.tensors import Array

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
        raise UsageProblem(
            f"`{path.name}` does not end with `{SUFFIX}`", hint=f"give `-o {word(path.with_suffix(SUFFIX))}`"
        )
    if path.exists() and not (overwrite and path.is_file()):
        raise InputRefused(f"`{path}` exists", hint="give another name, or `--overwrite` to replace a file")
    require_parents(path)
    base = local_path(folder)
    if (base / ADAPTER_CONFIG).is_file() and not is_model_folder(base) and is_model_folder(Path(adapter)):
        raise InputRefused(
            f"the arguments are swapped: FOLDER `{folder}` is an adapter, and ADAPTER `{adapter}` is a model",
            hint="give the folder of the graphs first: "
            f"`llmconv onnx-adapter {word(adapter)} {word(folder)} -o {word(path)}`",
        )
    modules, content = _adapter_file(base, adapter, alpha)
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


def _adapter_file(folder: Path, adapter: str | Path, alpha: float | None) -> tuple[tuple[str, ...], bytes]:
    """The modules of an adapter, and the content of onnxruntime's file for the graphs in the base's folder.

    `folder` has graphs of `export --lora-inputs` (else InputRefused). Other arguments and errors as in `lora_factors`.
    """
    declared = [declared_factors(load_guarded(folder / entry.files[0])) for entry in graph_entries(folder)]
    if not (common := set.intersection(*map(set, declared)) if declared else set[str]()):
        again = " --overwrite" if declared else ""
        raise InputRefused(
            f"`{folder}` has no graphs with inputs for LoRA factors",
            hint=f"`llmconv export {word(folder)} --lora-inputs all-linear{again}`",
        )
    factors = lora_factors(folder, adapter, alpha)
    require_factors(factors, {name: declared[0][name] for name in common})
    return tuple(dict.fromkeys(map(module_of, factors))), encode_adapter(factors)


MERGE = "merge it into a new folder: `llmconv merge-lora BASE ADAPTER -o OUT`"


def lora_factors(folder: Path, adapter: str | Path, alpha: float | None = None) -> dict[str, Array]:
    """A [rank, in] and B [out, rank], times the scale, of every module by input name, float32.

    `folder` is the base; `alpha` is `lora_alpha` if the files lack it. Raises InputRefused for missing files,
    MalformedInput for another base, UnsupportedInput for changes other than products of two factors.
    """
    base = open_checkpoint(folder)
    opened = open_adapters([adapter], (), base, alpha)
    _, edits = merged(base, opened)
    if replaced := sorted({*edits.whole, *edits.tokens}):
        raise UnsupportedInput(f"the adapter replaces {listing(replaced)}, which graphs map from the base", hint=MERGE)
    warn_all((*warn_of_origin(base, opened, str(folder)), *edits.warnings))
    factors: dict[str, Array] = {}
    for name, changes in edits.changes.items():
        if not name.endswith(".weight"):
            raise UnsupportedInput(f"the adapter changes `{name}`, which is not the matrix of a module", hint=MERGE)
        pair = _stacked(name, changes)
        factors |= zip(factor_names(name.removesuffix(".weight")), pair, strict=True)
    return factors


def _stacked(name: str, changes: Sequence[WeightChange]) -> tuple[Array, Array]:
    """A and B of all products of a weight; B·A is their sum."""
    products = [change for change in changes if isinstance(change, LoraProduct)]
    if len(products) < len(changes):
        raise UnsupportedInput(
            f"the adapter's update of `{name}` is not a product of two factors, as of LoRA and rsLoRA", hint=MERGE
        )
    a = [product.a.read().astype(np.float32) for product in products]
    b = [(product.b.read().astype(np.float64) * product.scale).astype(np.float32) for product in products]
    return np.concatenate(a), np.concatenate(b, axis=1)
