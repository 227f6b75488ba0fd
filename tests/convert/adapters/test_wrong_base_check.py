"""An adapter of another base merges with a warning that names both; names of folders alone never raise one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoConfig

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from llmconv.convert.models.model_config import rope_fields
from tests.builders.lora_models import causal_lm, train

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
Make = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of four layers, one of six, and an adapter of the first that PEFT saved."""
    folder = tmp_path_factory.mktemp("trained")
    model = causal_lm("llama", num_hidden_layers=4, num_key_value_heads=1, **SMALL)
    train(model, folder, merge=False, target_modules=["q_proj", "v_proj"])
    causal_lm("llama", num_hidden_layers=6, num_key_value_heads=1, **SMALL).save_pretrained(folder / "deeper")
    return folder


@pytest.fixture
def make(trained: Path, tmp_path: Path) -> Make:
    """`make(base, config fields, adapter_config fields)`: copies with these fields."""

    def made(base: str, config: dict[str, Any], fields: dict[str, Any]) -> tuple[Path, Path]:
        paths = shutil.copytree(trained / base, tmp_path / "b"), shutil.copytree(trained / "adapter", tmp_path / "a")
        for file, more in ((paths[0] / "config.json", config), (paths[1] / "adapter_config.json", fields)):
            file.write_text(json.dumps(json.loads(file.read_text()) | more))
        return paths

    return made


def merge(base: Path | str, adapter: Path | str, out: Path, *options: Any) -> Result:
    done = CliRunner().invoke(main, ["merge-lora", str(base), str(adapter), "-o", str(out), *map(str, options)])
    assert done.exit_code == 0, done.stderr
    return done


OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "fewer layers": ("deeper", {}, {"base_model_name_or_path": "/data/base"}, "the first 4 of 6 layers"),
    "the name of another family": (
        "base",
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "auto_mapping": None},
        "was called a llama, this one is a mistral",
    ),
    "the class of another family": (
        "base",
        {},
        {"auto_mapping": {"base_model_class": "X", "parent_library": "transformers.models.qwen3.modeling_qwen3"}},
        "its base was a qwen3, this one is a llama",
    ),
    "the id of another model": (
        "base",
        {"_name_or_path": "acme/large"},
        {"base_model_name_or_path": "acme/tiny"},
        "its name is `acme/large`",
    ),
}


@pytest.mark.parametrize(("base", "config", "fields", "reason"), OTHERS.values(), ids=OTHERS.keys())
def test_an_adapter_of_another_base_is_told(
    tmp_path: Path, make: Make, base: str, config: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    model, adapter = make(base, config, fields)
    told = merge(model, adapter, tmp_path / "out").stderr
    assert reason in told and str(model) in told and "`a`" in told
    if "base_model_name_or_path" in fields:
        assert fields["base_model_name_or_path"] in told


ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a local path of another name": ({}, {"base_model_name_or_path": "/home/me/models/sft-7"}),
    "a relative path": ({}, {"base_model_name_or_path": "./runs/base"}),
    "the id of the base itself": ({"_name_or_path": "acme/tiny"}, {"base_model_name_or_path": "acme/tiny"}),
    "a mirror of the base": ({"_name_or_path": "acme/tiny"}, {"base_model_name_or_path": "mirror/Tiny-bnb-4bit"}),
    "the same family": ({}, {"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}),
    "a model that says nothing of itself": ({}, {"base_model_name_or_path": "acme/tiny"}),
    "two families in one name": ({}, {"base_model_name_or_path": "acme/Qwen-1.5-llamafied-llama"}),
    "no base": ({}, {"base_model_name_or_path": None}),
}


@pytest.mark.parametrize(("config", "fields"), ALIKE.values(), ids=ALIKE.keys())
def test_no_alarm_is_false(tmp_path: Path, make: Make, config: dict[str, Any], fields: dict[str, Any]) -> None:
    assert "warning" not in merge(*make("base", config, fields), tmp_path / "out").stderr


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [0, 1, 2, 3]},
        {"target_modules": r"model\.layers\.[0-3]\..*_proj"},
        {"target_modules": [f"layers.{n}.self_attn.{name}_proj" for n in range(4) for name in "qv"]},
        {"exclude_modules": ["layers.4", "layers.5"]},
    ],
    ids=["layers_to_transform", "a pattern", "names with numbers", "exclude_modules"],
)
def test_layers_that_were_chosen_are_no_evidence(tmp_path: Path, make: Make, fields: dict[str, Any]) -> None:
    assert "another model" not in merge(*make("deeper", {}, fields), tmp_path / "out").stderr


def test_swapped_arguments_are_told(trained: Path, tmp_path: Path) -> None:
    paths = [str(trained / "adapter"), str(trained / "base")]
    done = CliRunner().invoke(main, ["merge-lora", *paths, "-o", str(tmp_path / "out")])
    assert done.exit_code == 3 and "the arguments are swapped" in done.stderr
    assert f"llmconv merge-lora {paths[1]} {paths[0]} -o OUT" in done.stderr


def test_a_model_in_the_place_of_an_adapter_is_told(trained: Path, tmp_path: Path) -> None:
    paths = [str(trained / "base"), str(trained / "deeper")]
    done = CliRunner().invoke(main, ["merge-lora", *paths, "-o", str(tmp_path / "out")])
    assert done.exit_code == 3 and "is a model, not an adapter" in done.stderr


# Tokenizers and chat templates that an adapter's folder has

TEMPLATE = "{{ messages }}"


def test_a_chat_template_that_only_the_adapter_has_is_taken_along(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    (base / "tokenizer.json").write_text("{}")
    (base / "tokenizer_config.json").write_text("{}")
    (adapter / "chat_template.jinja").write_text(TEMPLATE)
    done = merge(base, adapter, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert "the base has no chat template; that of the adapter `a`" in done.stderr


def test_a_chat_template_in_the_adapters_tokenizer_config_is_taken_along(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    (base / "tokenizer.json").write_text("{}")
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    merge(base, adapter, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE


def test_another_chat_template_is_named_and_the_bases_kept(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    for folder, text in ((base, "base"), (adapter, "adapter")):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text(text)
    done = merge(base, adapter, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "base"
    assert "has another chat template" in done.stderr and f"--tokenizer {adapter}" in done.stderr


def test_the_same_chat_template_says_nothing(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    for folder in (base, adapter):
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert "warning" not in merge(base, adapter, tmp_path / "out").stderr


def test_a_tokenizer_that_only_the_adapter_has_is_taken_along(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    (adapter / "tokenizer.json").write_text('{"a": 1}')
    done = merge(base, adapter, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    assert "the base has no tokenizer; it is taken from the adapter `a`" in done.stderr


def test_the_users_tokenizer_replaces_all_others(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    (base / "tokenizer.json").write_text("base")
    (base / "chat_template.jinja").write_text("base")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text("mine")
    merge(base, adapter, tmp_path / "out", "--tokenizer", tmp_path / "mine")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


TOKENS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<turn>": 3}


def save_tokenizer(folder: Path, eos: str, *more: str) -> None:
    """A tokenizer of `TOKENS` and `more` that ends texts with `eos`."""
    ids = TOKENS | {text: 4 + at for at, text in enumerate(more)}
    tokens = [{"id": number, "content": text, "special": True} for text, number in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": {"content": "<s>"}}))


def test_another_end_of_text_in_the_adapters_folder_is_named(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {"eos_token_id": 2}, {})
    save_tokenizer(base, "</s>")
    save_tokenizer(adapter, "<turn>", "<|call|>")
    done = merge(base, adapter, tmp_path / "out")
    assert "`eos_token` '<turn>' (base: '</s>')" in done.stderr and "1 added tokens, `<|call|>`" in done.stderr
    assert f"`--tokenizer {adapter}`" in done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 2


def test_a_token_of_the_users_tokenizer_without_a_row_is_named(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    rows = json.loads((base / "config.json").read_text())["vocab_size"]
    save_tokenizer(adapter, "<turn>", *(f"<{number}>" for number in range(4, rows)), "<|call|>")
    merged = merge(base, adapter, tmp_path / "out", "--tokenizer", adapter)
    given = ["to-hf", base, "-o", tmp_path / "converted", "--tokenizer", adapter]
    for done in (merged, CliRunner().invoke(main, [*map(str, given)])):
        assert "1 token that the model has no row for (`<|call|>`)" in done.stderr


def test_other_settings_of_decoding_in_the_adapters_folder_are_named(tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {}, {})
    save_tokenizer(base, "</s>")
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2], "transformers_version": "9"}))
    done = merge(base, adapter, tmp_path / "out")
    assert "`eos_token_id` in `generation_config.json`" in done.stderr


@pytest.mark.parametrize(("stored", "expected"), [(2, 3), ([2, 0], [3, 2, 0]), ([3, 2], [3, 2]), (None, 3)])
def test_the_ids_follow_the_users_tokenizer(stored: Any, expected: Any, tmp_path: Path, make: Make) -> None:
    base, adapter = make("base", {"eos_token_id": stored, "bos_token_id": 9}, {})
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    save_tokenizer(base, "</s>")
    save_tokenizer(adapter, "<turn>")
    done = merge(base, adapter, tmp_path / "out", "--tokenizer", adapter)
    assert "was saved with other settings" not in done.stderr
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == expected and config["bos_token_id"] == 9
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == expected


# Fields of an adapter that trains rows of the embedding, and whether that of the new token is one of them
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "the row of the token": ({"trainable_token_indices": [4]}, True),
    "the rows of several tokens": ({"trainable_token_indices": {"embed_tokens": [3, 4]}}, True),
    "the whole embedding": ({"modules_to_save": ["embed_tokens"]}, True),
    "LoRA on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, True),
    "another row": ({"trainable_token_indices": [3]}, False),
    "none": ({}, False),
    "the head alone": ({"modules_to_save": ["lm_head"]}, False),
}


@pytest.mark.parametrize(("fields", "taken"), ROWS.values(), ids=ROWS)
def test_the_tokenizer_comes_from_the_adapter_if_it_trained_the_rows_of_its_tokens(
    fields: dict[str, Any], taken: bool, tmp_path: Path
) -> None:
    model = causal_lm("llama", num_hidden_layers=1, num_key_value_heads=1, **SMALL)
    train(model, tmp_path, merge=False, **{"target_modules": ["q_proj"], **fields})
    save_tokenizer(tmp_path / "base", "</s>")
    save_tokenizer(tmp_path / "adapter", "<turn>", "<|call|>")
    done = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    source = tmp_path / ("adapter" if taken else "base") / "tokenizer.json"
    assert (tmp_path / "out/tokenizer.json").read_bytes() == source.read_bytes()
    said = "trained 1 tokens that the base's tokenizer does not have (`<|call|>`)"
    assert (said in done.stderr) is taken and ("was saved with other settings" in done.stderr) is not taken


def test_a_tokenizer_that_moves_the_bases_tokens_is_not_taken(tmp_path: Path) -> None:
    model = causal_lm("llama", num_hidden_layers=1, num_key_value_heads=1, **SMALL)
    train(model, tmp_path, merge=False, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    save_tokenizer(tmp_path / "base", "</s>", "<|old|>")
    save_tokenizer(tmp_path / "adapter", "</s>", "<|new|>")
    done = merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert "was saved with other settings" in done.stderr
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "base/tokenizer.json").read_bytes()


# inspect


def test_inspect_tells_what_an_adapter_is(make: Make) -> None:
    _, adapter = make("base", {}, {"base_model_name_or_path": "acme/tiny"})
    lines = CliRunner().invoke(main, ["inspect", str(adapter)]).stdout.splitlines()
    shown = dict(line.split("  ", 1) for line in lines)
    told = {name.strip(): value.strip() for name, value in shown.items()}
    assert (told["format"], told["kind"], told["rank (r)"], told["alpha"]) == ("adapter", "LORA", "4", "8")
    assert told["targets"] == "q_proj, v_proj" and told["base model"] == "acme/tiny"
    assert "architecture" not in told


def test_inspect_tells_an_adapter_in_json(make: Make) -> None:
    _, adapter = make("base", {}, {"base_model_name_or_path": "acme/tiny"})
    told = json.loads(CliRunner().invoke(main, ["inspect", "--json", str(adapter)]).stdout)
    assert told["adapter"] == {
        "peft_type": "LORA",
        "base": "acme/tiny",
        "r": 4,
        "alpha": 8,
        "targets": ["q_proj", "v_proj"],
        "modules_to_save": None,
    }


def test_a_merge_of_an_adapter_of_another_base_is_still_exact(tmp_path: Path, make: Make, trained: Path) -> None:
    base, adapter = make("deeper", {}, {})
    merge(base, adapter, tmp_path / "out")
    before, after = open_checkpoint(trained / "deeper"), open_checkpoint(tmp_path / "out")
    name = "model.layers.5.self_attn.q_proj.weight"
    assert torch.equal(torch.from_numpy(before[name].read()), torch.from_numpy(after[name].read()))


OLD, NEW = (
    {"rope_theta": 10000.0, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
)
OLD_SCALED = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
BY_KIND = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}}


def with_rope(file: Path, rope: dict[str, Any], source: Path) -> None:
    """Writes the configuration in `source` to `file` with these rotary settings alone."""
    stored = json.loads(source.read_text())
    own = {name: value for name, value in stored.items() if not name.startswith("rope_")}
    file.write_text(json.dumps(own | rope))


@pytest.mark.parametrize(
    "base, near", [(OLD, OLD_SCALED), (OLD, SCALED), (NEW, OLD_SCALED), (NEW, {"rope_theta": 5e5})]
)
def test_a_configuration_next_to_the_adapter_with_other_positions_is_refused(
    base: dict[str, Any], near: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    """LongLoRA saves the running model's configuration with the adapter: positions were scaled for the training."""
    folder, adapter = make("base", {}, {})
    with_rope(adapter / "config.json", near, folder / "config.json")
    with_rope(folder / "config.json", base, folder / "config.json")
    out = tmp_path / "merged"
    done = CliRunner().invoke(main, ["merge-lora", str(folder), str(adapter), "-o", str(out)])
    assert done.exit_code == 3
    assert "has other rotary positions than the base" in done.stderr
    scaled = tmp_path / "scaled"  # as the hint says
    hint = ["to-hf", str(folder), "--config", str(adapter / "config.json"), "-o"]
    assert f"llmconv {' '.join(hint)} BASE" in done.stderr
    assert CliRunner().invoke(main, [*hint, str(scaled)]).exit_code == 0
    merge(scaled, adapter, out)
    found = AutoConfig.from_pretrained(out).rope_parameters
    assert found.items() >= rope_fields(near).items()


@pytest.mark.parametrize("base, near", [(OLD, NEW), (NEW, OLD), (OLD_SCALED, SCALED), (OLD, BY_KIND)])
def test_the_same_positions_next_to_the_adapter_are_merged(
    base: dict[str, Any], near: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    folder, adapter = make("base", {}, {})
    with_rope(adapter / "config.json", near, folder / "config.json")
    with_rope(folder / "config.json", base, folder / "config.json")
    merge(folder, adapter, tmp_path / "merged")
