"""The text on which an export measured ranges, which is measured again."""

from __future__ import annotations

from pathlib import Path

from llmconv.errors import UsageProblem
from llmconv.output.manifest import read_manifest
from llmconv.runtime.calibration_text import CalibrationText


def recorded_text(folder: Path, given: Path | None) -> CalibrationText:
    """The text of an export, which is compared with the sha256 recorded in the folder of the graphs.

    `given` is the text file; None for the text that ships with llmconv.

    Raises:
        UsageProblem: no text is given and the export had its own, or another one is given.
    """
    recorded = {entry.get("calibrate") for entry in read_manifest(folder).graphs.values() if isinstance(entry, dict)}
    if given is None and recorded - {None} <= {CalibrationText.shipped().sha256}:
        return CalibrationText.shipped()
    if given is None:
        raise UsageProblem(
            "the ranges of activations, keys and values are compared with those on the text of the export",
            hint="give it: `--calibrate FILE`, as for `llmconv export`",
        )
    text = CalibrationText.read(given)
    if recorded - {None} and recorded != {text.sha256}:
        raise UsageProblem(
            f"`{given}` is not the text on which the ranges were measured (its sha256 differs)",
            hint="give the file that `llmconv export --calibrate` read",
        )
    return text
