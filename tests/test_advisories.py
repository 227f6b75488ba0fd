"""Public advisories about models and graphs, each by its number: what a file tries has no effect here.

Those about the files of training tools are in tests/hostile/advisories.py, where a process is audited.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from llmconv.convert import to_hf
from llmconv.errors import LlmconvError, MalformedInput
from llmconv.runtime.chat_templates import render_chat
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.runtime.tokenizer import load_tokenizer
from tests.hostile.advisories import CASES
from tests.hostile.gguf import gguf

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"(?:CVE-\d{4}-\d+|GHSA(?:-\w{4}){3}|PYSEC-\d{4}-\d+|(?:llama\.cpp|ggml|LM Studio) \d+)")

EXTERNAL = {
    "CVE-2022-25882 a location above the folder": {"location": "../outside.bin"},
    "CVE-2024-27318 a location that returns": {"location": "a/../../outside.bin"},
    "CVE-2025-51480 an absolute location": {"location": "/tmp/outside.bin"},
    "CVE-2026-34445 a key that is an attribute": {"location": "inside.bin", "__class__": "x"},
    "CVE-2026-34445 a length beyond any file": {"location": "inside.bin", "length": "9" * 15},
    "CVE-2026-27489 a link": {"location": "linked.bin"},
}
TEMPLATES = {
    "CVE-2024-34359 the subclasses of object": "{{ ().__class__.__base__.__subclasses__() }}",
    "CVE-2024-34359 a global of a function": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "CVE-2026-5760 an attribute by filter": "{{ (messages | attr('__class__')) }}",
}
KERNELS = """\
def __getattr__(name):
    def call(*args, **kwargs):
        open({mark!r}, "w").close()
        raise RuntimeError("a kernel was loaded")
    return call
"""
FIELDS = (
    "_attn_implementation_internal",
    "_attn_implementation",
    "attn_implementation",
    "_experts_implementation_internal",
)


@pytest.mark.parametrize("case", EXTERNAL)
def test_weights_of_a_graph_stay_in_its_folder(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "graph"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(16))
    (folder / "inside.bin").write_bytes(bytes(16))
    (folder / "linked.bin").symlink_to(tmp_path / "outside.bin")
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in EXTERNAL[case].items():
        tensor.external_data.add(key=key, value=value)
    node = onnx.helper.make_node("Identity", ["w"], ["logits"])
    output = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [4])
    graph = onnx.helper.make_graph([node], "g", [], [output], [tensor])
    (folder / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(MalformedInput):
        load_guarded(folder / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_chat_template_reaches_no_python(case: str, chatting: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(chatting, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATES[case])
    try:
        text = render_chat(load_tokenizer(folder), [{"role": "user", "content": "hi"}])
    except LlmconvError:
        return
    assert not text.strip()  # the sandbox's filter finds no such attribute


@pytest.mark.slow
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_chat_template_of_a_gguf_file_reaches_no_python(case: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf({"tokenizer.chat_template": TEMPLATES[case]}))
    to_hf(tmp_path / "x.gguf", tmp_path / "model")
    assert (tmp_path / "model/chat_template.jinja").read_text() == TEMPLATES[case]
    try:
        text = render_chat(load_tokenizer(tmp_path / "model"), [{"role": "user", "content": "hi"}])
    except LlmconvError:
        return
    assert not text.strip()


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_cve_2026_4372_no_field_of_a_configuration_loads_a_kernel(field: str, talking: Path, tmp_path: Path) -> None:
    folder, mark = shutil.copytree(talking, tmp_path / "model"), tmp_path / "mark"
    package = tmp_path / "packages/kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(KERNELS.format(mark=str(mark)))
    (tmp_path / "packages/kernels-99.0.dist-info").mkdir()
    (tmp_path / "packages/kernels-99.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 99.0\n"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: "somebody/kernel"}))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    for words in (
        ["generate", folder, "--backend", "torch", "--prompt", "a", "--max-new-tokens", "1"],
        ["export", folder, "--overwrite"],
        ["verify", folder, "--scenario", "left padding"],
    ):
        command = [sys.executable, "-P", "-m", "llmconv", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert not mark.exists(), (words, done.stderr[-2000:])
        assert done.returncode in (0, 3), (words, done.stderr[-2000:])


def test_cve_2026_28500_nothing_is_loaded_from_the_hub_of_onnx() -> None:
    sources = [path for room in ("llmconv", "convert", "export", "verify") for path in (ROOT / room).rglob("*.py")]
    assert not [path for path in sources if re.search(r"onnx\.hub|from onnx import hub", path.read_text())]


@pytest.mark.slow
def test_pickles_are_read_by_no_library() -> None:
    """CVE-2025-32434, CVE-2026-24747, PYSEC-2026-139 and every scanner's bypass need one of these calls."""
    calls = re.compile(
        r"\btorch\.load\(|\bpickle\.(load|loads|Unpickler)\b|\bjoblib\.|\bdill\.|allow_pickle=True|\bmarshal\."
    )
    sources = [path for room in ("llmconv", "convert", "export", "verify") for path in (ROOT / room).rglob("*.py")]
    assert not [path for path in sources if calls.search(path.read_text())]


def test_the_page_lists_every_number_that_has_a_test() -> None:
    page = {*NUMBER.findall((ROOT / "docs/advisories.md").read_text())}
    named = {number for name in (*CASES, *EXTERNAL, *TEMPLATES) for number in NUMBER.findall(name)}
    assert named <= page
