"""`verify --client llamacpp`: files that are right pass, and each fault of a file, or of its conversion, fails."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from benchmarks import environments
from llmconv.cli import main
from llmconv.convert import from_hf, to_hf
from llmconv.convert.formats.gguf import names, save
from llmconv.convert.formats.gguf.format import in_float32, tensor_types
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.verify import Report, verify
from llmconv.verify.clients.llamacpp import gguf_file, opened, rounded_activations, weight_problems
from tests.builders.gguf_files import byte_level, write_gguf
from tests.builders.slow_rows import slow_but
from tests.conftest import save_tiny
from tests.convert.formats.test_gguf import PRE, piece_model, sentencepiece_keys, split, trained
from tests.convert.formats.test_gguf_families import FAMILIES, save_family
from tests.convert.formats.test_gguf_llama_cpp import OTHERS

HOME = Path(__file__).parents[3] / environments.folder("llama.cpp")


def checked(file: Path, reference: Path | None = None, **options: Any) -> Report:
    """The report of a file in llama.cpp's environment; skips without it."""
    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    return verify(file, clients="llamacpp", pythons=f"llamacpp={HOME / 'bin/python'}", reference=reference, **options)


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.verdict == "fail"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llamacpp") / "llama")


def written(model: Path, output: Path, dtype: str = "keep") -> Path:
    from_hf(model, output, to="gguf", dtype=dtype)
    return output / "model.gguf"


def copied(model: Path, target: Path, change: Callable[[dict[str, Any]], None], **fields: Any) -> Path:
    """A copy of a model with changed tensors, in place, and fields of its configuration."""
    shutil.copytree(model, target)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return target


def as_it_is(tensors: dict[str, Any]) -> None:
    """Changes nothing."""


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def neighbors(tensors: dict[str, Any]) -> None:
    """Rows of queries in the order of another rotation."""
    rows, columns = tensors[Q_PROJ].shape
    tensors[Q_PROJ] = tensors[Q_PROJ].reshape(-1, 2, 8, columns).swapaxes(1, 2).reshape(rows, columns).copy()


def one_number(tensors: dict[str, Any]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].copy()
    tensors[Q_PROJ][3, 5] *= 1.001


def rows_swapped(tensors: dict[str, Any]) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING].copy()
    tensors[EMBEDDING][[40, 41]] = tensors[EMBEDDING][[41, 40]]


def without_bias(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("q_proj.bias")]:
        tensors[name] = np.zeros_like(tensors[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama", dtype) for dtype in ("keep", "float16", "bfloat16", "q8_0", "q4_0")),
        *((name, "q8_0") for name in ("gemma2", "gpt2", "falcon with groups", "deepseek v3", "gpt-oss")),
        *((name, "keep") for name in ("mixtral", "deepseek v2, yarn", "llama3", "lfm2", "command-r", "glm4")),
    ],
)
def test_a_written_file_computes_what_the_model_computes(tmp_path: Path, name: str, dtype: str) -> None:
    kind, changes = (FAMILIES | OTHERS)[name]
    folder = tmp_path / "model"
    model = save_family(name, folder) if name in FAMILIES else save_tiny(kind, folder, **changes)
    report = checked(written(model, tmp_path / "out", dtype), model)
    assert report.verdict == "pass", report.lines()
    compared = [check for check in report.checks if check.output == "logits"]
    assert len(compared) == (3 if dtype == "keep" else 6)
    assert max(check.sigma for check in compared) < 2
    assert not [check for check in report.checks if check.output and check.verdict != "pass"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q2_K", "Q3_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ4_NL", "Q5_1", "TQ2_0"])
def test_types_of_llama_cpps_own_quantizer_pass(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model = save_tiny("llama", tmp_path / "model", **sizes)
    file = written(model, tmp_path / "out", "float16")
    report = checked(quantized_by_llama_cpp(file, tmp_path / "small.gguf", kind), model)
    assert report.verdict == "pass", report.lines()


def quantized_by_llama_cpp(file: Path, target: Path, kind: str) -> Path:
    import subprocess  # noqa: PLC0415 - of one test

    if not (HOME / "complete").exists():
        pytest.skip("`benchmarks/llama_cpp.py` builds llama.cpp for `make bench`")
    code = (
        "import sys, llama_cpp as l; p = l.llama_model_quantize_default_params(); "
        "p.ftype, p.nthread = getattr(l, 'LLAMA_FTYPE_MOSTLY_' + sys.argv[3]), 1; "
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
    )
    subprocess.run([HOME / "bin/python", "-c", code, file, target, kind], check=True, capture_output=True)
    return target


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any]]] = {
    "rows in another order": (neighbors, {}),
    "one number": (one_number, {}),
    "two rows of the embedding swapped": (rows_swapped, {}),
    "another rotary base": (as_it_is, {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
    "scaled positions": (
        as_it_is,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "another epsilon": (as_it_is, {"rms_norm_eps": 2e-6}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["keep", "float16", "q8_0", "q4_0"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_of_another_model_fails(llama: Path, tmp_path: Path, fault: str, dtype: str) -> None:
    if fault == "one number" and dtype != "keep":
        pytest.skip("a change below the rounding of the type is none")
    change, fields = FAULTS[fault]
    file = written(copied(llama, tmp_path / "other", change, **fields), tmp_path / "out", dtype)
    report = checked(file, llama)
    assert report.exit_code == 1
    assert ("weights" in failed(report)) is (change is not as_it_is)
    if change is as_it_is:
        assert all(name.startswith("logits") for name in failed(report)[:1]), report.lines()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["keep", "q8_0"])
def test_a_missing_bias_fails(tmp_path: Path, dtype: str) -> None:
    model = save_tiny("qwen2", tmp_path / "model")
    file = written(copied(model, tmp_path / "other", without_bias), tmp_path / "out", dtype)
    assert "weights" in failed(checked(file, model))
    assert checked(file).verdict == "pass"  # of its own values
    assert "faults in the file itself" in checked(file).summary()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["keep", "q8_0"])
def test_rows_that_both_conversions_leave_in_the_order_of_transformers_fail(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    plain = replace(names.ARCHITECTURES["llama"], change=lambda name, tensor, config: tensor)
    monkeypatch.setitem(names.ARCHITECTURES, "llama", plain)
    monkeypatch.setattr(save, "HEAD_ORDERED", ())
    report = checked(written(llama, tmp_path / "out", dtype), llama)
    assert "weights" not in failed(report)
    assert "logits, 1 prompt of 100 tokens" in failed(report)


def with_value(file: Path, key: str, kind: str, value: Any) -> Path:
    """Another number in the metadata of a file."""
    data = bytearray(file.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    struct.pack_into(kind, data, at, value)
    file.write_bytes(data)
    return file


def spoken(tiny_model: Path, folder: Path, pre: str) -> Path:
    """A model with a tokenizer, as a Hugging Face folder."""
    if pre.startswith("sentencepiece"):
        prefix = pre == "sentencepiece"
        add = sentencepiece_keys(piece_model(prefix=prefix), prefix=prefix)
    else:
        content = trained(**PRE[pre])
        end = content["added_tokens"][0]["id"]
        add = byte_level(content, pre, bos=end, eos=end, rows=512)
    folder.mkdir()
    to_hf(write_gguf(tiny_model, folder / "x.gguf", tokenizer=add), folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("words") / "model", vocab_size=512)


@pytest.mark.slow
@pytest.mark.parametrize("pre", [*PRE, "sentencepiece", "sentencepiece without prefix"])
def test_ids_of_texts_are_those_of_the_tokenizer(tiny_model: Path, tmp_path: Path, pre: str) -> None:
    model = spoken(tiny_model, tmp_path / "spoken", pre)
    report = checked(written(model, tmp_path / "out"), model)
    assert report.verdict == "pass", report.lines()
    words = [check for check in report.checks if check.name in ("tokens of texts", "end tokens")]
    assert [check.verdict for check in words] == ["pass", "pass"]
    assert not any("tokenizer" in one for one in report.unseen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "kind", "value", "name"),
    [
        ("tokenizer.ggml.eos_token_id", "<I", 7, "end tokens"),
        ("tokenizer.ggml.add_bos_token", "<?", True, "tokens of texts"),
    ],
)
def test_another_setting_of_the_tokenizer_fails(
    tiny_model: Path, tmp_path: Path, key: str, kind: str, value: Any, name: str
) -> None:
    model = spoken(tiny_model, tmp_path / "spoken", "gpt-2")
    file = with_value(written(model, tmp_path / "out"), key, kind, value)
    assert failed(checked(file, model)) == [name]


@pytest.mark.slow
def test_other_merges_fail(tiny_model: Path, tmp_path: Path) -> None:
    model = spoken(tiny_model, tmp_path / "spoken", "gpt-2")
    file = written(model, tmp_path / "out")
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    path.write_text(json.dumps(content))
    assert failed(checked(file, model)) == ["tokens of texts"]


@pytest.mark.slow
def test_the_command_prints_rows_and_gives_the_exit_code(llama: Path, tmp_path: Path) -> None:
    written(llama, tmp_path / "out", "q8_0")
    checked(tmp_path / "out/model.gguf", llama)
    given = ["--client", "llamacpp", "--python", f"llamacpp={HOME / 'bin/python'}"]
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "out"), *given, "--report", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    assert "PASSED | logits, 1 prompt of 100 tokens, values in float32 |" in done.output
    assert "SKIPPED | tokens of texts | llamacpp | the file or the model has no tokenizer" in done.output
    assert json.loads((tmp_path / "report/report.json").read_text())["verdict"] == "pass"


@pytest.mark.slow
def test_a_context_without_room_is_inconclusive(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model", max_position_embeddings=8)
    report = checked(written(model, tmp_path / "out"), model)
    assert report.exit_code == 5


@pytest.mark.slow
def test_a_file_that_llama_cpp_refuses_fails_with_its_message(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", more={"tokenizer.ggml.model": "bert"})
    report = checked(file, llama)
    assert report.exit_code == 1
    (check,) = [check for check in report.checks if check.verdict == "fail"]
    assert check.detail.startswith("the client failed: RuntimeError: ")
    assert "vocab" in check.detail


# --- without llama.cpp ------------------------------------------------------------------------------------------------


def test_activations_are_rounded_as_llama_cpp_rounds_them() -> None:
    values = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    values[3, :32] = 0
    found = rounded_activations(torch.from_numpy(values), "Q4_0").numpy()
    expected = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.abs(found - expected).max() < 1e-6  # halves apart, which there are none of
    assert np.array_equal(rounded_activations(torch.from_numpy(values), "F32").numpy(), values)
    assert np.array_equal(rounded_activations(torch.from_numpy(values), "F16").numpy(), values.astype(np.float16))


def test_matrices_have_the_types_of_the_file(tmp_path: Path) -> None:
    model = save_tiny("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    file = written(model, tmp_path / "out", "q4_0")
    types = tensor_types(file)
    assert types["model.layers.0.mlp.experts.1.down_proj.weight"] == "Q4_0"
    assert types["model.layers.0.mlp.gate.weight"] == "F32"
    assert types["model.layers.0.self_attn.q_proj.weight"] == "Q4_0"
    assert types["lm_head.weight"] == "Q8_0"


@pytest.mark.parametrize("parts", [1, 3])
def test_a_copy_in_float32_has_the_same_metadata_and_values(llama: Path, tmp_path: Path, parts: int) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", quantized=GGMLQuantizationType.Q5_0)
    before = GGUFReader(file)
    expected = {one.name: dequantize(one.data, one.tensor_type) for one in before.tensors}
    fields = {name: field.contents() for name, field in before.fields.items() if not name.startswith("GGUF.")}
    if parts > 1:
        file = split_blocks(file, parts)
    (tmp_path / "copy.gguf").write_bytes(b"".join(in_float32(file)))
    after = GGUFReader(tmp_path / "copy.gguf")
    assert {one.name: one.data.tobytes() for one in after.tensors} == {n: v.tobytes() for n, v in expected.items()}
    assert {name: field.contents() for name, field in after.fields.items() if not name.startswith("GGUF.")} == fields


def split_blocks(file: Path, parts: int) -> Path:
    """As `split`, of a plain file with the values of the blocks."""
    plain = file.with_name("plain.gguf")
    plain.write_bytes(b"".join(in_float32(file)))
    return split(plain, parts)[0]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("model_type", slow_but(["llama", "gpt2"], "llama"))
def test_values_of_blocks_are_roundings_of_the_model(tmp_path: Path, model_type: str, kind: str) -> None:
    model = save_tiny(model_type, tmp_path / "model")
    file = write_gguf(model, tmp_path / "x.gguf", quantized=GGMLQuantizationType[kind])
    with opened(file, model) as (found, reference):
        assert reference
        assert weight_problems(found, reference) == ([], True)
    swapped = "transformer.h.1.attn.c_proj.weight" if model_type == "gpt2" else "model.layers.1.self_attn.o_proj.weight"

    def swap(tensors: dict[str, Any]) -> None:
        tensors[swapped] = tensors[swapped][::-1].copy()

    other = copied(model, tmp_path / "other", swap)
    with opened(file, other) as (found, reference):
        assert reference
        ((problem,), _) = weight_problems(found, reference)
        assert f"`{swapped}` differs by" in problem
        assert f"more than {kind} rounds" in problem


@pytest.mark.parametrize("dtype", ["keep", "float16", "bfloat16", "q8_0", "q4_0"])
def test_norms_of_gemma_and_every_dtype_are_roundings_of_the_model(tmp_path: Path, dtype: str) -> None:
    model = save_tiny("gemma2", tmp_path / "model")
    with opened(written(model, tmp_path / "out", dtype), model) as (found, reference):
        assert reference
        assert weight_problems(found, reference) == ([], True)


def test_tensors_that_one_side_lacks_are_named(llama: Path, tmp_path: Path) -> None:
    def fewer(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".layers.2." in name or ".layers.3." in name]:
            del tensors[name]

    short = copied(llama, tmp_path / "short", fewer, num_hidden_layers=2)
    with opened(written(llama, tmp_path / "out"), short) as (found, reference):
        assert reference
        problems, is_comparable = weight_problems(found, reference)
    assert "`model.layers.2.input_layernorm.weight` is in the file alone" in problems
    assert not is_comparable
    with opened(written(short, tmp_path / "out2"), llama) as (found, reference):
        assert reference
        problems, _ = weight_problems(found, reference)
    assert "`model.layers.2.input_layernorm.weight` is missing in the file" in problems


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"num_hidden_layers": 2}, {"intermediate_size": 160}])
def test_a_file_of_another_form_fails_without_a_run(llama: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    other = save_tiny("llama", tmp_path / "other", **fields)
    report = checked(written(other, tmp_path / "out"), llama)
    assert [(check.name, check.verdict) for check in report.checks] == [("weights", "fail")]


def test_another_model_is_no_reference(llama: Path, tmp_path: Path) -> None:
    other = save_tiny("gpt2", tmp_path / "gpt2")
    with (
        pytest.raises(InputRefused, match=r"is not a model that `model\.gguf` could hold") as error,
        opened(written(llama, tmp_path / "out"), other),
    ):
        pass
    assert "--reference" in str(error.value.hint)


def test_a_file_is_found_in_its_folder_and_several_are_refused(llama: Path, tmp_path: Path) -> None:
    file = written(llama, tmp_path / "out")
    assert gguf_file(tmp_path / "out") == gguf_file(file) == file
    shutil.copyfile(file, tmp_path / "out/other.gguf")
    with pytest.raises(InputRefused, match=r"several GGUF models: `model\.gguf`, `other\.gguf`"):
        gguf_file(tmp_path / "out")
    for place in (tmp_path / "none", llama, llama / "config.json"):
        with pytest.raises(InputRefused, match="is not a GGUF file, and not a folder of one"):
            gguf_file(place)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clients": ["llamacpp", "genai"]}, "`llamacpp` opens GGUF files, other clients do not"),
        ({"suite": "full"}, "`--suite` applies to graphs, and llama.cpp opens none"),
        ({"max_divergence": 0.0}, "`--max-divergence` applies to graphs, and llama.cpp opens none"),
        ({"threads": 2}, "`--provider, --threads or --timeout` applies to graphs, and llama.cpp opens none"),
        ({"method": "structure"}, "`--method` applies to graphs, and llama.cpp opens none"),
    ],
)
def test_options_of_graphs_are_refused(llama: Path, tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    given = {"clients": "llamacpp", **options}
    with pytest.raises(UsageProblem) as error:
        verify(written(llama, tmp_path / "out"), **given)
    assert error.value.message == problem
    assert error.value.hint


def test_without_the_package_nothing_is_read(llama: Path, tmp_path: Path) -> None:
    file = written(llama, tmp_path / "out")
    with pytest.raises(InputRefused, match="the client `llamacpp` is not installed") as error:
        verify(file, clients="llamacpp", pythons=f"llamacpp={sys.executable}")
    assert "pip install llama-cpp-python" in str(error.value.hint)


def test_a_damaged_file_never_reaches_llama_cpp(llama: Path, tmp_path: Path) -> None:
    file = written(llama, tmp_path / "out")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(MalformedInput), opened(file, llama):
        pass
