"""Requirements are checked first, and missing system calls have fallbacks."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from llmconv import memory, requirements
from llmconv.errors import UnsupportedInput
from llmconv.files import copying

ROOT = Path(__file__).parents[1]
WINDOWS = """
import sys, click, click.testing, rich
sys.platform = "win32"
sys.modules["fcntl"] = sys.modules["resource"] = None
"""
"""Run first in a process that believes it is on Windows."""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds the modules of a folder first."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def with_transformers(version: str, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of llmconv where this version of transformers seems to be installed."""
    info = folder / f"transformers-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    words = [sys.executable, "-m", "llmconv", *command.split()]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.quick_rows("formats")
@pytest.mark.parametrize("command", ["formats", "inspect absent", "export absent", "merge-lora a b -o c"])
def test_windows_is_refused_on_the_first_line(command: str, tmp_path: Path) -> None:
    done = python(f"{WINDOWS}\nfrom llmconv.cli import main\nmain({command.split()})", tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("error: llmconv does not run on native Windows\n\nhint: ")
    assert "Subsystem for Linux" in done.stderr


NEEDING = {"onnxruntime": ["generate", "--prompt", "x"]}
"""A command that needs the package, where `export` does not."""


@pytest.mark.quick_rows("onnxruntime")
@pytest.mark.parametrize("module", ["torch", "onnxruntime", "onnx_ir"])
def test_a_missing_package_is_named_and_is_no_bug(tmp_path: Path, module: str, tiny: Callable[[str], Path]) -> None:
    hidden = f"import sys; sys.modules[{module!r}] = None; from llmconv.cli import main"
    done = python(f"{hidden}; main({[*NEEDING.get(module, ['export']), str(tiny('llama'))]!r})", tmp_path)
    assert done.stderr.splitlines()[0] == f"error: llmconv needs {module}, which is not installed"
    assert done.returncode == 3


@pytest.mark.slow
def test_a_package_without_what_llmconv_uses_is_named_and_is_no_bug(
    tmp_path: Path, tiny: Callable[[str], Path]
) -> None:
    (tmp_path / "onnx_ir.py").write_text("")
    code = f"from llmconv.__main__ import main; import sys; sys.argv[1:] = ['export', {str(tiny('llama'))!r}]; main()"
    done = python(code, tmp_path)
    assert done.stderr.splitlines()[0].startswith("error: llmconv cannot use the installed onnx_ir: No module named")
    assert done.returncode == 3


def broken(module: str, code: str, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command where a package is another one, with this code."""
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(code)
    words = command.split()
    return python(f"from llmconv.__main__ import main; import sys; sys.argv[1:] = {words!r}; main()", folder)


@pytest.mark.quick_rows("import _of_its_own-No module named '_of_its_own'-tokenizers")
@pytest.mark.parametrize("module", ["onnxruntime", "onnx", "onnx_ir", "safetensors", "transformers", "tokenizers"])
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open"),
        ("import _of_its_own", "No module named '_of_its_own'"),
    ],
)
def test_a_package_that_does_not_load_is_named_and_is_no_bug(
    tmp_path: Path, module: str, code: str, problem: str, tiny: Callable[[str], Path]
) -> None:
    words = NEEDING.get(module, ["export", "-o", str(tmp_path / "out")])
    done = broken(module, code, tmp_path, " ".join([*words, str(tiny("llama"))]))
    assert done.stderr.splitlines()[0] == f"error: llmconv cannot use the installed {module}: {problem}"
    assert done.stderr.splitlines()[-1] == "hint: `llmconv doctor` shows what is missing"
    assert done.returncode == 3


def test_a_package_that_does_not_load_is_named_by_its_distribution(tmp_path: Path) -> None:
    (tmp_path / "steps.yaml").write_text("steps: []")
    done = broken("yaml", "import yaml._of_its_own", tmp_path, "run steps.yaml")
    assert done.stderr.splitlines()[0].startswith("error: llmconv cannot use the installed pyyaml: No module named")
    assert done.returncode == 3


def raised(module: str, code: str) -> ImportError:
    """The error of code that runs as a module."""
    with pytest.raises(ImportError) as caught:
        exec(compile(code, module, "exec"), {"__name__": module})
    caught.value.__traceback__ = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    return caught.value


@pytest.mark.slow
def test_what_transformers_hides_behind_one_of_its_modules_is_shown() -> None:
    hidden = raised("transformers.inner", "import _tokens_of_none")
    error = ImportError("Could not import module 'modeling_pixtral'")
    error.__cause__ = hidden
    unusable = requirements.unusable_package(error)
    assert unusable and unusable.message.endswith("the installed transformers: No module named '_tokens_of_none'")


@pytest.mark.quick_rows("llmconv.convert")
@pytest.mark.parametrize("module", ["llmconv.convert", "__main__", "transformers_modules.own"])
def test_an_import_error_of_no_installed_package_stays_what_it_is(module: str) -> None:
    assert requirements.unusable_package(raised(module, "import _of_nobody")) is None


BROKEN = {
    "raise ImportError('no such symbol')": (3, "error: llmconv cannot start: no such symbol"),
    "": (3, "error: llmconv cannot start: cannot import name `group` from `click`"),
    "raise AttributeError('x')": (70, "error: llmconv cannot start: x"),
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_command_line_that_cannot_load_is_never_exit_code_1(code: str, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(code)
    done = python(
        "import runpy, sys; sys.argv[1:] = ['formats']; runpy.run_module('llmconv', run_name='__main__')", tmp_path
    )
    exit_code, message = BROKEN[code]
    assert (done.returncode, done.stderr.startswith(message)) == (exit_code, True), done.stderr


@pytest.mark.quick_rows("export")
@pytest.mark.parametrize("room", ["convert", "export", "verify"])
def test_the_library_refuses_windows_in_one_line(room: str, tmp_path: Path) -> None:
    done = python(f"{WINDOWS}\nimport llmconv.{room}", tmp_path)
    assert "ImportError: llmconv does not run on native Windows" in done.stderr.splitlines()[-1]


@pytest.mark.quick_rows("4.57.6")
@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.15.1"])
def test_a_transformers_that_is_too_old_is_named_before_anything_else(version: str, tmp_path: Path) -> None:
    done = with_transformers(version, tmp_path, "export absent")
    assert done.returncode == 3
    message, empty, hint = done.stderr.splitlines()
    assert message == f"error: llmconv needs {requirements.RANGE}; this is {version}"
    assert not empty and hint == "hint: `pip install 'transformers>=5.16,<6'`"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.25.0", "6.1.0"])
def test_a_transformers_that_is_newer_than_the_tested_ones_is_a_warning(version: str, tmp_path: Path) -> None:
    done = with_transformers(version, tmp_path, "formats")
    assert done.returncode == 0
    tested = ".".join(map(str, requirements.TESTED))
    line = f"llmconv supports {requirements.RANGE}, and is tested up to {tested}; this is {version}"
    assert done.stderr == f"warning: {line}\n"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.16.0", "5.23.0.dev0", "5.24.7"])
def test_a_version_within_the_range_causes_no_message(version: str, tmp_path: Path) -> None:
    done = with_transformers(version, tmp_path, "formats")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_help_is_there_with_any_version(tmp_path: Path) -> None:
    assert with_transformers("4.0", tmp_path, "export --help").returncode == 0


def test_an_absent_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "version", absent)
    with pytest.raises(UnsupportedInput, match="it is not installed"):
        requirements.require_transformers()


def test_pyproject_states_the_same_range() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "transformers>=5.16,<6" in dependencies
    assert (requirements.OLDEST, requirements.NEWEST) == ((5, 16), (6,))


def test_the_newest_tested_version_is_in_the_table() -> None:
    table = (ROOT / "docs/versions.md").read_text()
    minors = {tuple(map(int, found)) for found in re.findall(r"^\| transformers (\d+)\.(\d+)\.", table, re.MULTILINE)}
    assert max(minors) == requirements.TESTED
    assert min(minors) == requirements.OLDEST


def test_peak_memory_is_in_bytes_on_macos_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert memory.peak_memory() >= 1024 * kib
    monkeypatch.setattr(sys, "platform", "darwin")
    assert kib <= memory.peak_memory() < 1024 * kib


def test_cores_are_counted_without_an_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert copying.cores() == os.cpu_count()
