"""merge-lora and delta apply keep the base's files: their names, and the bytes of those that nothing changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import safetensors.torch
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file

from llmconv.checkpoint import INDEX, open_checkpoint
from llmconv.cli import main
from llmconv.convert import merge_lora
from llmconv.convert.delta import apply_delta, extract_delta
from llmconv.errors import InputRefused
from llmconv.files.copying import copy_file
from llmconv.files.safetensors_file import read_header
from llmconv.output import local_folder
from tests.builders.hf_models import SMALLEST, smallest_shapes

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
Adapter = Callable[..., Path]


@pytest.fixture
def base(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A llama in files of at most 40 KB, written by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    return tmp_path / "base"


@pytest.fixture
def adapter(save_tensors: Callable[..., Path]) -> Adapter:
    """`adapter(…more tensors, …fields)` changes the query projection of the first layer."""

    def make(more: dict[str, Any] | None = None, **fields: Any) -> Path:
        tensors = {f"{PREFIX}.lora_A.weight": torch.ones(2, 64), f"{PREFIX}.lora_B.weight": torch.ones(64, 2)}
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "layers_to_transform": 0}
        settings = {"adapter_config.json": config | fields}
        return save_tensors("adapter", tensors | (more or {}), settings, weights="adapter_model.safetensors")

    return make


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def changed(base: Path, out: Path) -> list[str]:
    """The files of `out` that are not, byte for byte, those of the base."""
    before = shards(base)
    return [name for name, data in shards(out).items() if before.get(name) != data]


def test_files_keep_their_names_and_untouched_ones_their_bytes(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    merge = merge_lora(base, [adapter()], tmp_path / "out")
    (touched,) = {shard.name for shard in merge.plan.shards if not shard.copy_of}
    assert list(shards(tmp_path / "out")) == list(shards(base)) and len(shards(base)) > 3
    assert changed(base, tmp_path / "out") == [touched]


def test_the_index_is_that_of_the_base(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    merge_lora(base, [adapter()], tmp_path / "out")
    before, after = (json.loads((folder / INDEX).read_text()) for folder in (base, tmp_path / "out"))
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"]


def test_the_manifest_has_the_sha256_of_what_was_copied(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    merge_lora(base, [adapter()], tmp_path / "out")
    files = json.loads((tmp_path / "out/llmconv.json").read_text())["files"]
    for name, data in shards(tmp_path / "out").items():
        assert files[name]["bytes"] == len(data)
        assert files[name].get("sha256", files[name].get("clone_of")) in (hashlib.sha256(data).hexdigest(), name)


def test_transformers_loads_the_same_weights_as_from_one_file(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    lora = adapter()
    merge_lora(base, [lora], tmp_path / "kept")
    merge_lora(base, [lora], tmp_path / "one", max_shard_size="5GB")
    kept, one = (open_checkpoint(tmp_path / name) for name in ("kept", "one"))
    assert len(shards(tmp_path / "one")) == 1
    assert {name: t.read().tobytes() for name, t in kept.items()} == {
        name: t.read().tobytes() for name, t in one.items()
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "kept", dtype="auto").state_dict()
    expected = safetensors.torch.load_file(tmp_path / "one/model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_another_dtype_touches_every_file(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    merge = merge_lora(base, [adapter()], tmp_path / "out", dtype="float32")
    assert not any(shard.copy_of for shard in merge.plan.shards)
    assert changed(base, tmp_path / "out") == list(shards(base))


@pytest.mark.parametrize("metadata", [None, {"total_size": "7"}, {"format": "np"}, {"format": "mlx"}])
def test_a_file_that_older_transformers_refuse_is_written_anew(
    metadata: dict[str, str] | None, base: Path, adapter: Adapter, tmp_path: Path
) -> None:
    last = sorted(base.glob("*.safetensors"))[-1]
    save_file(safetensors.torch.load_file(last), last, metadata=metadata)
    merge = merge_lora(base, [adapter()], tmp_path / "out")
    assert not merge.plan.shards[-1].copy_of and merge.plan.shards[-2].copy_of
    assert read_header(tmp_path / "out" / last.name).metadata == {"format": "pt"}


def test_files_with_other_names_get_the_usual_ones(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    index = (base / INDEX).read_text()
    for number, path in enumerate(sorted(base.glob("*.safetensors"))):
        path.rename(base / f"part-{number:02}.safetensors")
        index = index.replace(path.name, f"part-{number:02}.safetensors")
    (base / INDEX).write_text(index)
    merge = merge_lora(base, [adapter()], tmp_path / "out")
    count = len(shards(base))
    assert list(shards(tmp_path / "out")) == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert sum(bool(shard.copy_of) for shard in merge.plan.shards) == count - 1
    assert open_checkpoint(tmp_path / "out").keys() == open_checkpoint(base).keys()


@pytest.mark.slow
def test_a_head_that_is_untied_joins_the_last_file(
    tiny: Callable[[str], Path], adapter: Adapter, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny("qwen2"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    more = {"base_model.model.lm_head.weight": torch.zeros(96, 64)}
    merge = merge_lora(tmp_path / "base", [adapter(more, modules_to_save=["lm_head"])], tmp_path / "out")
    assert merge.added == ("lm_head.weight",) and "lm_head.weight" in merge.plan.shards[-1].tensors
    assert list(shards(tmp_path / "out")) == list(shards(tmp_path / "base"))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == merge.plan.nbytes
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.eq(0).all()


@pytest.mark.slow
def test_an_exact_delta_gives_the_files_of_the_base_back(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    merge_lora(base, [adapter()], tmp_path / "tuned")
    extract_delta(base, tmp_path / "tuned", tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", tmp_path / "back")
    back, tuned = (
        {file.name: {name: t.read().tobytes() for name, t in read_header(file).tensors.items()} for file in files}
        for files in ((tmp_path / folder).glob("*.safetensors") for folder in ("back", "tuned"))
    )
    assert back == tuned


def test_a_dry_run_tells_copied_from_written(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    command = ["merge-lora", str(base), str(adapter()), "-o", str(tmp_path / "out")]
    shown = CliRunner().invoke(main, [*command, "--dry-run"]).stdout
    result = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert set(result["files"]) - set(result["copied"]) == set(changed(base, tmp_path / "out"))
    for name in result["files"]:
        assert f"  {name}  {f'to copy from {name}' if name in result['copied'] else 'to write'}  " in shown
    assert "of them copied unchanged" in shown


def test_a_file_that_changes_while_it_is_copied_is_refused(
    base: Path, adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(source: Path, made: BinaryIO, advance: Any) -> Any:
        source.write_bytes(shards(base)[sorted(shards(base))[0]])
        return copy_file(source, made, advance)

    monkeypatch.setattr(local_folder, "copy_file", spoiled)
    with pytest.raises(InputRefused, match="changed while it was (copied|read)"):
        merge_lora(base, [adapter()], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_in_the_base_or_an_adapter_is_refused(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    lora = adapter()
    for folder in (base, lora):
        with pytest.raises(InputRefused, match=rf"out` is inside the input `.*{folder.name}`"):
            merge_lora(base, [lora], folder / "out")
        assert not list(folder.glob("*out*"))


def test_an_output_beside_the_file_of_an_adapter_is_free(base: Path, adapter: Adapter) -> None:
    lora = adapter()
    assert merge_lora(base, [lora / "adapter_model.safetensors"], lora / "out").merged


def test_a_head_that_differs_from_the_embedding_does_not_stay_tied(
    save_tensors: Callable[..., Path], tmp_path: Path
) -> None:
    shapes = {**smallest_shapes(), "lm_head.weight": smallest_shapes()["model.embed_tokens.weight"]}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    base = save_tensors("base", tensors, {"config.json": SMALLEST})  # which ties them
    pair = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(6, 2)}
    config = {"adapter_config.json": {"peft_type": "LORA", "r": 2, "lora_alpha": 4}}
    merge = merge_lora(base, save_tensors("own", pair, config, weights="adapter_model.safetensors"), tmp_path / "out")
    assert any("but they differ; both are kept" in line for line in merge.warnings)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    written = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])
