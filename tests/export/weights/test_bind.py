"""Binding weights: complete, checked against the config, and for every layout of a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.export import export
from llmconv.export.folders import file_tensors
from llmconv.export.weights import _tied_to
from llmconv.output.manifest import read_manifest
from llmconv.runtime.eager.runner import EagerRunner
from tests.export.conftest import eager_logits, run_graph, tokens


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_key_is_reported(llama: Path) -> None:
    change(llama, lambda tensors: tensors.pop("model.layers.7.mlp.up_proj.weight"))
    with pytest.raises(InputRefused, match=r"missing keys: `model\.layers\.7\.mlp\.up_proj\.weight`"):
        export(llama)
    assert not list(llama.glob("*.onnx"))


def test_a_missing_head_is_reported_as_such(llama: Path) -> None:
    change(llama, lambda tensors: tensors.pop("lm_head.weight"))
    for refused in (lambda: export(llama), lambda: EagerRunner(llama)):
        with pytest.raises(InputRefused, match=r"missing keys.*`lm_head\.weight`") as caught:
            refused()
        assert "`tie_word_embeddings` to true" in caught.value.hint and "--task embed" in caught.value.hint


def test_a_tied_tensor_is_found_under_any_of_its_names() -> None:
    tied = {"lm_head.weight": "embed.weight", "decoder.weight": "embed.weight"}
    assert _tied_to("embed.weight", tied) == ["lm_head.weight", "decoder.weight"]
    assert {*_tied_to("lm_head.weight", tied)} == {"embed.weight", "decoder.weight"}


def test_an_unexpected_key_is_reported(llama: Path) -> None:
    change(llama, lambda tensors: tensors.update({"model.layers.8.odd": tensors["model.norm.weight"].clone()}))
    with pytest.raises(InputRefused, match=r"unexpected keys: `model\.layers\.8\.odd`"):
        export(llama)


@pytest.mark.parametrize("shape", [(0,), (500,)], ids=["nothing", "a part of the flat parameter"])
def test_weights_that_fsdp_did_not_gather_are_named_as_such(llama: Path, shape: tuple[int, ...]) -> None:
    change(llama, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(shape)}))
    with pytest.raises(MalformedInput, match="shape mismatch") as refused:
        export(llama)
    assert "without gathering it" in refused.value.hint
    with pytest.raises(MalformedInput, match="shape mismatch") as refused:
        open_training(llama, rewrite=True)
    assert "without gathering it" in refused.value.hint


def test_state_of_modelopts_quantizers_is_named_as_such(llama: Path) -> None:
    odd = "model.layers.0.mlp.up_proj.weight_quantizer._double_scale"
    change(llama, lambda tensors: tensors.update({odd: tensors["model.norm.weight"].clone()}))
    with pytest.raises(InputRefused, match="unexpected keys") as refused:
        export(llama)
    assert "ModelOpt" in refused.value.hint


def test_a_value_head_beside_the_model_is_named(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA-Factory's reward models."""
    (llama / "value_head.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    export(llama, dry_run=True)
    assert "`value_head.safetensors` is left out: a language model has no value head" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("differs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_head_of_its_own_where_the_config_ties_it_is_refused_if_it_differs(llama: Path, differs: bool) -> None:
    """The graph would read the embedding for both, while transformers 5 ties nothing."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    change(llama, lambda tensors: tensors.update({head: tensors[table] + 0.5 * differs}))
    if differs:
        with pytest.raises(InputRefused, match=f"ties `{head}` and `{table}`, and the stored weights differ"):
            export(llama, dry_run=True)
        return
    export(llama, prefill=True)
    inputs = tokens(batch=2, length=7)
    np.testing.assert_allclose(
        run_graph(llama / "prefill.onnx", inputs)["logits"], eager_logits(llama, inputs), atol=3e-5
    )


@pytest.mark.slow
def test_a_shape_mismatch_reports_both_shapes(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(InputRefused, match=r"expected \[128, 64\] by `config.json`, got \[96, 64\]"):
        export(llama)


def test_weights_quantized_by_an_unknown_method_are_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "vptq"}}))
    with pytest.raises(UnsupportedInput, match="`vptq`, which is not supported"):
        export(llama)


def test_code_in_a_config_is_never_loaded(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    hostile = {"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "_attn_implementation_internal": "org/kernel"}
    (llama / "config.json").write_text(json.dumps(config | hostile))
    (llama / "evil.py").write_text("raise SystemExit('executed')")
    assert export(llama, dry_run=True).num_layers == 8


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "max_shard_size": "100KB"}], ids=["copied", "written"])
def test_graphs_map_the_places_where_weights_are_written(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    export(llama, tmp_path / "out", incremental=True, **options)
    stored = file_tensors(open_checkpoint(tmp_path / "out"))
    graph = onnx.load(tmp_path / "out" / "decode.onnx", load_external_data=False).graph
    mapped = {t.name: {e.key: e.value for e in t.external_data} for t in graph.initializer if t.external_data}
    assert mapped == {
        name: {"location": tensor.path.name, "offset": str(tensor.offset), "length": str(tensor.nbytes)}
        for name, tensor in stored.items()
    }


@pytest.mark.slow
def test_sharded_weights_are_mapped_from_every_shard(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "sharded", max_shard_size="500KB")
    shards = list((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 1
    inputs = tokens(batch=2, length=7)
    outputs = run_graph(tmp_path / "sharded" / "prefill.onnx", inputs)
    np.testing.assert_allclose(outputs["logits"], eager_logits(llama, inputs), atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_cast_once_and_mapped(llama: Path, tmp_path: Path, dtype: str) -> None:
    result = export(llama, tmp_path / dtype, dtype=dtype)
    assert result.sizes is not None and result.sizes.mapped == open_checkpoint(llama).nbytes // 2
    again = export(tmp_path / dtype, unified=True)
    assert again.sizes is not None and again.sizes.copied == 0
    inputs = tokens(batch=2, length=7)
    outputs = run_graph(tmp_path / dtype / "prefill.onnx", inputs)
    np.testing.assert_allclose(outputs["logits"], eager_logits(tmp_path / dtype, inputs), atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_an_embedding_are_looked_up_before_they_are_cast(
    deep: Callable[[str], Path], tmp_path: Path, tied: bool
) -> None:
    """A runtime would keep the whole table in float32, which only a product with it needs."""
    model = deep("gemma2" if tied else "llama")
    graph = onnx.load(
        export(model, tmp_path / "half", dtype="bfloat16").folder / "decode.onnx", load_external_data=False
    )
    table = "model.embed_tokens.weight"
    (lookup,) = (node for node in graph.graph.node if node.op_type == "Gather" and table in node.input[0])
    assert (lookup.input[0] == table) != tied
    assert (f"{table}:float32" in {name for node in graph.graph.node for name in node.output}) == tied


def test_another_dtype_cannot_be_mapped_in_place(llama: Path) -> None:
    with pytest.raises(InputRefused, match="cannot map them in place"):
        export(llama, dtype="bfloat16")


def test_linked_weights_are_copied_or_refused(llama: Path, tmp_path: Path) -> None:
    linked = Path(shutil.copytree(llama, tmp_path / "linked", ignore=shutil.ignore_patterns("*.safetensors")))
    (linked / "model.safetensors").symlink_to(llama / "model.safetensors")
    with pytest.raises(InputRefused, match="symbolic link"):
        export(linked)
    export(linked, tmp_path / "copied")
    assert not (tmp_path / "copied" / "model.safetensors").is_symlink()


@pytest.mark.slow
def test_a_new_folder_is_complete_and_not_replaced_silently(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    expected = {"model.safetensors", "config.json", "generation_config.json", "prefill.onnx", "decode.onnx"}
    assert names == expected | {"llmconv.json"}
    assert set(read_manifest(tmp_path / "new").files) == expected
    with pytest.raises(InputRefused, match="already exists"):
        export(llama, tmp_path / "new")


def test_a_new_folder_inside_the_model_folder_is_refused(llama: Path) -> None:
    with pytest.raises(InputRefused, match=r"new` is inside the input"):
        export(llama, llama / "new")


@pytest.mark.slow
def test_names_without_the_inner_model_are_found(deep: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(deep("gpt2"), tmp_path / "gpt2"))
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    export(folder, overwrite=True)
    inputs = tokens(batch=2, length=7)
    outputs = run_graph(folder / "prefill.onnx", inputs)
    np.testing.assert_allclose(outputs["logits"], eager_logits(folder, inputs), atol=3e-6)
