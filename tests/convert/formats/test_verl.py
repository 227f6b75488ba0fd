"""Runs of verl's kind: the parts that torch's own processes saved are joined to what torch gathers, bit for bit."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import sys
import types
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    LlamaConfig,
    Qwen2_5_VLConfig,
)

from llmconv.cli import main
from llmconv.convert import merge_lora, to_hf
from llmconv.convert.formats import formats
from llmconv.convert.formats.verl.ranks import join_ranks
from llmconv.convert.inspection import inspect
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from llmconv.files import safetensors_file
from llmconv.files.source_file import read_into
from tests.builders.rank_saves import FIXTURES, RUNS, SIZES, Run, digests, save_run, tiny_llama

CASES = {case: run.ranks for case, run in RUNS.items() if not run.lora}
CASES |= {"torch24_fsdp": 3, "torch24_fsdp1": 3, "torch24_tp": 4}
EMBEDDING = "model.embed_tokens.weight"


def part(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"model_world_size_*_rank_{rank}.pt"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a run of three ranks, as the newest step of two."""
    shutil.copytree(FIXTURES / "fsdp2_uneven", tmp_path / "run" / "global_step_20" / "actor")
    return tmp_path / "run" / "global_step_20" / "actor"


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_the_bits_that_torch_gathers(case: str) -> None:
    opened = open_training(FIXTURES / case)
    found = {
        name: [one.dtype.name, list(one.shape), hashlib.sha256(one.read().tobytes()).hexdigest()]
        for name, one in opened.items()
    }
    assert found == json.loads((FIXTURES / case / "reference.json").read_text())
    assert (opened.format, opened.shards) == ("verl", CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_any_rows_are_those_of_the_whole_tensor(case: str) -> None:
    for tensor in open_training(FIXTURES / case).tensors.values():
        whole = tensor.read()
        blocks = [tensor.rows(start, start + 1) for start in range(tensor.num_rows)]
        assert np.concatenate(blocks).tobytes() == whole.tobytes()


@pytest.mark.parametrize("case", [*CASES, "lora"])
def test_only_this_format_claims_the_folder(case: str) -> None:
    assert [name for name, found in formats().items() if found.detect(FIXTURES / case)] == ["verl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [Run(2, 2, {"fsdp": 2}, dtype=torch.bfloat16), Run(4, 2, {"fsdp": 2, "tp": 2}), Run(2, 1)],
    ids=["fsdp2", "tensor-parallel", "group"],
)
def test_what_torch_saves_now_is_what_it_gathers(made: Run, tmp_path: Path) -> None:
    state = save_run(made, tmp_path / "actor")
    to_hf(tmp_path / "actor", tmp_path / "hf")
    assert digests(load_file(tmp_path / "hf" / "model.safetensors")) == digests(state)
    trained = {name: tensor.detach() for name, tensor in tiny_llama(made).state_dict().items()}
    assert digests(trained) == digests(state)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_adapter_of_a_run_is_merged_as_peft_does(tmp_path: Path) -> None:
    plan = to_hf(FIXTURES / "lora", tmp_path / "hf")
    model: Any = tiny_llama(RUNS["lora"])
    gathered = load_file(FIXTURES / "lora.safetensors")
    assert model.load_state_dict(gathered)
    merged = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)
    assert "merged into 2 weights" in plan.checkpoint.warnings[0]


def test_the_adapter_may_be_kept_apart(tmp_path: Path) -> None:
    to_hf(FIXTURES / "lora", tmp_path / "hf", adapter="split")
    factors = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    gathered = load_file(FIXTURES / "lora.safetensors")
    assert {name: tensor.tolist() for name, tensor in factors.items()} == {
        name.replace(".default", ""): tensor.tolist() for name, tensor in gathered.items() if "lora_" in name
    }
    config = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6, ["down_proj", "q_proj"])


def test_a_run_whose_configuration_names_code_is_merged_too(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "lora", tmp_path / "actor")
    config = json.loads((tmp_path / "actor" / "huggingface" / "config.json").read_text())
    written(tmp_path / "actor" / "huggingface" / "config.json", config | {"auto_map": {"AutoConfig": "x.Config"}})
    opened = open_training(tmp_path / "actor")
    assert any("merged into 2 weights" in warning for warning in opened.warnings)
    assert {*opened} == {*open_training(FIXTURES / "lora")} and "auto_map" not in opened.config


def test_opening_a_run_reads_no_weights(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[int] = []
    read = read_into

    def counting(path: Path, buffer: memoryview, offset: int) -> None:
        spans.append(len(buffer))
        read(path, buffer, offset)

    monkeypatch.setattr(safetensors_file, "read_into", counting)
    opened = open_training(run)
    assert sum(spans) == 3 * 3 * 4  # the mesh, in each of three files
    to_hf(run, tmp_path / "hf")
    assert sum(spans) == opened.nbytes + 2 * 3 * 3 * 4


def test_a_run_without_the_scale_of_its_adapter_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "lora", tmp_path / "actor")
    (tmp_path / "actor" / "lora_train_meta.json").write_text('{"r": 2}')
    with pytest.raises(UnsupportedInput, match="scale of the adapter is unknown"):
        open_training(tmp_path / "actor")
    (tmp_path / "actor" / "lora_train_meta.json").unlink()
    with pytest.raises(MalformedInput, match="scale is unknown"):
        open_training(tmp_path / "actor")
    (tmp_path / "actor" / "lora_adapter").mkdir()
    saved = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    (tmp_path / "actor" / "lora_adapter" / "adapter_config.json").write_text(json.dumps(saved))
    assert "merged into 2 weights" in open_training(tmp_path / "actor").warnings[0]
    (tmp_path / "actor" / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 60}')
    with pytest.raises(MalformedInput, match=r"`lora_alpha` is 60 in `lora_train_meta\.json` and 6 in `lora_adapter`"):
        open_training(tmp_path / "actor")


@pytest.mark.parametrize("above", [0, 1, 2])
def test_the_model_is_found_from_the_folder_of_a_step_and_of_the_run(above: int, run: Path) -> None:
    (run.parent / "critic").mkdir()
    place = [run, *run.parents][above]
    opened = open_training(place)
    assert {*opened} == {*open_training(FIXTURES / "fsdp2_uneven")}
    assert opened.version == "FSDP 2" and opened.path == place
    assert [phrase.partition(" (")[0] for phrase in opened.dropped] == [
        "the schedule and random number states",
        "the critic",
    ]


def test_of_several_steps_the_pointer_names_one(run: Path) -> None:
    home = run.parents[1]
    shutil.copytree(run.parent, home / "global_step_9")
    with pytest.raises(InputRefused, match="contains 2 saves") as caught:
        open_training(home)
    assert "global_step_20" in caught.value.hint
    (home / "latest_checkpointed_iteration.txt").write_text("9")
    part(home / "global_step_9" / "actor", 1).unlink()
    with pytest.raises(MalformedInput, match="lacks the part of rank 1"):
        open_training(home)


def test_inspect_and_the_way_to_bfloat16(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "huggingface" / "config.json").read_text())
    (run / "huggingface" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found = inspect(run)
    assert (found.format, found.shards, found.dropped[0][:12]) == ("verl", 3, "the schedule")
    assert any("`--dtype bfloat16` converts" in warning for warning in found.warnings)
    to_hf(run, tmp_path / "hf", dtype="bfloat16")
    written = load_file(tmp_path / "hf" / "model.safetensors")[EMBEDDING]
    whole = torch.from_numpy(open_training(run)[EMBEDDING].read())
    assert torch.equal(written, whole.to(torch.bfloat16))


def test_configurations_of_old_versions_are_next_to_the_weights(run: Path) -> None:
    (run / "huggingface" / "config.json").rename(run / "config.json")
    (run / "fsdp_config.json").unlink()
    assert open_training(run).config["model_type"] == "llama"


def test_one_file_of_several_is_refused_and_the_only_one_is_read(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="is the part of one rank of 3"):
        open_training(part(run, 1))
    assert open_training(part(FIXTURES / "one_rank", 0)).format == "verl"


def one_rank(folder: Path, state: dict[str, torch.Tensor], config: Any) -> Path:
    """A run of one rank, of a model of any class."""
    config.save_pretrained(folder / "huggingface")
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return folder


@pytest.mark.slow_rows("False")
@pytest.mark.parametrize("old_names", [False, True])
def test_a_model_with_images_is_what_transformers_opens(old_names: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(Qwen2_5_VLConfig(**SEEING))
    trained = model.state_dict()
    # transformers named them so before 4.52
    old = {name.replace("model.visual", "visual").replace("language_model.", ""): one for name, one in trained.items()}
    to_hf(one_rank(tmp_path / "actor", old if old_names else trained, model.config), tmp_path / "hf")
    opened = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").state_dict()
    assert digests(opened) == digests(trained)


SEEING: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {
        "vocab_size": 24,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "bos_token_id": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4},
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_heads": 2,
        "out_hidden_size": 8,
        "patch_size": 4,
        "fullatt_block_indexes": [0],
    },
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}


def test_a_run_with_megatron_for_a_backend_has_its_sizes_in_the_configuration(tmp_path: Path) -> None:
    genuine = FIXTURES.parent / "megatron" / "qwen2_torch_dist"
    expected = open_training(genuine, config=(written(tmp_path / "v.json", {"vocab_size": 96}),))
    actor = tmp_path / "run" / "global_step_5" / "actor"
    shutil.copytree(next(genuine.rglob(".metadata")).parent, actor / "dist_ckpt")
    torch.save({"model": {}, "lr_scheduler": {}}, actor / "dist_ckpt" / "common.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(InputRefused, match="does not contain the arguments of its run"):
        open_training(actor)
    (actor / "huggingface").mkdir()
    written(actor / "huggingface" / "config.json", expected.config)
    for place in (actor, actor.parent, tmp_path / "run"):
        opened = open_training(place)
        assert opened.format == "verl" and opened.keys() == expected.keys()
        assert all(np.array_equal(opened[name].read(), expected[name].read()) for name in expected)
    assert inspect(actor).format == "verl"


def written(file: Path, content: Any) -> Path:
    file.write_text(json.dumps(content))
    return file


def test_a_critic_is_a_classifier_where_its_configuration_says_so(tmp_path: Path) -> None:
    llama = {**open_training(FIXTURES / "one_rank").tensors}
    state = {name: torch.from_numpy(one.read()) for name, one in llama.items() if name != "lm_head.weight"}
    state |= {"score.weight": torch.ones(1, 8), "score.bias": torch.ones(1)}
    config = LlamaConfig(**SIZES, num_labels=1, architectures=["LlamaForTokenClassification"])
    to_hf(one_rank(tmp_path / "critic", state, config), tmp_path / "hf")
    opened = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf").state_dict()
    assert digests(opened) == digests(state)
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(UnsupportedInput, match="unexpected keys outside the model: `score.weight`"):
        open_training(one_rank(tmp_path / "critic", state, config))


def test_a_value_head_is_dropped_when_asked(tmp_path: Path) -> None:
    llama = open_training(FIXTURES / "one_rank")
    state = {f"pretrained_model.{name}": torch.from_numpy(one.read()) for name, one in llama.items()}
    state["v_head.summary.weight"] = torch.ones(1, 8)
    folder = one_rank(tmp_path / "critic", state, LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]))
    with pytest.raises(UnsupportedInput, match=r"unexpected keys outside the model: `v_head\.summary\.weight`"):
        open_training(folder)
    assert {*open_training(folder, options={"drop": True})} == {*llama}


def test_buffers_that_every_rank_holds_whole_are_taken_once(tmp_path: Path) -> None:
    state = {"scalar": torch.tensor(3.0), "vector": torch.arange(4)}
    for file in two(tmp_path).values():
        torch.save(state, file)
    joined = join_ranks("x", two(tmp_path))
    assert {name: one.read().tolist() for name, one in joined.items()} == {"scalar": 3.0, "vector": [0, 1, 2, 3]}
    torch.save(state | {"scalar": torch.tensor(4.0)}, two(tmp_path)[1])
    with pytest.raises(MalformedInput, match="hold different values of `scalar`"):
        join_ranks("x", two(tmp_path))["scalar"].read()
    torch.save(state | {"vector": torch.arange(5)}, two(tmp_path)[1])
    with pytest.raises(MalformedInput, match=r"`vector` is int64 \[5\] in `model_world_size_2_rank_1\.pt`"):
        join_ranks("x", two(tmp_path))


def lose(folder: Path) -> None:
    part(folder, 2).unlink()


def repeat(folder: Path) -> None:
    shutil.copy(part(folder, 0), part(folder, 1))


def other_world(folder: Path) -> None:
    part(folder, 0).rename(folder / "model_world_size_2_rank_0.pt")


def stated_world(folder: Path) -> None:
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 8}')


def other_step(folder: Path) -> None:
    torch.save({"lr_scheduler": {"last_epoch": 40}}, folder / "extra_state_world_size_3_rank_2.pt")


def another_rank(folder: Path) -> None:
    shutil.copy(part(folder, 0), folder / "model_world_size_3_rank_7.pt")


def torn(folder: Path) -> None:
    part(folder, 1).write_bytes(part(folder, 1).read_bytes()[:-700])


def drop_a_tensor(folder: Path) -> None:
    state = plain(folder, 1)
    del state[EMBEDDING]
    torch.save(state, part(folder, 1))


def plain(folder: Path, rank: int) -> dict[str, Any]:
    return {EMBEDDING: torch.zeros(2), "x": torch.zeros(3)} | {f"_{rank}": 1}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose, r"lacks the part of rank 2: `model_world_size_3_rank_2\.pt`"),
        (repeat, r"`model_world_size_3_rank_1\.pt` was not saved by rank 1"),
        (other_world, "contains saves of 2 and 3 ranks"),
        (stated_world, r"`fsdp_config\.json` in `actor` is of 8 ranks, the files of 3"),
        (other_step, "is of step 20, `extra_state_world_size_3_rank_2.pt` of 40"),
        (another_rank, r"`model_world_size_3_rank_7\.pt` is of no rank of 3"),
        (torn, r"`model_world_size_3_rank_1\.pt` is truncated or damaged"),
        (drop_a_tensor, r"not both of `model_world_size_3_rank_1\.pt` and `model_world_size_3_rank_0\.pt` have"),
    ],
)
def test_parts_that_are_not_of_one_save_are_refused(damage: Callable[[Path], None], said: str, run: Path) -> None:
    damage(run)
    with pytest.raises(InputRefused, match=said):
        open_training(run)


def test_a_step_whose_parts_were_removed_says_where_a_model_is(run: Path) -> None:
    for rank in range(3):
        part(run, rank).unlink()
    with pytest.raises(InputRefused, match="without the parts of its ranks") as caught:
        open_training(run)
    assert "pruned" in caught.value.hint
    (run / "huggingface" / "model.safetensors").touch()
    with pytest.raises(InputRefused, match="without the parts of its ranks") as caught:
        open_training(run)
    assert str(run / "huggingface") in caught.value.hint


def test_the_parts_of_a_group_tell_their_rank(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp1_group", tmp_path / "actor")
    repeat(tmp_path / "actor")
    with pytest.raises(MalformedInput, match=r"`model_world_size_2_rank_1\.pt` was not saved by rank 1 of 2"):
        open_training(tmp_path / "actor")


def test_replicas_that_differ_are_found_when_they_are_read(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp1_replicas", tmp_path / "actor")
    file = part(tmp_path / "actor", 3)
    content = bytearray(file.read_bytes())
    wanted = np.float32(open_training(FIXTURES / "fsdp1_replicas")[EMBEDDING].read()[-1, -1]).tobytes()
    content[content.index(wanted)] ^= 1
    file.write_bytes(with_checksums(bytes(content)))
    result = CliRunner().invoke(main, ["to-hf", str(tmp_path / "actor"), "-o", str(tmp_path / "hf")])
    assert result.exit_code == 3 and not (tmp_path / "hf").exists()
    assert f"hold different values of `{EMBEDDING}`" in result.stderr


def with_checksums(content: bytes) -> bytes:
    """The zip of a torch file whose storages were changed, with the checksums that they have now."""
    changed = bytearray(content)
    for info in zipfile.ZipFile(io.BytesIO(content)).infolist():
        name, extra = struct.unpack_from("<2H", content, info.header_offset + 26)
        start = info.header_offset + 30 + name + extra
        crc = zlib.crc32(content[start : start + info.file_size])
        while crc != info.CRC and (at := changed.find(struct.pack("<L", info.CRC))) >= 0:
            changed[at : at + 4] = struct.pack("<L", crc)
    return bytes(changed)


class Inert:
    """An object of a class that the other side only knows by name."""


class Rebuilt:
    """Pickles as torch pickles a subclass of Tensor: by a call, with a state."""

    def __init__(self, kind: type, dtype: torch.dtype, shape: tuple[int, ...], state: Any) -> None:
        self.parts = (kind, dtype, shape, (1,) * len(shape), 0, None, "cpu", False), state

    def __reduce__(self) -> Any:
        arguments, state = self.parts
        rebuild: Any = torch._tensor._rebuild_from_type_v2
        inner: Any = torch._utils._rebuild_wrapper_subclass
        return rebuild, (inner, arguments[0], arguments, state)


OLD, LATER = "torch.distributed._tensor", "torch.distributed.tensor"
OF_OLD = {
    OLD + ".api": ["DTensor"],
    OLD + ".placement_types": ["Shard", "Replicate", "_Partial", "InterleavedShard", "DTensorSpec"],
}
OF_LATER = {  # torch 2.5 to 2.9
    LATER + "._api": ["DTensor"],
    LATER + ".placement_types": ["Shard", "Replicate", "_StridedShard"],
    LATER + "._dtensor_spec": ["DTensorSpec"],
}


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """`save(file, local, shape, ranks, placements)` writes one DTensor with the classes and fields of torch 2.2.

    A parameter gives the classes of another torch, by module.
    """
    names = getattr(request, "param", OF_OLD)
    kinds: dict[str, type] = {}
    for module, classes in names.items():
        made = types.ModuleType(module)
        for name in classes:
            kinds[name] = type(name, (Inert,), {"__module__": module})
            setattr(made, name, kinds[name])
        monkeypatch.setitem(sys.modules, module, made)
    mesh_kind = type("DeviceMesh", (Inert,), {"__module__": "torch.distributed.device_mesh"})
    monkeypatch.setattr("torch.distributed.device_mesh.DeviceMesh", mesh_kind)

    def filled(kind: type, **fields: Any) -> Any:
        one = kind()
        one.__dict__.update(fields)
        return one

    def save(
        file: Path,
        local: Any,
        shape: tuple[int, ...],
        ranks: Any,
        placements: list[tuple[str, dict[str, Any]]],
        **more: Any,
    ) -> None:
        mesh = filled(mesh_kind, device_type="cuda", mesh=ranks, mesh_dim_names=("fsdp",), **more)
        spec = filled(
            kinds["DTensorSpec"],
            mesh=mesh,
            placements=tuple(filled(kinds[name], **fields) for name, fields in placements),
            tensor_meta=None,
        )
        state = (None, {"_local_tensor": local, "_spec": spec})
        torch.save({"a.weight": Rebuilt(kinds["DTensor"], torch.float32, shape, state)}, file)

    yield save


SHARD = ("Shard", {"dim": 0})
WHOLE = torch.arange(10.0).reshape(5, 2)


def two(folder: Path) -> dict[int, Path]:
    return {rank: folder / f"model_world_size_2_rank_{rank}.pt" for rank in range(2)}


def test_the_classes_of_old_torch_are_found_by_name(old_torch: Callable[..., None], tmp_path: Path) -> None:
    for rank, file in two(tmp_path).items():
        local = WHOLE[:3].clone() if rank == 0 else WHOLE[3:].clone()
        old_torch(file, local, (5, 2), torch.tensor([0, 1], dtype=torch.int32), [SHARD], _coordinate_on_dim=[rank])
    assert join_ranks("x", two(tmp_path))["a.weight"].read().tolist() == WHOLE.tolist()


# attributes of meshes that torch pickles besides the ranks, with what they hold there
IN_2_4: dict[str, Any] = {"_flatten_mesh_list": (0, 1), "_parent_mesh": None, "_thread_id": 7, "_hash": 5}
IN_2_4 |= {"_dim_group_infos": [("tag", [0, 1], "2")]}
IN_2_8 = {"_flatten_mesh_list": (0, 1), "_thread_id": None, "_dim_group_names": ["2"], "_hash": None}


@pytest.mark.parametrize(
    ("old_torch", "more"), [(OF_OLD, IN_2_4), (OF_LATER, IN_2_8)], ids=["2.4", "2.8"], indirect=["old_torch"]
)
def test_the_classes_of_each_torch_are_found(
    old_torch: Callable[..., None], more: dict[str, Any], tmp_path: Path
) -> None:
    for rank, file in two(tmp_path).items():
        local = WHOLE[:3].clone() if rank == 0 else WHOLE[3:].clone()
        old_torch(file, local, (5, 2), torch.tensor([0, 1], dtype=torch.int32), [SHARD], **more)
    assert join_ranks("x", two(tmp_path))["a.weight"].read().tolist() == WHOLE.tolist()


@pytest.mark.parametrize("old_torch", [OF_LATER], ids=["2.6"], indirect=True)
def test_sharding_on_top_of_tensor_parallelism_is_put_in_its_order(
    old_torch: Callable[..., None], tmp_path: Path
) -> None:
    whole, files = torch.arange(24.0).reshape(8, 3), {}
    for rank in range(4):
        data, tensor = divmod(rank, 2)
        file = files[rank] = tmp_path / f"model_world_size_4_rank_{rank}.pt"
        local = whole.chunk(2)[tensor].chunk(2)[data].clone()
        placements = [("_StridedShard", {"dim": 0, "split_factor": 2}), SHARD]
        old_torch(file, local, (8, 3), torch.arange(4).reshape(2, 2), placements)
    assert join_ranks("x", files)["a.weight"].read().tolist() == whole.tolist()


def test_tensors_that_old_torch_split_twice_along_a_dim_are_refused(
    old_torch: Callable[..., None], tmp_path: Path
) -> None:
    files = {rank: tmp_path / f"model_world_size_4_rank_{rank}.pt" for rank in range(4)}
    for rank, file in files.items():
        local, ranks = torch.full((2, 3), float(rank)), torch.arange(4).reshape(2, 2)
        old_torch(file, local, (8, 3), ranks, [SHARD, SHARD], _coordinate_on_dim=[rank // 2, rank % 2])
    with pytest.raises(UnsupportedInput, match=r"sharded twice along one dim by a torch before 2\.5"):
        join_ranks("x", files)
    for file in files.values():  # of a replicated or single dim there is one order
        old_torch(file, WHOLE.clone(), (5, 2), torch.arange(4).reshape(4, 1), [("Replicate", {}), SHARD])
    assert join_ranks("x", files)["a.weight"].read().tolist() == WHOLE.tolist()


PAIR = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("shape", "ranks", "placements", "more", "said"),
    [
        ((5, 2), PAIR, [("_Partial", {"reduce_op": "sum"})], {}, "`_Partial`, a sum that was not finished"),
        ((5, 2), PAIR, [("InterleavedShard", {"dim": 0})], {}, "has the placement `InterleavedShard`"),
        ((5, 2), PAIR, [("Shard", {"dim": 2})], {}, "sharded along a dim that it does not have"),
        ((5, 2), PAIR, [("Shard", {"dim": -1})], {}, "sharded along a dim that it does not have"),
        ((5, 2), PAIR, [("Shard", {"dim": "0"})], {}, "sharded along a dim that it does not have"),
        ((5, 2), PAIR, [SHARD, SHARD], {}, "another number of placements"),
        ((5, 2), torch.tensor([0, 0]), [SHARD], {}, "in which 0 is not, or more than once"),
        ((5, 2), torch.tensor([1, 2]), [SHARD], {}, "in which 0 is not, or more than once"),
        ((5, 2), torch.zeros(1, dtype=torch.int64).expand(10**9), [SHARD], {}, "a mesh of 1000000000 ranks"),
        ((5, 2), torch.zeros(2), [SHARD], {}, "without a mesh of ranks"),
        ((5, 2), None, [SHARD], {}, "without a mesh of ranks"),
        ((5, 2), PAIR, [SHARD], {"_coordinate_on_dim": [1]}, "was not saved by rank 0"),
        ((9, 2), PAIR, [SHARD], {}, r"a piece of `a\.weight` with the shape \[3, 2\]"),
        ((1 << 61, 2), PAIR, [SHARD], {}, r"a piece of `a\.weight` with the shape \[3, 2\]"),
        ((-5, 2), PAIR, [SHARD], {}, "without a shape or an element type"),
        (("5", 2), PAIR, [SHARD], {}, "without a shape or an element type"),
    ],
)
def test_placements_that_make_no_sense_are_refused(
    shape: Any, ranks: Any, placements: Any, more: Any, said: str, old_torch: Callable[..., None], tmp_path: Path
) -> None:
    for file in two(tmp_path).values():
        old_torch(file, WHOLE[:3].clone(), shape, ranks, placements, **more)
    with pytest.raises(InputRefused, match=said):
        join_ranks("x", two(tmp_path))


def test_pieces_that_overlap_are_refused(old_torch: Callable[..., None], tmp_path: Path) -> None:
    for rank, file in two(tmp_path).items():
        old_torch(file, WHOLE.clone(), (5, 2), torch.tensor([rank]), [("Replicate", {})])
    joined = join_ranks("x", two(tmp_path))["a.weight"]
    assert joined.read().tolist() == WHOLE.tolist()
    old_torch(two(tmp_path)[1], WHOLE[:3].clone(), (5, 2), torch.tensor([1, 0]), [SHARD])
    with pytest.raises(MalformedInput, match="overlap, leave a gap"):
        join_ranks("x", two(tmp_path))


@pytest.mark.parametrize("above", [0, 2])
@pytest.mark.parametrize("own_files", [False, True])
def test_the_adapter_of_a_run_is_merged_into_a_given_base(own_files: bool, above: int, tmp_path: Path) -> None:
    actor = Path(shutil.copytree(FIXTURES / "lora", tmp_path / "run/global_step_20/actor"))
    to_hf(actor, tmp_path / "whole")
    to_hf(actor, tmp_path / "apart", adapter="split")
    if own_files:
        shutil.move(tmp_path / "apart/adapter", actor / "lora_adapter")
        (actor / "lora_train_meta.json").unlink()
        next(actor.glob("model_world_size_2_rank_1.pt")).unlink()  # which are not read then
    else:
        shutil.rmtree(tmp_path / "apart/adapter")
    merge_lora(tmp_path / "apart", [actor.parents[above - 1] if above else actor], tmp_path / "merged")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "whole"))
    assert digests(found) == digests(wanted)


def test_a_run_without_an_adapter_is_not_one(run: Path, tmp_path: Path) -> None:
    to_hf(run, tmp_path / "base")
    with pytest.raises(InputRefused, match=r"training run \(`verl`\) without a LoRA adapter") as refused:
        merge_lora(tmp_path / "base", [run.parent], tmp_path / "out")
    assert refused.value.hint == f"convert its model: `llmconv to-hf {run.parent} -o OUT`"
