"""An environment of its own for optimum-onnx, which pins transformers < 4.58; made once (`make optimum-env`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path("build/optimum-env")
PYTHON = FOLDER / "bin" / "python"
PINS = ("optimum-onnx==0.1.0", "transformers==4.57.6", "onnxruntime==1.31.1", "onnxscript==0.7.2", "accelerate==1.15.0")
TORCH = "torch==2.13.0"


def main() -> None:
    """Creates the environment unless it is there; torch first, so that no other build of it is pulled in."""
    if (FOLDER / "complete").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for packages in ((TORCH,), (TORCH, *PINS)):
        subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", *packages], check=True)
    (FOLDER / "complete").touch()


if __name__ == "__main__":
    main()
