"""Opening a Hugging Face folder: accepted and refused ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model

from llmconv.checkpoint import INDEX, SINGLE, open_checkpoint, read_json, read_side_files, require_bounds
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with two shards and an index."""
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(4)}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_index(tmp_path, {"a": 1, "b": 1, "c": 2})
    return tmp_path


def write_index(folder: Path, homes: dict[str, Any]) -> None:
    names = {k: f"model-{v:05}-of-00002.safetensors" if isinstance(v, int) else v for k, v in homes.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": names}))


def test_shards_are_one_mapping(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert {name: tensor.shape for name, tensor in checkpoint.items()} == {"a": (2,), "b": (3,), "c": (4,)}
    assert checkpoint.nbytes == 36
    assert checkpoint.config == {"model_type": "llama"}


def test_a_model_of_one_file_beside_the_shards_is_refused(sharded: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)}, sharded / SINGLE)
    with pytest.raises(MalformedInput, match="contains two models") as caught:
        open_checkpoint(sharded)
    assert "delete the one" in caught.value.hint
    write_index(sharded, dict.fromkeys("abc", SINGLE))  # an index of that file alone
    assert set(open_checkpoint(sharded)) == {*"abc"}


def test_side_files_are_kept_but_never_code(sharded: Path) -> None:
    kept = {"tokenizer.json", "generation_config.json", "tiktoken.model", "qwen.tiktoken", "tekken.json"}
    for name in (*kept, "modeling_custom.py", "notes.txt"):
        (sharded / name).write_text("x")
    assert set(open_checkpoint(sharded).side_files) == kept


@pytest.mark.parametrize("outside", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 7, None])
def test_an_index_that_names_other_files_is_refused(outside: Any, sharded: Path) -> None:
    index = {"weight_map": {"a": outside, "b": outside, "c": outside}}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(MalformedInput, match="invalid shard name"):
        open_checkpoint(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MalformedInput, match="`model-00002-of-00002.safetensors` is missing"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("there", ["model-00001-of-00003.safetensors", SINGLE])
def test_an_index_of_another_copy_is_named_as_such(there: str, sharded: Path) -> None:
    write_index(sharded, dict.fromkeys("abc", "model-00001-of-00009.safetensors"))
    for shard in sharded.glob("*-of-*"):
        shard.unlink()
    save_file({name: torch.ones(2) for name in "abc"}, sharded / there)
    with pytest.raises(
        MalformedInput, match=f"is of another copy, and lists none of the weights there, `{there}"
    ) as caught:
        open_checkpoint(sharded)
    assert f"delete `{INDEX}`" in caught.value.hint


@pytest.mark.parametrize("tied", [True, False])
def test_names_that_save_model_leaves_out_are_those_of_the_same_tensors(tied: bool, tmp_path: Path) -> None:
    """safetensors keeps the first by the alphabet, and notes the others in the metadata."""
    embedding, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    inner = torch.nn.ModuleDict({"embed_tokens": embedding, "norm": torch.nn.LayerNorm(2)})
    model = torch.nn.ModuleDict({"model": inner, "lm_head": head})
    save_model(model, str(tmp_path / SINGLE))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
    found = open_checkpoint(tmp_path)
    assert {*found} == {"model.embed_tokens.weight", "model.norm.weight", "model.norm.bias"} | (
        set() if tied else {"lm_head.weight"}
    )


@pytest.mark.parametrize("homes", [{"a": 1, "c": 2}, {"a": 2, "b": 1, "c": 2}])
def test_an_index_and_shards_that_disagree_are_refused(homes: dict[str, int], sharded: Path) -> None:
    write_index(sharded, homes)
    with pytest.raises(MalformedInput, match="differ in 1 tensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("copy", [torch.ones(3), torch.zeros(3), torch.ones(1), torch.ones(3, dtype=torch.bfloat16)])
def test_a_tensor_that_is_in_two_shards_is_read_once_if_both_are_equal(copy: torch.Tensor, sharded: Path) -> None:
    save_file({"b": copy, "c": torch.ones(4)}, sharded / "model-00002-of-00002.safetensors")  # the index: b is in 1
    if torch.equal(copy, torch.ones(3)) and copy.dtype == torch.float32:
        checkpoint = open_checkpoint(sharded)
        assert {name: tensor.read().tolist() for name, tensor in checkpoint.items()} == {
            "a": [1, 1],
            "b": [1, 1, 1],
            "c": [1, 1, 1, 1],
        }
        return
    with pytest.raises(
        MalformedInput, match="two shards have `b`, with different values: `model-00001.* lists it, and"
    ) as e:
        open_checkpoint(sharded)
    assert "save the model again" in e.value.hint


def test_an_index_that_lists_what_no_file_has_says_so(sharded: Path) -> None:
    write_index(sharded, {"a": 1, "b": 1, "c": 2, "model.layers.2.eh_proj.weight": 2})
    with pytest.raises(MalformedInput, match=r"lists 1 tensors that no file has: `model\.layers\.2\.eh_proj") as caught:
        open_checkpoint(sharded)
    assert f"delete `{INDEX}`, and `llmconv to-hf {sharded} -o OUT`" in caught.value.hint


def test_a_folder_without_config_is_refused(sharded: Path) -> None:
    (sharded / "config.json").unlink()
    with pytest.raises(InputRefused, match=r"no `config\.json`"):
        open_checkpoint(sharded)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputRefused, match="no safetensors weights"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\udc80".encode("utf-8", "surrogateescape").decode("latin-1"), "[" * 100_000]
)
def test_a_config_that_is_not_an_object_is_refused(content: str, sharded: Path) -> None:
    (sharded / "config.json").write_text(content)
    with pytest.raises(MalformedInput, match=r"config\.json"):
        open_checkpoint(sharded)


def test_every_tiny_model_is_read_as_torch_reads_it(tiny: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    checkpoint = open_checkpoint(tiny("gpt2"))
    for name, value in load_file(tiny("gpt2") / "model.safetensors").items():
        assert checkpoint[name].read().tobytes() == value.numpy().tobytes()


def test_side_files_may_be_links_within_the_cache_of_the_hub_and_nowhere_else(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs" / "123"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(b"{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    assert read_side_files(snapshot) == {"tokenizer.json": b"{}"}
    (snapshot / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(MalformedInput, match="leads out of the folder, to `/etc/hostname`"):
        read_side_files(snapshot)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"num_labels": 10**9}, "num_labels"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"head_dim": 10**9}, "head_dim"),
        ({"text_config": {"n_layer": 10**6}}, "n_layer"),
        ({"sub_configs": [{"num_local_experts": 1e12}]}, "num_local_experts"),
    ],
    ids=str,
)
def test_a_number_that_would_take_all_memory_is_refused(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalformedInput, match=f"`config.json` has `{field}` .*more than any model has"):
        read_json(tmp_path / "config.json")


@pytest.mark.slow
def test_the_defaults_of_every_configuration_are_within_the_bounds() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - slow to import

    read = 0
    for kind in CONFIG_MAPPING:
        with suppress(Exception):  # some cannot be made without arguments
            fields = CONFIG_MAPPING[kind]().to_dict()
            read += 1
            require_bounds(fields, kind)
    assert read > 300


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.linear_attn.conv1d.weight", (8, 4, 1)),
        ("backbone.layers.0.mixer.conv1d.weight", (8, 4, 1)),
        ("model.layers.0.mlp.switch_mlp.gate_proj.weight", (2, 4, 8)),
        ("model.layers.0.mlp.experts.gate_proj.weight", (2, 4, 8)),  # gpt-oss
    ],
)
def test_what_mlx_stores_in_its_own_order_is_refused_by_its_name(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """It also adds one to the norms of such families, which no shape shows."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    save_file({name: torch.ones(shape)}, tmp_path / SINGLE, {"format": "mlx"})
    with pytest.raises(UnsupportedInput, match="was written by MLX") as refused:
        open_checkpoint(tmp_path)
    assert name in str(refused.value)
    assert "converted from" in refused.value.hint
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UnsupportedInput, match="was written by MLX") as refused:
        open_checkpoint(tmp_path)
    assert "llmconv to-hf" in refused.value.hint


@pytest.mark.parametrize("shape", [(8, 1, 4), (8, 1, 1)])
def test_a_convolution_in_the_order_of_torch_is_not_taken_for_one_of_mlx(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    save_file({"backbone.layers.0.mixer.conv1d.weight": torch.ones(shape)}, tmp_path / SINGLE)
    assert len(open_checkpoint(tmp_path)) == 1
