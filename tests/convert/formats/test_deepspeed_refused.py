"""DeepSpeed folders that are incomplete, mixed up, of another kind or hostile: one clear refusal each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmconv.convert import to_hf
from llmconv.convert.formats import detect
from llmconv.convert.formats.deepspeed.format import open_model
from llmconv.convert.formats.deepspeed.save_folder import open_save
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput
from tests.builders.zero_saves import TAG, save_zero_2, save_zero_3, write

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"

GROUPS = [{"a.weight": torch.ones(3, 5), "a.bias": torch.ones(5)}, {"b.weight": torch.ones(7)}]
RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def open_tensors(folder: Path) -> Any:
    return open_model(open_save(folder)).tensors


def change(folder: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Edits the content of one file of the save in `folder`."""
    path = folder / TAG / name
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)
    return folder


# Files


@pytest.mark.parametrize("save", [save_zero_2, save_zero_3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_missing_is_named(tmp_path: Path, save: Callable[..., Path], rank: int) -> None:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (save(tmp_path, GROUPS, 3) / TAG / name).unlink()
    with pytest.raises(MalformedInput, match=f"`{name}` is missing from `{TAG}`, which 3 ranks saved"):
        open_tensors(tmp_path)


def test_files_of_an_older_save_of_more_ranks_are_refused(tmp_path: Path) -> None:
    save_zero_2(save_zero_2(tmp_path, GROUPS, 4), GROUPS, 2)
    with pytest.raises(MalformedInput, match="files of 4 ranks, but was saved by 2"):
        open_tensors(tmp_path)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    save = save_zero_2(tmp_path, GROUPS, 2) / TAG
    shutil.copy(save / RANK_1, save / f"bf16_{RANK_1}")
    with pytest.raises(MalformedInput, match="both belong to rank 1"):
        open_tensors(tmp_path)


def test_saves_of_two_stages_in_one_folder_are_refused(tmp_path: Path) -> None:
    save_zero_3(save_zero_2(tmp_path, GROUPS, 2), GROUPS, 2)
    with pytest.raises(MalformedInput, match="of ZeRO-3 and of a lower stage"):
        open_tensors(tmp_path)


def test_missing_model_states_are_named(tmp_path: Path) -> None:
    (save_zero_2(tmp_path, GROUPS, 2) / TAG / MODEL).unlink()
    with pytest.raises(MalformedInput, match=f"`{MODEL}` is missing"):
        open_tensors(tmp_path)


def test_placeholders_of_stage_3_alone_are_refused(tmp_path: Path) -> None:
    for file in save_zero_3(tmp_path, GROUPS, 2).glob(f"{TAG}/*optim*"):
        file.unlink()
    with pytest.raises(InputRefused, match="lacks the optimizer states, which contain the weights"):
        open_tensors(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save_zero_2(tmp_path, GROUPS, 2) / TAG / RANK_1
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MalformedInput, match=f"`{RANK_1}` is truncated or damaged"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mp_rank_01_model_states.pt", "tensor-parallel"),
        ("zero_pp_rank_0_mp_rank_03_optim_states.pt", "tensor-parallel"),
        ("layer_02-model_states.pt", "pipeline-parallel"),
        ("layer_02-model_00-model_states.pt", "pipeline-parallel"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture-of-experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "mixture-of-experts"),
    ],
)
def test_other_ways_to_split_a_model_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    write(save_zero_2(tmp_path, GROUPS, 2), name, {})
    with pytest.raises(UnsupportedInput, match=f"is a {kind} checkpoint"):
        open_training(tmp_path)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_one_file_of_a_save_is_answered_with_its_folder(name: str) -> None:
    path = FIXTURES / "z2_bf16_groups" / "global_step3" / name
    with pytest.raises(InputRefused, match="is one file of a DeepSpeed checkpoint") as caught:
        open_training(path)
    assert str(path.parent) in caught.value.hint


# latest


@pytest.mark.parametrize("tag", ["../run", "/etc", "..", ".", "", "a/b", "x\0y", "no\nline", "a" * 4000])
def test_a_latest_that_leads_elsewhere_is_refused(tmp_path: Path, tag: str) -> None:
    run = save_zero_2(tmp_path / "run", GROUPS, 2)
    (run / "latest").write_text(tag)
    with pytest.raises(MalformedInput, match="which is not a save"):
        open_training(run)


def test_a_latest_with_a_missing_save_lists_the_existing_ones(tmp_path: Path) -> None:
    (save_zero_2(tmp_path, GROUPS, 2) / "latest").write_text("global_step8")
    with pytest.raises(MalformedInput, match="names 'global_step8', which is not a save") as caught:
        open_training(tmp_path)
    assert f"{tmp_path / TAG}`" in caught.value.hint


def test_a_folder_with_latest_alone_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("../secret")
    assert detect(tmp_path) is None


# Content


LIES: dict[str, tuple[Any, str]] = {
    "more rows": ((4, 5), "elements in a group|too few|got"),
    "fewer rows": ((1, 1), "elements in a group"),
    "a negative size": ((-3, 5), "invalid shape"),
    "a float": ((3.0, 5), "invalid shape"),
    "a list": ([3, 5], "invalid shape"),
    "a size that overflows": ((1 << 62, 1 << 62), "invalid shape"),
    "an empty one that overflows": ((0, 1 << 62), "invalid shape"),
}


@pytest.mark.parametrize("save", [save_zero_2, save_zero_3])
@pytest.mark.parametrize(("shape", "reason"), LIES.values(), ids=LIES.keys())
def test_a_shape_that_is_wrong_is_refused(tmp_path: Path, save: Callable[..., Path], shape: Any, reason: str) -> None:
    save(tmp_path, GROUPS, 2, param_shapes=[{"a.weight": shape, "a.bias": (5,)}, {"b.weight": (7,)}])
    with pytest.raises(MalformedInput, match=f"{reason}|whose parameters need"):
        open_tensors(tmp_path)


def test_a_parameter_in_two_groups_is_refused(tmp_path: Path) -> None:
    save_zero_2(tmp_path, GROUPS, 2, param_shapes=[{"a": (20,)}, {"a": (7,)}])
    with pytest.raises(MalformedInput, match="in two groups"):
        open_tensors(tmp_path)


def test_a_group_too_many_is_refused(tmp_path: Path) -> None:
    save_zero_2(tmp_path, GROUPS, 2, param_shapes=[{"a": (20,)}])
    with pytest.raises(MalformedInput, match="2 groups of flat weights for 1 groups of parameters"):
        open_tensors(tmp_path)


def test_ranks_of_two_runs_are_refused(tmp_path: Path) -> None:
    change(save_zero_2(tmp_path, GROUPS, 2), RANK_1, lambda file: file["optimizer_state_dict"].update(zero_stage=3))
    with pytest.raises(MalformedInput, match="belongs to another run"):
        open_tensors(tmp_path)


def test_ranks_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    def halve(file: dict[str, Any]) -> None:
        state = file["optimizer_state_dict"]
        state["single_partition_of_fp32_groups"] = [part.half() for part in state["single_partition_of_fp32_groups"]]

    change(save_zero_2(tmp_path, GROUPS, 2), RANK_1, halve)
    with pytest.raises(MalformedInput, match="the dtypes differ between ranks"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("gaps", [[[0, 0]], [[0, 1 << 40], [0]], [[0, -1], [0]], [[0], [0]], "none", [[0, 99], [0]]])
def test_paddings_that_are_wrong_are_refused(tmp_path: Path, gaps: Any) -> None:
    def lie(file: dict[str, Any]) -> None:
        file["optimizer_state_dict"]["param_alignment_paddings"] = gaps

    change(save_zero_2(tmp_path, GROUPS, 2), "zero_pp_rank_0_mp_rank_00_optim_states.pt", lie)
    with pytest.raises(MalformedInput, match="paddings that do not match|elements in a group"):
        open_tensors(tmp_path)


def test_the_layout_of_very_old_releases_is_refused_by_name(tmp_path: Path) -> None:
    def age(file: dict[str, Any]) -> None:
        state = file["optimizer_state_dict"]
        state["local_sub_partitions_of_fp32_groups"] = state.pop("single_partition_of_fp32_groups")

    for rank in (0, 1):
        change(
            tmp_path if rank else save_zero_2(tmp_path, GROUPS, 2),
            f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            age,
        )
    with pytest.raises(UnsupportedInput, match=r"before 0\.3\.17"):
        open_tensors(tmp_path)


def test_frozen_parameters_that_were_left_out_are_named(tmp_path: Path) -> None:
    module = {**{name: torch.empty(0) for group in GROUPS for name in group}, "frozen.weight": torch.empty(0)}
    save_zero_3(tmp_path, GROUPS, 2, module=module)
    with pytest.raises(MalformedInput, match=r"has no weights for 1 parameters: `frozen\.weight`"):
        open_tensors(tmp_path)


def test_frozen_fragments_of_a_missing_rank_are_refused(tmp_path: Path) -> None:
    frozen: dict[str, Any] = {"frozen_param_shapes": {"f": (4,)}, "frozen_param_fragments": {"f": torch.ones(2)}}
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    (save_zero_3(tmp_path, GROUPS, 2, **frozen) / TAG / name).unlink()
    with pytest.raises(MalformedInput, match=f"`{name}` is missing"):
        open_tensors(tmp_path)


def test_a_run_with_an_adapter_is_refused(tmp_path: Path) -> None:
    save_zero_2(tmp_path, [{"base_model.model.q_proj.lora_A.default.weight": torch.ones(2, 2)}], 2)
    with pytest.raises(UnsupportedInput, match="belongs to a PEFT"):
        open_training(tmp_path)


def test_an_adapter_that_trainer_saved_next_to_is_the_way_out(tmp_path: Path) -> None:
    save_zero_2(tmp_path, [{"base_model.model.q_proj.lora_A.default.weight": torch.ones(2, 2)}], 2)
    for name in ("adapter_config.json", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedInput) as caught:
        open_training(tmp_path)
    assert f"merge-lora BASE {tmp_path} " in caught.value.hint


def test_an_object_in_place_of_a_weight_is_refused(tmp_path: Path) -> None:
    save_zero_2(tmp_path, GROUPS, 2, module={"odd.weight": torch.device("cpu")})
    with pytest.raises(UnsupportedInput, match=r"objects that are not plain tensors: `odd\.weight`"):
        open_tensors(tmp_path)


def test_a_universal_checkpoint_that_lacks_a_parameter_is_refused(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURES / "universal_z3", tmp_path / "run")
    shutil.rmtree(run / "global_step3_universal" / "zero" / "model.norm.weight")
    with pytest.raises(MalformedInput, match=r"lacks the weights of 1 parameters: `model\.norm\.weight`"):
        open_training(run)


def test_a_name_with_a_path_reaches_no_file_outside(tmp_path: Path) -> None:
    write(tmp_path / "run", MODEL, {"param_shapes": [{"../../../out": (2,)}], "module": {}})
    (tmp_path / "run" / TAG / "zero").mkdir()
    (tmp_path / "out").mkdir()
    torch.save({"param": torch.ones(2)}, tmp_path / "out" / "fp32.pt")
    with pytest.raises(MalformedInput, match="lacks the weights of 1 parameters"):
        open_tensors(tmp_path / "run")


class Command:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", [MODEL, RANK_1])
def test_a_file_that_runs_a_command_is_refused_and_does_not_run_it(tmp_path: Path, name: str) -> None:
    run = save_zero_2(tmp_path / "run", GROUPS, 2)
    change(run, name, lambda file: file.update(ds_config=Command(f"touch {tmp_path / 'canary'}")))
    with pytest.raises(MalformedInput, match="nothing was run"):
        to_hf(run, tmp_path / "hf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


# Anything


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, 3, -1, 1 << 70, 1.5, "x", [], {}, [None], [[]], {"a.weight": None}, {1: 2}, torch.ones(2)]
)
FIELDS = {
    MODEL: [
        "module",
        "param_shapes",
        "buffer_names",
        "shared_params",
        "frozen_param_shapes",
        "ds_version",
        "ds_config",
    ],
    RANK_1: ["zero_stage", "partition_count", "single_partition_of_fp32_groups", "param_alignment_paddings"],
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = save_zero_2(tmp_path_factory.mktemp("run"), GROUPS, 2)
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    field, value = data.draw(st.sampled_from(FIELDS[name])), data.draw(ODD)
    change(folder, name, lambda file: file.get("optimizer_state_dict", file).update({field: value}))
    try:
        tensors = open_tensors(folder)
    except LlmconvError:
        return
    assert {"a.weight", "a.bias", "b.weight"} <= set(tensors)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = save_zero_3(tmp_path_factory.mktemp("run"), GROUPS, 2)
    path = data.draw(st.sampled_from(sorted((folder / TAG).iterdir())))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        for tensor in open_tensors(folder).values():
            tensor.read()
    except LlmconvError as error:
        assert error.hint
