"""An environment of its own for optimum-onnx, which pins transformers < 4.58; made once and kept in build/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/optimum-env")
PINS = ("optimum-onnx==0.1.0", "transformers==4.57.6", "onnxruntime==1.31.1", "onnxscript==0.7.2", "accelerate==1.15.0")
TORCH = "torch==2.13.0"


def python() -> Path:
    """The environment's interpreter; it is created on first use, torch first, so that no other build is pulled in."""
    interpreter = FOLDER / "bin" / "python"
    if (FOLDER / "complete").exists():
        return interpreter
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for packages in ((TORCH,), (TORCH, *PINS)):
        subprocess.run([str(interpreter), "-m", "pip", "install", "--quiet", *packages], check=True)
    (FOLDER / "complete").touch()
    return interpreter
