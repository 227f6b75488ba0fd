"""What this installation can do: versions with the supported ranges, compiled code, devices, what is missing."""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from llmconv.errors import first_line
from llmconv.memory import available_memory

PACKAGE = "llmconv"
OK, MISSING, WRONG, OPTIONAL = "ok", "missing", "out of range", "not installed"

# what each extra of the package is for; `dev` is for working on llmconv
NEEDED_FOR = {
    "genai": "`generate --backend genai`",
    "structured": "structured output and forced calls of tools in `serve`, `generate --json-schema`",
    "plot": "`bench --plot`",
    "cloud": "inputs and outputs in object stores",
    "aws": "profiles and roles of AWS for these",
    "ray": "`--engine ray`",
    "lm-eval": "`python -m llmconv.lm_eval`",
    "optimum": "`optimum-cli export llmconv`, with plugins/optimum",
}
# packages of no extra, and what they are for
ALSO = {
    "Pillow": "images: `generate --image`, `verify` of vision.onnx",
    "peft": "`verify --adapter`",
    "onnxruntime-gpu": "`--provider cuda`, in place of onnxruntime",
}
# room and path of compiled modules; numpy computes the same bits without them
COMPILED = {
    ("convert", "adapters/_low_rank_sum"): "`merge-lora` takes twice the time without it",
    ("export", "quantization/_block_rounding"): "`export --quant` is slow without it",
}
# packages that provide the module of another one
SAME = {
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"),
    "onnxruntime-genai": ("onnxruntime-genai-cuda", "onnxruntime-genai-directml"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    group: str  # heading that it belongs to
    name: str  # of a package, module or device
    status: str  # `ok`, `missing`, `out of range` or `not installed`; empty for a line about the machine
    found: str  # what is there, such as a version
    note: str  # the supported range, or what it is for

    @property
    def is_problem(self) -> bool:
        """Whether llmconv cannot work as it is; a package for one feature alone is none."""
        return self.status in (MISSING, WRONG) and self.group != "optional"


def diagnose() -> list[Finding]:
    return [*_platform(), *_required(), *_compiled(), *_devices(), *_optional(), *_room()]


def install_command(problems: Sequence[Finding]) -> str:
    """The command that installs all packages among the problems; empty if there are none."""
    wanted = {requirement.name: requirement.specifier for requirement in _requirements("")}
    packages = [one for one in problems if one.group == "required"]
    # of a supported version that does not load
    again = "--force-reinstall " * any(one.status == MISSING and bool(one.found) for one in packages)
    words = " ".join(f"'{one.name}{wanted.get(one.name, '')}'" for one in packages)
    return f"pip install {again}{words}" if words else ""


def _platform() -> Iterator[Finding]:
    wanted = metadata(PACKAGE)["Requires-Python"] or ""
    fits = not wanted or Requirement(f"python{wanted}").specifier.contains(platform.python_version(), prereleases=True)
    yield Finding("platform", PACKAGE, OK, version(PACKAGE), "")
    yield Finding("platform", "Python", OK if fits else WRONG, platform.python_version(), wanted)
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("platform", "system", OK if sys.platform != "win32" else WRONG, system, "no native Windows")


def _required() -> Iterator[Finding]:
    """The packages that pyproject.toml requires."""
    for requirement in _requirements(""):
        found = _installed(requirement.name)
        fits = found is not None and requirement.specifier.contains(found.partition("+")[0], prereleases=True)
        problem = _why_not_loaded(requirement.name) if found else ""
        status = MISSING if found is None or problem else OK if fits else WRONG
        yield Finding("required", requirement.name, status, found or "", str(requirement.specifier) + problem)


def _why_not_loaded(package: str) -> str:
    """What an import of a package raises, in words; empty if it succeeds, or if `_devices` tells."""
    module = {"pyyaml": "yaml"}.get(package, package.replace("-", "_"))
    if module in ("torch", "onnxruntime"):
        return ""
    try:
        importlib.import_module(module)
    except Exception as error:  # of a broken installation, whatever it is
        return f" (does not load: {first_line(error)})"
    return ""


def _optional() -> Iterator[Finding]:
    seen: set[str] = set()
    for extra, purpose in NEEDED_FOR.items():
        for requirement in _requirements(extra):
            if requirement.name in seen:  # two extras may share a package
                continue
            seen.add(requirement.name)
            found = _installed(requirement.name)
            fits = found is not None and requirement.specifier.contains(found, prereleases=True)
            status = OPTIONAL if found is None else OK if fits else WRONG
            how = "" if found else f"; `pip install '{requirement.name}{requirement.specifier}'`"
            yield Finding("optional", requirement.name, status, found or "", purpose + how)
    for name, purpose in ALSO.items():
        found = _installed(name)
        yield Finding("optional", name, OK if found else OPTIONAL, found or "", purpose)


def _requirements(extra: str) -> Iterator[Requirement]:
    """The requirements of an extra, or with an empty one those of the package, that apply to this platform."""
    for line in requires(PACKAGE) or ():
        requirement = Requirement(line)
        belongs = "extra ==" in line
        if belongs == bool(extra) and (not requirement.marker or requirement.marker.evaluate({"extra": extra})):
            yield requirement


def _installed(name: str) -> str | None:
    """The version of a package, or of another one that provides the same module."""
    for one in (name, *SAME.get(name, ())):
        try:
            return version(one)
        except PackageNotFoundError:
            continue
    return None


def _compiled() -> Iterator[Finding]:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    has_one = "a compiler is there: install llmconv again" if shutil.which(compiler) else "needs a C compiler"
    for (room, path), purpose in COMPILED.items():
        spec = find_spec(f"{PACKAGE}.{room}")  # finds the folder without importing it
        folders = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
        is_there = any([*folder.glob(f"{path}.*.so")] for folder in folders)
        note = "" if is_there else f"{purpose}; {has_one}"
        yield Finding("compiled", path.rpartition("/_")[2], OK if is_there else OPTIONAL, "", note)


def _devices() -> Iterator[Finding]:
    """What the two runtimes can compute on; importing them is a check of its own."""
    yield _imported("onnxruntime", _providers)
    yield _imported("torch", _torch_devices)


def _imported(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding("devices", name, OK, look(), "")
    except Exception as error:  # a library that does not load raises anything
        return Finding("devices", name, MISSING, "", f"does not load: {first_line(error)}")


def _providers() -> str:
    import onnxruntime  # noqa: PLC0415

    return ", ".join(one.removesuffix("ExecutionProvider") for one in onnxruntime.get_available_providers())


def _torch_devices() -> str:
    import torch  # noqa: PLC0415 - seconds

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join(["CPU", *names, *(["MPS"] if torch.backends.mps.is_available() else [])])


def _room() -> Iterator[Finding]:
    memory = available_memory()
    yield Finding("room", "memory", "", f"{memory / 1e9:.1f} GB" if memory else "unknown", "free")
    for name, folder in (("temporary files", tempfile.gettempdir()), ("this folder", ".")):
        yield Finding("room", name, "", f"{shutil.disk_usage(folder).free / 1e9:.1f} GB", f"free in {folder}")
