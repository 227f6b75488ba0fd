"""Writes `export/targets/*.json`: kernels of onnxruntime's providers, for the operators of exported graphs.

    python -m tools.target_tables SOURCES REVISION    # a checkout of onnxruntime, and the commit that it is of

CUDA and DirectML are read from `docs/OperatorKernels.md`, WebGPU from the registrations of its kernels, the CPU from
the installed onnxruntime.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

from tools.target_operators import ELEMENT_TYPES, NUMBERS, OPERATORS, SIGNATURES, WEBGPU_TYPES, Types

TABLES = Path("export/targets")
REPOSITORY = "https://github.com/microsoft/onnxruntime/blob"
OPEN_END = 2**31 - 1
"""onnxruntime's end of a range of versions that has none."""

OLDEST_OPSET = 21
"""Graphs have this opset or a later one."""

PROVIDERS = {"ort-cuda": "CUDAExecutionProvider", "ort-dml": "DmlExecutionProvider"}
Kernel = tuple[str, str, int, int | None, Types]
"""Domain, operator, first and last version (None: open), and element types by type constraint."""


def cpu_table() -> dict[str, Any]:
    """The table of the installed onnxruntime's CPU provider."""
    kernels: list[Kernel] = []
    for kernel in get_all_opkernel_def():
        if kernel.op_name in OPERATORS and kernel.provider == "CPUExecutionProvider":
            first, last = kernel.version_range
            types = {name: _element_types(", ".join(found)) for name, found in kernel.type_constraints.items()}
            kernels.append((kernel.domain, kernel.op_name, first, None if last == OPEN_END else last, types))
    return _table("the wheel `onnxruntime`: get_all_opkernel_def()", onnxruntime.__version__, kernels)


def documented(page: str, provider: str) -> Iterator[Kernel]:
    """The kernels that `docs/OperatorKernels.md` lists for a provider."""
    section = page.split(f"## Operators implemented by {provider}")[1].split("\n## ")[0]
    domain = op_type = ""
    for line in section.splitlines():
        if found := re.match(r"\|\*\*Operator Domain:\*\* \*(.*?)\*", line):
            domain = "" if found[1] == "ai.onnx" else found[1]
        elif found := re.match(r"\|(\w*)\|.*\|([\[\]\d, +]+)\|(\*\*.*)\|$", line):
            op_type = found[1] or op_type
            if op_type in OPERATORS:
                constraints = re.findall(r"\*\*(\w+)\*\* = (.*?)(?=<br/>|$)", found[3])
                yield domain, op_type, *_versions(found[2]), {name: _element_types(text) for name, text in constraints}


def webgpu(sources: Path) -> Iterator[Kernel]:
    """The kernels that the sources of the WebGPU provider register; types are those of `WEBGPU_TYPES`."""
    folders = ("onnxruntime/core/providers/webgpu", "onnxruntime/contrib_ops/webgpu")
    text = "\n".join(path.read_text() for folder in folders for path in sorted((sources / folder).rglob("*.cc")))
    text = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    found: set[tuple[str, str, int, int | None]] = set()
    registered = r"<class ONNX_OPERATOR\w+\(\s*kWebGpuExecutionProvider, k(\w+)Domain, ([\d, ]+), (?:\w+, )?(\w+)\)"
    for domain, numbers, op_type in re.findall(registered, text):
        found.add(("com.microsoft" if domain == "MS" else "", op_type, *_numbers(numbers)))
    for numbers, op_type in re.findall(r"KERNEL_CREATE_INFO\w*\(([\d, ]+), (?:\w+, )?(\w+)\)", text):
        found.add(("", op_type, *_numbers(numbers)))
    for op_type, numbers in re.findall(r"Create(\w+?)(?:Versioned)?KernelInfo\(([\d, ]+), enable_int64\)", text):
        found.add(("", op_type, *_numbers(numbers)))
    for op_type, ranges in re.findall(r'RegisterBinaryOp\(kernel_registry, "(\w+)".*?\{(\{.*?\})\}', text):
        found.update(("", op_type, *_numbers(item)) for item in re.findall(r"\{(\d+, (?:\d+|std::nullopt))\}", ranges))
    if "CreateGroupQueryAttentionKernelInfo" in text:
        found.add(("com.microsoft", "GroupQueryAttention", 1, None))
    for domain, op_type, first, last in found:
        if op_type in OPERATORS:
            yield domain, op_type, first, last, WEBGPU_TYPES.get(op_type, {"T": NUMBERS})


def _numbers(text: str) -> tuple[int, int | None]:
    """`6, 12` as a closed range, `13` and `14, std::nullopt` as open ones."""
    first, *rest = re.findall(r"\d+", text)
    return int(first), int(rest[0]) if rest else None


def _versions(text: str) -> tuple[int, int | None]:
    """`13+`, `[6, 12]` or `13`."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return numbers[0], None if text.endswith("+") else numbers[-1]


def _element_types(text: str) -> list[str]:
    """The tensors of `tensor(float), seq(tensor(float)), …`; `float` is float32."""
    names = {"float32" if name == "float" else name for name in re.findall(r"(?<!\()tensor\((\w+)\)", text)}
    return sorted(names & ELEMENT_TYPES)


def _table(source: str, version: str, kernels: list[Kernel]) -> dict[str, Any]:
    """A table; kernels of one operator and range of versions are one row, as in onnxruntime's page."""
    rows: dict[str, list[Any]] = {}
    used = (kernel for kernel in kernels if _is_used(*kernel[:4]))
    for (domain, op_type, first, last), group in groupby(sorted(used, key=_order), key=_order):
        types: dict[str, set[str]] = {}
        for kernel in group:
            for name, found in kernel[4].items():
                types.setdefault(name, set()).update(found)
        joined = {name: " ".join(sorted(found)) for name, found in sorted(types.items()) if found}
        rows.setdefault(f"{domain}:{op_type}".removeprefix(":"), []).append([first, last or None, joined])
    return {"source": source, "onnxruntime": version, "kernels": rows}


def _is_used(domain: str, op_type: str, first: int, last: int | None) -> bool:
    """Whether a kernel can run an operator as of `OLDEST_OPSET` or later."""
    try:
        oldest = onnx.defs.get_schema(op_type, OLDEST_OPSET, domain).since_version
    except onnx.defs.SchemaError:  # an operator of onnxruntime, or newer
        return True
    return first >= oldest or (last is not None and last >= oldest)


def _order(kernel: Kernel) -> tuple[str, str, int, int]:
    return kernel[0], kernel[1], kernel[2], kernel[3] or 0


def _write(name: str, table: dict[str, Any]) -> None:
    """Writes a table, one operator per line."""
    head = [f'  "{key}": {json.dumps(value)},\n' for key, value in table.items() if key != "kernels"]
    rows = ",\n".join(f"    {json.dumps(op_type)}: {json.dumps(rows)}" for op_type, rows in table["kernels"].items())
    text = "{\n" + "".join(head) + '  "kernels": {\n' + rows + "\n  }\n}\n"
    (TABLES / f"{name}.json").write_text(text)
    print(f"{name}: {len(table['kernels'])} operators")


def main(sources: Path, revision: str) -> None:
    """Writes all tables."""
    version = (sources / "VERSION_NUMBER").read_text().strip()
    page = (sources / "docs/OperatorKernels.md").read_text()
    _write("ort-cpu", cpu_table())
    for target, provider in PROVIDERS.items():
        source = f"{REPOSITORY}/{revision}/docs/OperatorKernels.md"
        _write(target, _table(source, version, list(documented(page, provider))))
    folder = f"{REPOSITORY}/{revision}/onnxruntime/core/providers/webgpu".replace("/blob/", "/tree/")
    source = f"{folder} and contrib_ops/webgpu: registered versions by tools/target_tables.py, types read by hand"
    _write("ort-webgpu", _table(source, version, list(webgpu(sources))))
    _write("signatures", {"source": "onnxruntime's docs/ContribOperators.md", "kernels": SIGNATURES})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
