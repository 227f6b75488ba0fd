"""The weight audit and the structure check name what is wrong without running the graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from llmconv.output.manifest import MANIFEST, Manifest, file_entry, read_manifest
from llmconv.runtime.onnxruntime.guard import load_guarded
from llmconv.verify import Check, Report, verify
from llmconv.verify.audit.weights import WeightSource, audit_files, audit_weights
from llmconv.verify.reference.eager import Eager
from tests.builders.mutants.mutants import MUTANTS
from tests.builders.mutants.surgery import initializer
from tests.verify.conftest import decode_only

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def audit(folder: Path, reference: Path) -> Check:
    """The audit of a folder's decode graph."""
    return audit_weights("decode.onnx", load_guarded(folder / "decode.onnx"), WeightSource.of(folder, reference))[0]


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        ("two layers' weights swapped", f"`{O_PROJ}` maps the bytes of `model.layers.2.self_attn.o_proj.weight`"),
        ("LoRA scale 1 % off", f"`{O_PROJ}` differs from the reference's values"),
        ("low bit of one weight flipped", f"`{O_PROJ}` differs from the reference's values"),
    ],
)
def test_a_wrong_weight_is_named(
    mutant: str, text: str, exported: Callable[[str], Path], broken: Callable[..., Path]
) -> None:
    check = audit(broken("llama", BY_NAME[mutant]), exported("llama"))
    assert check.verdict == "fail"
    assert text in check.detail


def test_another_model_as_reference_is_suspected(exported: Callable[[str], Path], tiny: Callable[[str], Path]) -> None:
    check = audit(exported("llama"), tiny("gemma2"))
    assert check.verdict == "fail" and "are not the reference's: another model? First `" in check.detail


def test_bytes_that_are_not_a_tensor_are_named(exported: Callable[[str], Path], tmp_path: Path) -> None:
    folder = decode_only(exported("llama"), tmp_path / "shifted")
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    tensor = initializer(model, O_PROJ)
    assert tensor
    next(entry for entry in tensor.external_data if entry.key == "offset").value = "4096"
    onnx.save(model, folder / "decode.onnx")
    assert "which are not a tensor" in audit(folder, folder).detail


@pytest.mark.slow
def test_a_correct_graph_has_every_weight(exported: Callable[[str], Path]) -> None:
    check = audit(exported("gemma2"), exported("gemma2"))
    assert (check.verdict, check.detail) == ("pass", "46 tensors")


def structure(folder: Path, change: Callable[[onnx.ModelProto], object], eager: Eager) -> Check:
    """The structure check of a changed decode graph."""
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "decode.onnx")
    report: Report = verify(folder, reference=eager.folder, eager=eager)
    return next(check for check in report.checks if check.name == "structure")


def bake_batch(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def unhook_mask(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = ["input_ids" if name == "attention_mask" else name for name in node.input]


def drop_output(model: onnx.ModelProto) -> None:
    del model.graph.output[3]


@pytest.mark.slow_rows("drop_output-outputs are not those of the model, in its order")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (bake_batch, "shape mismatch for input_ids: expected axis batch_size, got 1"),
        (unhook_mask, "input attention_mask has no effect"),
        (drop_output, "outputs are not those of the model, in its order"),
    ],
)
def test_a_wrong_signature_is_named(
    change: Callable[[onnx.ModelProto], object],
    text: str,
    exported: Callable[[str], Path],
    eager: Callable[[str], Eager],
    tmp_path: Path,
) -> None:
    check = structure(decode_only(exported("llama"), tmp_path / "changed"), change, eager("llama"))
    assert check.verdict == "fail"
    assert text in check.detail


@pytest.mark.slow
def test_a_graph_of_another_model_fails(
    exported: Callable[[str], Path], eager: Callable[[str], Eager], tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(exported("gemma2"), folder)
    shutil.copyfile(exported("llama") / "model.safetensors", folder / "llama.safetensors")
    model = onnx.load(exported("llama") / "decode.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entry.value.replace("model.safetensors", "llama.safetensors")
    onnx.save(model, folder / "decode.onnx")
    report = verify(folder, eager=eager("gemma2"))
    assert report.verdict == "fail"
    assert {check.graph for check in report.checks if check.verdict == "fail"} >= {"decode.onnx"}


@pytest.mark.slow
def test_a_weight_changed_since_the_manifest_fails_although_eager_reads_it_too(
    exported: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported("llama"), tmp_path / "changed"))
    weights = folder / "model.safetensors"
    manifest = read_manifest(folder)
    manifest.files[weights.name] = file_entry(weights.read_bytes())
    (folder / MANIFEST).write_bytes(manifest.encode())
    assert [check.verdict for check in audit_files(folder)] == ["pass"]
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    (check,) = audit_files(folder)
    assert (check.verdict, check.graph) == ("fail", "model.safetensors")
    assert verify(folder).verdict == "fail"


def test_a_clone_without_sha256_is_skipped_unless_its_size_differs(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    for size, verdict in ((5, "skip"), (6, "fail")):
        files = {"model.safetensors": {"bytes": size, "clone_of": "model.safetensors"}}
        (tmp_path / MANIFEST).write_bytes(Manifest(files=files).encode())
        assert [check.verdict for check in audit_files(tmp_path)] == [verdict]
