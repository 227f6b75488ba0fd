"""A downloaded folder as the current one: no command imports its files, nor does a process that the command starts.

The folder holds a trap for every module name that the installation has. An audit hook in every Python that starts (by
the `sitecustomize` of a folder that PYTHONPATH names) records each open of a trap; one that runs leaves a mark, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import transformers

from llmconv.bench.bench import RUNTIMES
from llmconv.cli import main
from llmconv.verify.clients.comparison import CLIENTS
from tests.builders.lora_models import train

OPTIONAL = {
    "onnxruntime_genai",
    "optimum",
    "sentencepiece",
    "tiktoken",
    "obstore",
    "ray",
    "sitecustomize",
    "usercustomize",
}
TRAP = "open({mark!r}, 'w').close(); raise ImportError('a trap')"
HOOK = """\
import os, sys
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(args[0]))
        if path.startswith({folder!r}) and path.endswith((".py", ".pyc", ".so")):
            sys.stderr.write("a trap is opened: " + path + "\\n")
            os.close(os.open(os.path.join({marks!r}, "opened-" + os.path.basename(path)), os.O_CREAT | os.O_WRONLY))
sys.addaudithook(hook)
"""
COMMANDS = {
    "inspect": "inspect .",
    "formats": "formats",
    "families": "families",
    "doctor": "doctor",
    "to-hf": "to-hf . -o ../out",
    "from-hf": "from-hf . -o ../out --to composer",
    "to-gguf": "to-gguf . -o ../out.gguf",
    "merge-lora": "merge-lora . adapter -o ../out",
    "quantize": "quantize . -o ../out --scheme fp8-dynamic",
    "delta": "delta extract . . -o ../out",
    "export": "export . --overwrite",
    "to-hf workers": "to-hf . -o ../out --dtype float16 --workers 2 --max-shard-size 100KB",
    "to-hf ray": "to-hf . -o ../out --dtype float16 --engine ray --max-shard-size 100KB",
    "onnx-adapter": "onnx-adapter . adapter -o ../out.onnx_adapter",
    "verify": "verify .",
    "push": "push . me/model",
    "run": "run run.yaml",
    "generate": "generate . --prompt a --max-new-tokens 2",
    "generate torch": "generate . --prompt a --max-new-tokens 2 --backend torch",
    "embed": "embed . a",
    "chat": "chat . --max-new-tokens 2",
    "serve": "serve . --port 0",
    "serve-stage": "export . --stages 2 -o ../out; serve-stage ../out --stage 1",
    "clean": "clean s3://bucket/out",
    "bench": "bench . --lengths 2 --new-tokens 2 --repeat 1 --plot ../speed.png "
    + " ".join(f"--against {kind}:." for kind in RUNTIMES if kind != "onnx"),
    **{f"verify {name}": f"verify . --client {name}" for name in CLIENTS},
}
"""What runs inside the folder; several fail, since they lack what they need, but only after their imports."""

QUICK = {"inspect", "bench"}


def names() -> set[str]:
    """Every top-level module that a process could import."""
    return {*sys.stdlib_module_names, *packages_distributions(), *OPTIONAL, *sys.modules} - {"llmconv", "__main__"}


@pytest.fixture(scope="module")
def trapped(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with graphs and an adapter, and the traps; `../marks` is empty until one is opened or runs."""
    place = tmp_path_factory.mktemp("downloads")
    folder, marks = place / "model", place / "marks"
    marks.mkdir()
    shutil.copytree(talking, folder)
    case = train(
        transformers.AutoModelForCausalLM.from_pretrained(talking),
        place / "lora",
        merge=False,
        target_modules=["q_proj"],
    )
    shutil.copytree(case.adapter, folder / "adapter")
    (folder / "run.yaml").write_text("steps: [{verify: {folder: .}}]")
    for name in names():
        if name.isidentifier():
            (folder / f"{name}.py").write_text(TRAP.format(mark=str(marks / name)))
    for package in ("@huggingface/transformers", "onnxruntime-node"):
        home = folder / "node_modules" / package
        home.mkdir(parents=True)
        mark = json.dumps(str(marks / "node"))
        (home / "package.json").write_text(json.dumps({"name": package, "main": "index.js"}))
        (home / "index.js").write_text(f"require('fs').writeFileSync({mark}, ''); throw new Error('a trap')")
    (folder / "matplotlibrc").write_text("text.usetex: True\n")
    hooks = place / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK.format(folder=str(folder), marks=str(marks)))
    return folder


def run_inside(folder: Path, start: list[str], command: str, *, path: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command with the folder as the current one; what listens is ended after it has started."""
    environment = {**os.environ, "PYTHONPATH": f"{path}{folder.parent / 'hooks'}", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": str(folder.parent / "matplotlib")}
    for name in ("out", "out.onnx_adapter"):
        shutil.rmtree(folder.parent / name, ignore_errors=True)
    for step in command.split("; "):
        limit = ["timeout", "--preserve-status", "12"] if step.startswith("serve") else []
        pipes: dict[str, Any] = {"input": "a\n", "capture_output": True, "text": True}
        done = subprocess.run([*limit, *start, *step.split()], cwd=folder, env=environment, check=False, **pipes)
    return done


def require_no_mark(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """No trap was opened or ran."""
    marks = folder.parent / "marks"
    found = sorted(path.name for path in marks.iterdir())
    for path in marks.iterdir():
        path.unlink()
    assert not found, done.stderr[-2000:]
    assert "a trap" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.returncode != 70, done.stderr[-2000:]


@pytest.mark.one_row_in(9)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in COMMANDS]
)
def test_no_command_imports_from_the_current_folder(name: str, trapped: Path) -> None:
    program = str(Path(sys.executable).with_name("llmconv"))
    require_no_mark(trapped, run_inside(trapped, [program], COMMANDS[name]))


def test_every_command_is_run_inside_the_folder() -> None:
    assert {step.split()[0] for text in COMMANDS.values() for step in text.split("; ")} == {*main.commands}


def before_llmconv(start: list[str], code: str) -> set[str]:
    """The modules that Python has imported before llmconv's first line."""
    done = subprocess.run([*start, code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.quick_rows("an empty element of PYTHONPATH")
@pytest.mark.parametrize(
    ("start", "path"),
    [([sys.executable, "-m", "llmconv"], ""), ([str(Path(sys.executable).with_name("llmconv"))], os.pathsep)],
    ids=["python -m", "an empty element of PYTHONPATH"],
)
def test_a_start_that_searches_the_current_folder_stops_doing_so(
    start: list[str], path: str, trapped: Path, tmp_path: Path
) -> None:
    """What Python itself imports first comes from the current folder in both starts, and has no trap here."""
    code = "import runpy, json, re, sys, llmconv, llmconv.interpreters; print(json.dumps([*sys.modules]))"
    first = {name.partition(".")[0] for name in before_llmconv([sys.executable, "-P", "-c"], code)}
    folder = tmp_path / "model"
    shutil.copytree(
        trapped, folder, ignore=lambda _, inside: [f"{name}.py" for name in first if f"{name}.py" in inside]
    )
    shutil.copytree(trapped.parent / "hooks", tmp_path / "hooks")
    marks = tmp_path / "marks"
    marks.mkdir()
    hook = tmp_path / "hooks/sitecustomize.py"
    hook.write_text(HOOK.format(folder=str(folder), marks=str(marks)))
    (folder / "sitecustomize.py").unlink(missing_ok=True)
    assert (folder / "torch.py").exists() and (folder / "click.py").exists() == ("click" not in first)
    for command in (
        "inspect .",
        "bench . --lengths 2 --new-tokens 2 --repeat 1",
        "generate . --prompt a --max-new-tokens 2",
    ):
        require_no_mark(folder, run_inside(folder, start, command, path=path))
