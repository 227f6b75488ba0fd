"""LLaMA2-Accessory: what cannot be expressed is listed and dropped on request, what is broken is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.accessory_models import (
    ARGS,
    DELTA,
    FIXTURES,
    Model,
    change,
    contents,
    llama,
    mixtral,
    save,
    trained,
    write_whole,
)

# What transformers has no place for


def adapter() -> Model:
    """A llama_adapter that sees pictures."""
    prefix = {"prefix": torch.randn(2, 1, 3, 32), "prefix_gate": torch.randn(2, 8), "prefix_new_gate": torch.randn(2)}
    pictures = {
        "clip.visual.proj": torch.randn(4, 4),
        "clip.dense.weight": torch.randn(4),
        "visual_query": torch.ones(3),
    }
    return llama(biases=("wq", "wo", "w1", "w2", "w3")) | prefix | pictures


def test_parts_that_transformers_lacks_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_whole(folder, adapter(), "llama_adapter")
    with pytest.raises(
        UnsupportedInput, match="has 6 tensors .*: `clip`, `visual_query`, `prefix`, `prefix_gate`"
    ) as refusal:
        to_hf(folder, tmp_path / "hf")
    assert "`--drop`" in refusal.value.hint and not (tmp_path / "hf").exists()


def test_the_language_model_is_converted_without_them_on_request(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", adapter(), "llama_adapter")
    opened = open_training(tmp_path / "x", options={"drop": True})
    plain = open_training(write_whole(tmp_path / "y", llama(biases=("wq", "wo", "w1", "w2", "w3")), "llama_peft"))
    assert {name: opened[name].read().tobytes() for name in opened} == {
        name: plain[name].read().tobytes() for name in plain
    }
    assert "`clip`" in opened.warnings[0] and "answers differently" in opened.warnings[1]


def test_inspect_lists_tensors_that_would_be_dropped(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["inspect", "--json", str(write_whole(tmp_path / "x", adapter(), "llama_adapter"))]
    )
    assert result.exit_code == 0
    assert any("`prefix_gate`" in warning for warning in json.loads(result.stdout)["warnings"])


def test_inspect_counts_trained_tensors_alone() -> None:
    folder = FIXTURES / "legacy_llama_peft_mp2_trainable" / "epoch0"
    found = json.loads(CliRunner().invoke(main, ["inspect", "--json", str(folder)]).stdout)
    assert (found["format"], found["tensors"], found["parameters"]) == ("accessory", 47, 22_208)
    assert found["warnings"][0].startswith("cannot be converted as it is: ")


def test_biases_of_a_mixtral_are_refused_unless_they_are_zero(tmp_path: Path) -> None:
    zero = {"layers.0.attention.wq.bias": torch.zeros(32)}
    assert contents(save(tmp_path / "x", mixtral() | zero, 2, "mixtral_peft")) == contents(
        save(tmp_path / "y", mixtral(), 1, "mixtral")
    )
    folder = save(tmp_path / "z", mixtral() | {"layers.0.attention.wq.bias": torch.ones(32)}, 2, "mixtral_peft")
    with pytest.raises(UnsupportedInput, match=r"`layers\.attention\.wq\.bias`"):
        open_training(folder)


def test_a_lora_of_an_expert_is_merged(tmp_path: Path) -> None:
    model, name = mixtral(), "layers.1.feed_forward.experts.3.w1"
    for layer in (name.replace("1", "0", 1), name):
        model |= {f"{layer}.lora_a.weight": torch.randn(2, 32), f"{layer}.lora_b.weight": torch.randn(48, 2)}
    merged = open_training(save(tmp_path / "x", model, 2, "mixtral_peft"))
    expected = model[f"{name}.weight"] + model[f"{name}.lora_b.weight"] @ model[f"{name}.lora_a.weight"]
    stored = merged["model.layers.1.block_sparse_moe.experts.3.w1.weight"].read()
    np.testing.assert_allclose(stored, expected.numpy(), rtol=1e-5, atol=1e-5)


# What is refused


def test_a_delta_is_refused_with_the_way_to_apply_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedInput, match="is a delta") as refusal:
        to_hf(DELTA / "delta", tmp_path / "hf")
    assert "llmconv delta apply" in refusal.value.hint


def remove(folder: Path) -> None:
    (folder / "consolidated.00-of-02.model.pth").unlink()


def add(folder: Path) -> None:
    shutil.copy(folder / "consolidated.01-of-02.model.pth", folder / "consolidated.02-of-02.model.pth")


def mix(folder: Path) -> None:
    shutil.copy(folder / "consolidated.01-of-02.model.pth", folder / "consolidated.01-of-03.model.pth")


def mix_with_meta(folder: Path) -> None:
    shutil.copy(folder / "consolidated.01-of-02.model.pth", folder / "consolidated.01.pth")


def truncate(folder: Path) -> None:
    file = folder / "consolidated.01-of-02.model.pth"
    file.write_bytes(file.read_bytes()[:-100])


def reshape(folder: Path) -> None:
    change(folder / "consolidated.01-of-02.model.pth", **{"llma.output.weight": torch.ones(10, 32)})


def halve_lora(folder: Path) -> None:
    layers = (f"llma.layers.{layer}.attention.wq.lora_a.weight" for layer in range(2))
    halves = {name: torch.ones(2, 32) for name in layers}
    for number in range(2):
        change(folder / f"consolidated.0{number}-of-02.model.pth", **halves)


def lose_bias(folder: Path) -> None:
    for number in range(2):
        change(
            folder / f"consolidated.0{number}-of-02.model.pth", **{"llma.layers.1.attention.wq.bias": torch.ones(16)}
        )


def add_unknown(folder: Path) -> None:
    for number in range(2):
        change(folder / f"consolidated.0{number}-of-02.model.pth", **{"llma.layers.0.router.weight": torch.ones(2, 32)})


def put_object(folder: Path) -> None:
    torch.save({"model": {"llma.norm.weight": "text"}}, folder / "consolidated.01-of-02.model.pth")


def add_twin(folder: Path) -> None:
    shutil.copy(folder / "consolidated.01-of-02.model.pth", folder / "consolidated.1-of-2.model.pth")


def name_no_plugin(folder: Path) -> None:
    (folder / "meta.json").write_text('{"llama_type": ["llama"]}')


def flatten(folder: Path) -> None:
    for number in range(2):
        change(
            folder / f"consolidated.0{number}-of-02.model.pth", **{"llma.layers.0.attention.wv.weight": torch.ones(8)}
        )


def rename_plugin(folder: Path) -> None:
    (folder / "meta.json").write_text('{"llama_type": "my_own"}')


def configure(**fields: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**ARGS, **fields}))

    return edit


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (remove, "should have 2 shards, but number 0 is missing"),
    "an extra shard": (add, "should have 2 shards, but number 2 .* is superfluous"),
    "shards of two sets": (mix, "mixes shards of different checkpoints"),
    "shards of two layouts": (mix_with_meta, "mixes shards of different checkpoints"),
    "a shard under two names": (add_twin, "mixes shards of different checkpoints"),
    "a vector for a matrix": (flatten, "shape mismatch"),
    "no plugin": (name_no_plugin, "unknown plugin"),
    "a truncated shard": (truncate, "truncated or damaged"),
    "a shard of another split": (reshape, r"differs from the first shard in 1 tensors: `output\.weight`"),
    "half a LoRA": (halve_lora, r"shape mismatch for the LoRA of `layers\.0\.attention\.wq\.weight` in `x`"),
    "a bias of one layer alone": (lose_bias, r"only in some of its 2 layers: `layers\.\{\}\.attention\.wq\.bias`"),
    "an unknown tensor": (add_unknown, r"no rule places; unexpected keys: `layers\.0\.router\.weight`"),
    "no tensors": (put_object, "is not a plain state dict"),
    "an unknown plugin": (rename_plugin, "unknown plugin `my_own`"),
    "another size": (configure(dim=64), "shape mismatch"),
    "another number of key heads": (configure(n_kv_heads=8), "shape mismatch"),
    "odd heads": (configure(n_heads=7, n_kv_heads=None), "has 7 heads and 7 key/value heads for a size of 32"),
    "more layers": (configure(n_layers=3), "has 2 layers, its configuration says 3"),
    "countless layers": (configure(n_layers=10**9), "`n_layers` 1000000000, more than any model has"),
    "another multiplier": (configure(ffn_dim_multiplier=2.0), "shape mismatch"),
    "no number": (configure(norm_eps="1e-5"), "`norm_eps` in the configuration of `x` is invalid: '1e-5'"),
    "no rope scaling": (configure(rope_scaling=0), "`rope_scaling` in the configuration of `x` is invalid: 0"),
    "rope of Llama 3.1": (configure(use_scaled_rope=True), "has `use_scaled_rope`, which"),
}


@pytest.mark.parametrize(("damage", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    folder = save(tmp_path / "x", llama(), 2)
    damage(folder)
    with pytest.raises(InputRefused, match=reason):
        to_hf(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("moe", [3, {"num_experts": 10**9}, {"num_experts": "x"}])
def test_a_senseless_number_of_experts_is_refused(tmp_path: Path, moe: Any) -> None:
    with pytest.raises(
        MalformedInput, match="`moe` in the configuration of `x` is|`num_experts` 1000000000, more than any model has"
    ):
        open_training(save(tmp_path / "x", mixtral(), 1, "mixtral", moe=moe))


def test_an_expert_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", mixtral(), 2, "mixtral")
    change(
        folder / "consolidated.01-of-02.model.pth",
        **{"llma.layers.0.feed_forward.experts.0.w1.weight": torch.ones(48, 32)},
    )
    with pytest.raises(MalformedInput, match="two shards of `x` contain the same expert"):
        open_training(folder)


def test_an_internlm_in_several_shards_is_refused(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "internlm_mp1_bf16", tmp_path / "x")
    shutil.copy(source / "consolidated.00-of-01.model.pth", source / "consolidated.00-of-02.model.pth")
    (source / "consolidated.00-of-01.model.pth").rename(source / "consolidated.01-of-02.model.pth")
    with pytest.raises(UnsupportedInput, match="is an InternLM in 2 shards"):
        open_training(source)


def test_a_folder_without_shards_is_not_a_base(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", trained(llama(rank=2)))
    with pytest.raises(InputRefused, match="contains no `consolidated"):
        open_training(folder, options={"base": str(tmp_path)})
