"""Sharded Composer runs: genuine ones give the upstream's logits; only the model's bytes are read."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import _version

from llmconv.convert import to_hf
from llmconv.convert.inspection import inspect
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.convert.state_dicts.distributed import BytesItem, named_leaves, open_folder
from llmconv.errors import MalformedInput, UnsupportedInput
from tests.builders.dcp_folders import change, save
from tests.convert.formats.test_composer import CONFIG, prefixed, state_dict

OPTIMIZER = "the optimizer's state"


@pytest.fixture(scope="session")
def run(composer: Path) -> Path:
    return composer / "sharded_dcp" / "ep0-ba2"


@pytest.mark.slow
def test_logits_are_those_of_the_trained_model(run: Path, tmp_path: Path, logits_of: Callable[..., Any]) -> None:
    to_hf(run, tmp_path / "hf")
    with np.load(run.parent / "reference.npz") as reference:
        mask = reference["attention_mask"]
        logits = logits_of(tmp_path / "hf", reference["input_ids"], mask)
        assert np.abs((logits - reference["logits"]) * mask[..., None]).max() < 1e-5


def test_every_tensor_has_the_bits_of_the_trained_model(run: Path) -> None:
    expected = json.loads((run.parent / "expected.json").read_text())["tensors"]
    found = {name: hashlib.sha256(tensor.read().tobytes()).hexdigest() for name, tensor in open_training(run).items()}
    assert found == {name: entry["sha256"] for name, entry in expected.items()}


def test_tokenizer_files_come_back_but_for_the_empty_dicts_that_torch_loses(run: Path) -> None:
    files = open_training(run).side_files
    upstream = {file.name: file.read_bytes() for file in (run.parent / "hf_side_files").iterdir()}
    assert {*files, "config.json"} == set(upstream)
    config = json.loads(upstream.pop("tokenizer_config.json"))
    assert json.loads(files["tokenizer_config.json"]) == {name: value for name, value in config.items() if value != {}}
    assert all(files[name] == upstream[name] for name in files if name in upstream)


def test_the_writer_the_shards_and_the_dropped_parts_are_reported(run: Path) -> None:
    checkpoint = open_training(run)
    assert checkpoint.version.startswith("composer 0.32.1")
    assert checkpoint.shards == 2
    assert checkpoint.dropped[0] == f"{OPTIMIZER} (536 kB)"


def test_dropped_parts_have_the_names_of_a_run_of_one_file(run: Path) -> None:
    told = " ".join(open_training(run).dropped)
    assert "the time stamp" in told and "the callbacks" in told
    assert not any(name in told for name in ("`timestamp`", "`run_name`", "`rank_zero_seed`"))


@pytest.mark.slow
def test_a_link_to_the_latest_folder_is_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest-rank0.pt").symlink_to(run)
    assert len(open_training(tmp_path / "latest-rank0.pt")) == 21


def blank(run: Path, tree: Any) -> None:
    """Overwrites with zeros what `.metadata` says of a part of the nested dict."""
    for _, item in named_leaves(tree):
        for place in [item.location] if isinstance(item, BytesItem) else [chunk.location for chunk in item.chunks]:
            with open(run / place.file, "r+b") as file:
                file.seek(place.start)
                file.write(bytes(place.length))


@pytest.mark.slow
def test_nothing_is_read_but_the_model_and_its_settings(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "x")
    tree = open_folder(run).tree
    rest = {name: part for name, part in tree["state"].items() if name not in ("model", "integrations", "metadata")}
    blank(tmp_path / "x", {**rest, "rng": tree["rng"]})
    to_hf(tmp_path / "x", tmp_path / "hf")
    to_hf(run, tmp_path / "expected")
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "expected")]
    assert written[0] == written[1]


def test_inspecting_opens_no_blob_of_the_model(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "x")
    blank(tmp_path / "x", open_folder(run).tree["state"]["model"])
    found = inspect(tmp_path / "x")
    assert (found.parameters, found.format) == (44_192, "composer")
    with pytest.raises(MalformedInput, match="not a torch file"):
        to_hf(tmp_path / "x", tmp_path / "hf")


def nested(**more: Any) -> dict[str, Any]:
    """What a Composer trainer saves around the model."""
    entry = {"config": {"file_extension": ".json", "content": CONFIG, "class": "a.B"}}
    tokenizer = {"special_tokens_map.json": {"file_extension": ".json", "content": {}}}
    integrations = {"huggingface": {"model": entry, "tokenizer": tokenizer}}
    return {"state": {"model": prefixed(), "integrations": integrations, "run_name": "x"}, **more}


def test_a_tokenizer_file_that_was_an_empty_dict_is_one_again(tmp_path: Path) -> None:
    assert open_training(save(tmp_path / "x", nested())).side_files == {"special_tokens_map.json": b"{}\n"}


def test_runs_of_old_torch_with_the_optimizer_at_the_root_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    checkpoint = open_training(save(tmp_path / "x", nested(optimizers={"Adam": {"exp_avg": torch.ones(4)}}, rng=[1])))
    assert set(checkpoint) == set(state_dict())
    assert any(phrase.startswith(OPTIMIZER) for phrase in checkpoint.dropped)


def test_a_head_stored_a_second_time_is_dropped(tmp_path: Path) -> None:
    state = nested()
    state["state"]["model"]["model.lm_head.weight"] = state["state"]["model"]["model.model.embed_tokens.weight"]
    state["state"]["integrations"]["huggingface"]["model"]["config"]["content"] = {
        **CONFIG,
        "tie_word_embeddings": True,
    }
    assert set(settled(open_training(save(tmp_path / "x", state)))) == set(state_dict()) - {"lm_head.weight"}


def test_the_newer_layout_is_read_from_its_two_folders(tmp_path: Path) -> None:
    save(tmp_path / "ep0-ba1" / "model", prefixed())
    save(tmp_path / "ep0-ba1" / "optim", {"state": {"exp_avg": torch.ones(4)}})
    settings = {**nested()["state"]["integrations"], "composer_version": "0.32.1", "sharded_state_dict": True}
    (tmp_path / "ep0-ba1" / "composer_metadata.json").write_text(json.dumps(settings))
    checkpoint = open_training(tmp_path / "ep0-ba1")
    assert set(checkpoint) == set(state_dict())
    assert (checkpoint.format, checkpoint.shards) == ("composer", 1)
    assert checkpoint.dropped[0].startswith(OPTIMIZER)


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_pickled_sharded_tensor_is_refused_by_name(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        model = {name: sharded_tensor.zeros(spec, *tensor.shape) for name, tensor in prefixed().items()}
        path = tmp_path / "ep10-ba50000-rank0.pt"
        torch.save({"state": {"model": model}}, path)
    finally:
        dist.destroy_process_group()
    with pytest.raises(UnsupportedInput, match="ShardedTensor") as refusal:
        open_training(path)
    assert "state_dict_type: full" in refusal.value.hint


def test_flat_parameters_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"state": {"model": {"model._fsdp_wrapped_module.flat_param": torch.ones(4)}}}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedInput, match="state_dict_type: local"):
        open_training(tmp_path / "x.pt")


def test_settings_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x", nested())
    key = "state.integrations.huggingface.model.config.content.model_type"
    change(path, lambda content: content.planner_data.update({key: ("state", "integrations")}))
    with pytest.raises(MalformedInput, match="that also contains items"):
        open_training(path)
