"""Help and conversions load no heavy package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import CHECKPOINT, LEAVES

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "huggingface_hub")


def loaded_by(*arguments: str) -> set[str]:
    """The packages that `llmconv ARGUMENTS` has imported when it ends."""
    code = f"""
import sys, llmconv.cli
try:
    llmconv.cli.main({list(arguments)!r})
finally:
    print("\\n" + " ".join({{name.partition(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_help_loads_nothing_heavy() -> None:
    assert not loaded_by("--help") & {*HEAVY, "numpy"}


@pytest.mark.quick_rows("export")
@pytest.mark.parametrize("name", LEAVES)
def test_the_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    assert not loaded_by(*name.split(), "--help") & set(HEAVY)


@pytest.mark.slow
def test_a_conversion_does_not_load_torch(tmp_path: Path) -> None:
    loaded = loaded_by("to-hf", CHECKPOINT, "-o", str(tmp_path / "base"))
    assert (tmp_path / "base/model.safetensors").exists()
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}


def test_from_hf_does_not_load_torch(tmp_path: Path) -> None:
    loaded_by("to-hf", CHECKPOINT, "-o", str(tmp_path / "base"))
    loaded = loaded_by("from-hf", str(tmp_path / "base"), "-o", str(tmp_path / "out"), "--to", "meta")
    assert (tmp_path / "out/consolidated.00.pth").exists()
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}


SLOW = ("torch", "transformers", "onnx_ir", "onnxscript", "sympy")
"""What takes seconds to import."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose manifest says that it has graphs, of which only the names are looked at."""
    folder = tmp_path_factory.mktemp("early")
    base = folder / "base"
    subprocess.run([sys.executable, "-m", "llmconv", "to-hf", CHECKPOINT, "-o", str(base), "-q"], check=True)
    for name, config in (("unknown", {"model_type": "lama"}), ("other", {"model_type": "t5"}), ("broken", None)):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
        whole = json.loads((base / "config.json").read_text())
        text = "{" if config is None else json.dumps({**whole, **config})
        (folder / name / "config.json").write_text(text)
    exported = folder / "exported"
    exported.mkdir()
    for file in base.iterdir():
        (exported / file.name).write_bytes(file.read_bytes())
    for graph in ("prefill", "decode"):
        (exported / f"{graph}.onnx").write_bytes(b"")
    manifest = json.loads((base / "llmconv.json").read_text())
    manifest["graphs"] = {name: {"file": f"{name}.onnx", "inputs": {}, "outputs": {}} for name in ("prefill", "decode")}
    (exported / "llmconv.json").write_text(json.dumps(manifest))
    (exported / "quantized.safetensors").write_bytes(b"")
    return folder


REFUSED = {
    "export exported": 3,
    "export nothing": 3,
    "export unknown": 3,
    "export other": 3,
    "export broken": 3,
    "export base -o exported": 3,
    "export base --quant int4": 2,
    "export base --quant int4 --quant-block 48 -o new": 2,
    "export base --shapes static": 2,
    "export base --prompt-len 4": 2,
    "export base --layout nothing": 2,
    "export base --target nothing": 2,
    "export base --graph-name decode": 2,
    "export base --no-cache --task embed": 2,
    "export base --graphs-only": 2,
    "export base -o new --graphs-only --quant int8": 2,
    "export base --dtype float16 --precision bfloat16": 2,
    "verify nothing": 3,
    "verify exported": 2,
    "verify exported --scenario nothing": 2,
    "verify base --suite full --graph x.onnx": 2,
    "verify exported --low-memory --bisect": 2,
    "generate nothing --prompt a": 3,
    "chat nothing": 3,
    "serve nothing": 3,
    "embed nothing a": 3,
}
"""Commands with wrong input, and their exit codes."""


@pytest.mark.slow_rows(
    "export nothing",
    "export other",
    "export base -o exported",
    "export base --quant int4",
    "export base --layout nothing",
    "export base --graph-name decode",
    "export base --no-cache --task embed",
    "verify exported --scenario nothing",
    "verify base --suite full --graph x.onnx",
    "generate nothing --prompt a",
)
@pytest.mark.parametrize("line", REFUSED)
def test_what_options_names_and_json_show_is_refused_before_torch_is_imported(line: str, model: Path) -> None:
    names = {"base", "exported", "unknown", "other", "broken", "nothing", "new"}
    values = ("--layout", "--scenario", "--target")
    words = line.split()
    words = [str(model / w) if w in names and words[i - 1] not in values else w for i, w in enumerate(words)]
    code = f"""
import sys, llmconv.cli
code = None
try:
    llmconv.cli.main({words!r})
except SystemExit as end:
    code = end.code
print("\\n" + " ".join({{name.partition(".")[0] for name in sys.modules}}), code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *loaded, status = done.stdout.splitlines()[-1].split()
    assert status == str(REFUSED[line]) and done.stderr.startswith("error: "), done.stderr
    assert not set(loaded) & set(SLOW)


def test_the_table_of_families_needs_no_package_of_models() -> None:
    assert not loaded_by("families") & set(HEAVY)


@pytest.mark.slow
def test_the_table_of_formats_needs_no_package_of_models() -> None:
    assert not loaded_by("formats") & set(HEAVY)


@pytest.mark.slow
def test_inspection_needs_no_package_of_models(model: Path) -> None:
    assert not loaded_by("inspect", str(model / "base")) & set(HEAVY)
