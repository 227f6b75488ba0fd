"""`to_gguf`: a model as one GGUF file, with columns that count as much as a text says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from llmconv.argument_checks import OWN, checked
from llmconv.convert.from_hugging_face import write_gguf
from llmconv.errors import UsageProblem
from llmconv.files.paths import Written
from llmconv.files.sources import fetches
from llmconv.output.plan import Plan

WITH_IMPORTANCE = ("q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0")
NAME = "imatrix.gguf"


@fetches
@checked
def to_gguf(
    model: str | Path,
    output: Annotated[Written, OWN],
    *,
    type: str | None = None,
    imatrix: str | Path | None = None,
    calibrate: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Plan:
    """Writes the Hugging Face folder `model` as one GGUF file of llama.cpp; returns what was written.

    The file is that of `from_hf(model, output, to="gguf")`, without a folder around it.

    Args:
        model: a folder, or its URI or hub id.
        output: the file to make; `model.gguf` in an existing folder, or in one whose name ends with `/`.
        type: of the matrices, such as `f16` or `q4_k_m`; None for that of the folder.
        imatrix: an importance matrix of llama.cpp, for a type with blocks.
        calibrate: a text file on which the importance matrix is measured (`importance_matrix`), or `default`.
        overwrite: replace an existing file.
        dry_run: return the plan, and write nothing; a text is not run.

    Raises:
        InputRefused: the folder is malformed, or a GGUF file cannot hold such a model; or `output` exists.
        UsageProblem, OutputFailed: an option has an impossible value; writing failed.
    """
    if calibrate is None:
        return write_gguf(model, output, type=type, imatrix=imatrix, overwrite=overwrite, dry_run=dry_run)
    if imatrix is not None:
        raise UsageProblem("`--calibrate` makes the importance matrix that `--imatrix` gives", hint="give one of them")
    if type not in WITH_IMPORTANCE:
        hint = f"give `--type`, one of: {', '.join(WITH_IMPORTANCE)}"
        raise UsageProblem("`--calibrate` is for types with blocks of 4 to 6 bits", hint=hint)
    # refuses what can be refused before the text runs
    plan = write_gguf(model, output, type=type, overwrite=overwrite, dry_run=True)
    if dry_run:
        return plan
    from llmconv.compressed.importance import importance_matrix  # noqa: PLC0415 - torch

    with tempfile.TemporaryDirectory(prefix="llmconv-") as folder:
        importance_matrix(model, Path(folder) / NAME, calibrate=calibrate)
        return write_gguf(model, output, type=type, imatrix=Path(folder) / NAME, overwrite=overwrite)
