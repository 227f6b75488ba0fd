"""DeepSpeed's folders: tags that lead out, files of ranks that contradict each other, universal folders, links."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.builders.zero_saves import TAG, save_zero_2, save_zero_3, write
from tests.hostile.case import Case
from tests.hostile.files import instead_of
from tests.hostile.honest import CONFIG, members, repacked, weights
from tests.hostile.pickles import PYTHON, SHELL, call, text

MODEL = "mp_rank_00_model_states.pt"
RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
STAGE_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
ATTACK = "nothing was run"
Make = Callable[[Path], Path]
EMBEDDING = "model.embed_tokens.weight"


def zero_2(folder: Path, **states: Any) -> Path:
    """An honest save of two ranks at stage 2."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return save_zero_2(folder, [weights()], 2, **states)


def zero_3(folder: Path, **states: Any) -> Path:
    """An honest save of two ranks at stage 3."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return save_zero_3(folder, [weights()], 2, **states)


def universal(folder: Path) -> Path:
    """An honest universal checkpoint."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {name: tensor.shape for name, tensor in weights().items()}
    write(folder, MODEL, {"param_shapes": [shapes], "module": {}, "ds_version": "0.0.0"})
    for name, tensor in weights().items():
        (folder / TAG / "zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, folder / TAG / "zero" / name / "fp32.pt")
    return folder


def changed(change: Callable[[Path], object], refused: str | None, make: Make = zero_2) -> Case:
    """A save, after something was done to its folder."""

    def build(folder: Path) -> Path:
        change(make(folder))
        return folder

    return Case(build, refused)


def moved(folder: Path) -> Path:
    """Where the save was, which lies elsewhere now."""
    (folder / TAG).rename(folder / "x")
    return folder / TAG


def latest(content: str, refused: str | None) -> Case:
    """A save with another `latest`, next to a second one."""

    def build(folder: Path) -> Path:
        zero_2(folder)
        (folder / "latest").write_bytes(content.encode("utf-8", "surrogateescape"))
        return folder

    return Case(build, refused)


def states(refused: str | None, make: Callable[..., Path] = zero_2, **fields: Any) -> Case:
    """A save with other fields in its model states."""
    return Case(lambda folder: make(folder, **fields), refused)


def shapes(refused: str | None, change: Callable[[dict[str, Any]], Any], make: Callable[..., Path] = zero_2) -> Case:
    """A save whose model states give other shapes."""
    own: dict[str, Any] = {name: tensor.shape for name, tensor in weights().items()}
    value = change(own)
    return states(refused, make, param_shapes=[own] if value is None else value)


def optimizer(refused: str | None, make: Make = zero_2, rank: int = 1, **fields: Any) -> Case:
    """A save, one of whose ranks has other fields in its optimizer state."""

    def build(folder: Path) -> Path:
        make(folder)
        file = folder / TAG / RANK.format(rank)
        content = torch.load(file)
        content["optimizer_state_dict"] |= fields
        torch.save(content, file)
        return folder

    return Case(build, refused)


def pickled(file: str, opcodes: bytes, refused: str | None, make: Make = zero_2) -> Case:
    """A save, one of whose files holds one more value, made by these opcodes."""

    def build(folder: Path) -> Path:
        make(folder)
        parts = members(torch.load(folder / TAG / file))
        parts["x/data.pkl"] = parts["x/data.pkl"][:-1] + text("evil") + opcodes + b"s."
        repacked(folder / TAG, parts, file)
        return folder

    return Case(build, refused)


def weight(put: Callable[[Path], object], refused: str) -> Case:
    """A universal checkpoint in which something else stands for a weight."""

    def build(folder: Path) -> Path:
        file = universal(folder) / TAG / "zero" / EMBEDDING / "fp32.pt"
        file.unlink()
        put(file)
        return folder

    return Case(build, refused)


def replaced(name: str, put: Callable[[Path], object], refused: str | None, make: Make = zero_2) -> Case:
    """A save in which something else stands for a file."""
    return changed(lambda folder: instead_of(name, put)(folder / TAG), refused, make)


def chunk(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda own: own.update({EMBEDDING: value})


def shapes_of_universal(more: dict[str, Any], refused: str) -> Case:
    """A universal checkpoint whose model states name more parameters."""

    def build(folder: Path) -> Path:
        file = universal(folder) / TAG / MODEL
        content = torch.load(file)
        content["param_shapes"][0] |= more
        torch.save(content, file)
        return folder

    return Case(build, refused)


NO_SAVE = "which is not a save"
NO_FILE = "not a torch file|not a regular file|missing|not of a training format"
SHAPES = "invalid shape|need|not a dict|not a list"
FLAT = torch.zeros(10)
HONEST = {"zero 2": Case(zero_2, None), "zero 3": Case(zero_3, None), "universal": Case(universal, None)}
CASES: dict[str, Case] = {
    **{f"honest: {name}": case for name, case in HONEST.items()},
    "latest: the parent": latest("../../../etc", NO_SAVE),
    "latest: by way of the parent": latest(f"../in/{TAG}", NO_SAVE),
    "latest: absolute": latest("/etc", NO_SAVE),
    "latest: here": latest(".", NO_SAVE),
    "latest: nothing": latest("", NO_SAVE),
    "latest: a zero": latest("\0", NO_SAVE),
    "latest: an escape sequence": latest("\x1b[2J\nhint: all is well", NO_SAVE),
    "latest: no text": latest("\udcff\udcfe", NO_SAVE),
    "latest: a megabyte": latest("a" * (1 << 20), NO_SAVE),
    "latest: 8 GB": changed(lambda folder: os.truncate(folder / "latest", 8 << 30), NO_SAVE),
    "latest: a pipe": changed(instead_of("latest", lambda path: os.mkfifo(path)), None),
    "latest: a link to /dev/zero": changed(instead_of("latest", lambda path: path.symlink_to("/dev/zero")), None),
    "latest: a link to /etc/hostname": changed(
        instead_of("latest", lambda path: path.symlink_to("/etc/hostname")), NO_SAVE
    ),
    "latest: a folder": changed(instead_of("latest", Path.mkdir), None),
    "a save that is a link to itself": changed(lambda folder: moved(folder).symlink_to(TAG), NO_SAVE),
    "a save that is a link to the system": changed(lambda folder: moved(folder).symlink_to("/etc"), NO_SAVE),
    "a save in a save": changed(lambda folder: (folder / TAG / "zero").symlink_to("../" + TAG), "lacks the weights"),
    "model states: os.system": pickled(MODEL, call("os", "system", text(SHELL)), ATTACK),
    "model states: eval": pickled(MODEL, call("builtins", "eval", text(PYTHON)), ATTACK),
    "model states: another call": pickled(MODEL, call("evil", "Evil"), None),
    "rank 0: os.system": pickled(RANK.format(0), call("os", "system", text(SHELL)), ATTACK),
    "rank 1: os.system": pickled(RANK.format(1), call("os", "system", text(SHELL)), ATTACK),
    "rank 1: another call": pickled(RANK.format(1), call("evil", "Evil"), None),
    "rank 1 of stage 3: os.system": pickled(RANK.format(1), call("os", "system", text(SHELL)), ATTACK, zero_3),
    "rank 0's model states: os.system": pickled(STAGE_3.format(0), call("os", "system", text(SHELL)), ATTACK, zero_3),
    "model states: a pipe": replaced(MODEL, lambda path: os.mkfifo(path), NO_FILE),
    "model states: a folder": replaced(MODEL, Path.mkdir, NO_FILE),
    "model states: a link to /etc/passwd": replaced(MODEL, lambda path: path.symlink_to("/etc/passwd"), NO_FILE),
    "model states: a link to /dev/zero": replaced(MODEL, lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "model states: nothing": replaced(MODEL, Path.touch, NO_FILE),
    "model states: a list": replaced(MODEL, lambda path: torch.save([1], path), "not contain a dict"),
    "model states: no fields": replaced(MODEL, lambda path: torch.save({}, path), "no `param_shapes`"),
    "rank 1: a pipe": replaced(RANK.format(1), lambda path: os.mkfifo(path), NO_FILE),
    "rank 1: a link to nothing": replaced(RANK.format(1), lambda path: path.symlink_to("nothing"), NO_FILE),
    "rank 1: a link to /etc/passwd": replaced(RANK.format(1), lambda path: path.symlink_to("/etc/passwd"), NO_FILE),
    "rank 1: a list": replaced(RANK.format(1), lambda path: torch.save([1], path), "no `optimizer_state_dict`"),
    "rank 1: missing": replaced(RANK.format(1), lambda path: None, "missing"),
    "rank 0: missing": replaced(RANK.format(0), lambda path: None, "missing"),
    "rank 1: twice": replaced("bf16_" + RANK.format(1), lambda path: path.write_bytes(b"x"), "both belong to rank 1"),
    "rank of 200 digits": replaced(RANK.format("9" * 200), lambda path: torch.save({}, path), "ranks|optimizer_state"),
    "rank in other digits": replaced(RANK.format("٣"), lambda path: torch.save({}, path), "ranks|optimizer_state"),
    "a name with an escape sequence": replaced("\x1b[2J\n.pt", lambda path: path.write_bytes(b"x"), None),
    "a layer of a pipeline": replaced("layer_00-\x1b[2Jmodel_states.pt", Path.touch, "pipeline-parallel"),
    "partition count: 2^60": optimizer("different|missing|differs", partition_count=1 << 60),
    "partition count: 2^60 of rank 0": optimizer("missing", rank=0, partition_count=1 << 60),
    "partition count: 0": optimizer("partition_count", partition_count=0),
    "partition count: less than none": optimizer("partition_count", partition_count=[-1]),
    "partition count: no number": optimizer("partition_count", partition_count="2"),
    "partition count: an empty list": optimizer("partition_count", partition_count=[]),
    "partition count: a tensor": optimizer("partition_count", partition_count=torch.ones(1)),
    "partition count: 1": optimizer("ranks|differs", rank=0, partition_count=1),
    "stage: 99": optimizer("no ZeRO stage", zero_stage=99),
    "stage: a tensor": optimizer("no ZeRO stage", zero_stage=torch.ones(1)),
    "stage: another one": optimizer("differs|no list", zero_stage=3),
    "weights: none": optimizer("no list of tensors", single_partition_of_fp32_groups=None),
    "weights: an empty list": optimizer("no list of tensors", single_partition_of_fp32_groups=[]),
    "weights: numbers": optimizer("no list of tensors", single_partition_of_fp32_groups=[1]),
    "weights: a matrix": optimizer("not flat", single_partition_of_fp32_groups=[torch.zeros(2, 2)]),
    "weights: too few": optimizer("elements", single_partition_of_fp32_groups=[FLAT]),
    "weights: of another type": optimizer(
        "dtypes differ|elements in", single_partition_of_fp32_groups=[torch.zeros(150, dtype=torch.int8)]
    ),
    "weights: a view repeated to 2^40": optimizer(
        "larger than its storage|elements", single_partition_of_fp32_groups=[torch.zeros(1).expand(1 << 40)]
    ),
    "weights: ten thousand groups": optimizer("groups", single_partition_of_fp32_groups=[FLAT] * 10_000),
    "weights of stage 3: too few": optimizer("elements of rank", zero_3, fp32_flat_groups=[FLAT]),
    "weights of stage 3: a scalar": optimizer("not flat", zero_3, fp32_flat_groups=[torch.tensor(1.0)]),
    "weights of stage 3: ten thousand parts": optimizer("elements of rank", zero_3, fp32_flat_groups=[FLAT] * 10_000),
    "paddings: less than none": optimizer("paddings", rank=0, param_alignment_paddings=[[-5] * 12]),
    "paddings: 2^60": optimizer("elements", rank=0, param_alignment_paddings=[[1 << 60] * 12]),
    "paddings: too few": optimizer("paddings", rank=0, param_alignment_paddings=[[]]),
    "paddings: no list": optimizer("paddings", rank=0, param_alignment_paddings=7),
    "shapes: 2^47 by 2": shapes(SHAPES, chunk((1 << 47, 2))),
    "shapes: less than none": shapes(SHAPES, chunk((-8, -4))),
    "shapes: no tuple": shapes(SHAPES, chunk("8")),
    "shapes: 17 axes": shapes(SHAPES, chunk((1,) * 17)),
    "shapes: of nothing": shapes("need|lacks|elements", chunk((0, 1 << 47))),
    "shapes: 2^46 by 2": shapes("need|make no", chunk((1 << 46, 2))),
    "shapes of stage 3: 2^46 by 2": shapes("need|make no", chunk((1 << 46, 2)), zero_3),
    "shapes: a number": shapes(SHAPES, lambda _: 7),
    "shapes: a list of numbers": shapes(SHAPES, lambda _: [7]),
    "shapes: a thousand groups": shapes("groups", lambda own: [{f"g{n}": (1,)} for n in range(1000)]),
    "shapes: a name in two groups": shapes("two groups", lambda own: [own, own]),
    "shapes: a name that leads out": shapes("need|elements|lacks", lambda own: own.update({"../../evil": (2,)})),
    "shapes: an escape sequence": shapes("need|elements|lacks", lambda own: own.update({"\x1b[2J\n": (2,)})),
    "shared: in a circle": states(None, shared_params={"a": "b", "b": "a"}),
    "shared: with itself": states(None, shared_params={EMBEDDING: EMBEDDING}),
    "shared: a list": states(None, shared_params=[[]]),
    "shared: numbers": states(None, shared_params={1: 2}),
    "buffers: numbers": states(None, buffer_names=[1, [], None]),
    "frozen: without weights": states("frozen", frozen_param_shapes={"model.x": (2,)}),
    "frozen: with other weights": states(
        "make no parameter|elements|frozen", frozen_param_shapes={"x": (1 << 40,)}, frozen_param_fragments={"x": FLAT}
    ),
    "frozen of stage 3: with other weights": states(
        "make no parameter|elements|frozen",
        zero_3,
        frozen_param_shapes={"x": (1 << 40,)},
        frozen_param_fragments={"x": FLAT},
    ),
    "module: a list": states(None, module=[1]),
    "module: a name with an escape sequence": states(
        "no part|no rule|lacks|\\\\x1b|cannot hold", module={"\x1b[2J": FLAT}
    ),
    "version: an escape sequence": states(None, ds_version="\x1b[2J\n"),
    "version: a megabyte": states(None, ds_version="1" * (1 << 20)),
    "settings: nested": states(None, ds_config={"bf16": {"enabled": [[]]}, "fp16": 7}),
    "universal: a link to /etc/passwd": weight(lambda path: path.symlink_to("/etc/passwd"), NO_FILE),
    "universal: a pipe": weight(lambda path: os.mkfifo(path), "lacks the weights"),
    "universal: a folder": weight(Path.mkdir, "lacks the weights"),
    "universal: missing": weight(lambda path: None, "lacks the weights"),
    "universal: a list": weight(lambda path: torch.save([1], path), "no tensor for"),
    "universal: too few": weight(lambda path: torch.save({"param": FLAT}, path), "shape mismatch"),
    "universal: a scalar": weight(lambda path: torch.save({"param": torch.tensor(1.0)}, path), "shape mismatch"),
    "universal: another type": weight(
        lambda path: torch.save({"param": torch.zeros(8, 4, dtype=torch.complex64)}, path), "stored as"
    ),
    "universal: a parameter that leads out": shapes_of_universal({"../../../evil": (2,)}, "lacks the weights"),
    "universal: an absolute parameter": shapes_of_universal({"/etc": (2,)}, "lacks the weights"),
    "universal: a folder with an escape sequence": changed(
        lambda folder: (folder / TAG / "zero" / "\x1b[2J\n").mkdir(), "lacks the weights", universal
    ),
    "universal: a folder that is a link out": changed(
        lambda folder: (folder / TAG / "zero" / "x").symlink_to("/etc"), "lacks the weights", universal
    ),
}
