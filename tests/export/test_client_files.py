"""The files of each client, and the models and options that a client refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from transformers import GenerationConfig

from llmconv.cli import main
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.export.clients import ClientModel, EncodedGraphs, find_clients, known_clients, roles_for, transformersjs
from llmconv.export.clients import genai as genai_client
from llmconv.export.clients.optimum import accept_any_empty_past, guess
from llmconv.export.families import find_input_map
from llmconv.export.input_map import InputMap, Port
from llmconv.export.tracing.fake_model import load_config
from llmconv.files.safe_folder import Link
from llmconv.output.manifest import read_manifest
from llmconv.progress import warnings_to
from llmconv.verify import verify
from tests.conftest import CONFIGS, save_tiny
from tests.export.conftest import eager_logits, run_graph, tokens

ALL = ("genai", "optimum", "transformersjs")


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head size that is not hidden/heads and one key/value head, all layouts; do not write into it."""
    folder = save_tiny("qwen3", tmp_path_factory.mktemp("unusual") / "qwen3", head_dim=24, num_key_value_heads=1)
    export(folder, layout=ALL)
    return folder


def model_of(model_type: str, generation: dict[str, Any] | None = None, **changes: Any) -> ClientModel:
    """The description of a tiny model for clients."""
    fields = {**CONFIGS[model_type], "model_type": model_type, **changes}
    return ClientModel(load_config(fields), find_input_map(model_type), generation, fields=fields)


def genai_config(model: ClientModel, *roles: str) -> dict[str, Any]:
    """The content of genai_config.json over these graphs."""
    graphs = EncodedGraphs(dict.fromkeys(roles, b""), {role: f"{role}.onnx" for role in roles}, ("model.safetensors",))
    content: dict[str, Any] = json.loads(genai_client.files(model, graphs)["genai_config.json"])
    return content


def axes(path: Path, name: str) -> list[str | int]:
    """The declared shape of an input."""
    inputs = onnx.load(path, load_external_data=False).graph.input
    port = next(port for port in inputs if port.name == name)
    return [axis.dim_param or axis.dim_value for axis in port.type.tensor_type.shape.dim]


@pytest.mark.slow
def test_every_client_has_the_name_of_its_file() -> None:
    assert all(layout.name == name for name, layout in known_clients().items())


@pytest.mark.slow
def test_an_unknown_layout_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="unknown layout `coreml`") as refused:
        export(tmp_path, layout="coreml")
    assert "genai, onnxruntime, optimum, transformersjs" in refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["--prefill", "--incremental"])
def test_genai_refuses_half_a_pair_of_graphs(tmp_path: Path, graph: str) -> None:
    result = CliRunner().invoke(main, ["export", str(tmp_path), graph, "--layout", "genai"])
    assert result.exit_code == 2
    assert "layout `genai` cannot use" in result.stderr and "`--prefill --incremental`" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "asked", "expected"),
    [
        ([], [], ["prefill", "decode"]),
        (["genai"], [], ["unified"]),
        (["genai"], ["prefill", "decode"], ["prefill", "decode"]),
        (["optimum"], ["prefill"], ["prefill", "unified"]),
        (["onnxruntime", "transformersjs"], [], ["prefill", "decode", "unified"]),
    ],
)
def test_a_layout_implies_the_graphs_that_its_client_runs(
    names: list[str], asked: list[str], expected: list[str]
) -> None:
    assert roles_for(find_clients(names), asked) == expected


@pytest.mark.slow
def test_the_files_of_clients_are_in_the_manifest(unusual: Path) -> None:
    files = read_manifest(unusual).files
    for name in ("model.onnx", "transformersjs.graph", "genai_config.json"):
        assert files[name]["sha256"] == hashlib.sha256((unusual / name).read_bytes()).hexdigest()
    assert files["onnx/model.onnx"] == {"link": "../transformersjs.graph"}
    assert read_manifest(unusual).steps[-1]["options"]["layouts"] == list(ALL)


@pytest.mark.slow
def test_no_layout_copies_weights(unusual: Path) -> None:
    weights = (unusual / "model.safetensors").stat().st_size
    written = [path for path in unusual.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in written) < weights + 300_000


@pytest.mark.slow
def test_a_folder_with_all_layouts_passes_verification(unusual: Path) -> None:
    report = verify(unusual)
    assert report.verdict == "pass", [line for line in report.lines() if line.startswith("FAILED")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["genai_config.json", "onnx/model.onnx"])
def test_a_file_of_the_user_is_not_replaced_silently(llama: Path, name: str) -> None:
    (llama / name).parent.mkdir(exist_ok=True)
    (llama / name).write_text("mine")
    with pytest.raises(InputRefused, match=f"`{llama / name}` already exists"):
        export(llama, layout=["genai", "transformersjs"])
    assert (llama / name).read_text() == "mine" and not (llama / "model.onnx").exists()


@pytest.mark.slow
def test_a_layout_can_be_added_to_other_graphs(exported: Path) -> None:
    (exported / "model.onnx").unlink()
    content = read_manifest(exported)
    content.graphs.pop("unified")
    (exported / "llmconv.json").write_bytes(content.encode())
    export(exported, layout="genai")
    assert set(read_manifest(exported).graphs) == {"prefill", "decode", "unified"}


@pytest.mark.slow
def test_a_new_folder_can_be_replaced_with_its_links(llama: Path, tmp_path: Path) -> None:
    for _ in range(2):
        export(llama, tmp_path / "new", layout="transformersjs", max_shard_size="500KB", overwrite=True)
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    links = [tmp_path / "new" / "onnx" / name for name in transformersjs.data_names(len(shards))]
    assert len(shards) > 1 and [link.resolve() for link in links] == shards


@pytest.mark.slow
def test_genai_takes_one_graph_or_the_pair() -> None:
    assert genai_config(model_of("llama"), "unified")["model"]["decoder"]["filename"] == "unified.onnx"
    pair = genai_config(model_of("llama"), "prefill", "decode")["model"]
    assert pair["type"] == "decoder-pipeline" and "filename" not in pair["decoder"]
    (stages,) = pair["decoder"]["pipeline"]
    assert [(s["run_on_prompt"], s["run_on_token_gen"]) for s in stages.values()] == [(True, False), (False, True)]


@pytest.mark.slow
def test_genai_maps_the_weights_of_two_sessions_once() -> None:
    options = [genai_config(model_of("llama"), *r)["model"]["decoder"]["session_options"] for r in PAIR_AND_ONE]
    assert [given.get("session.disable_prepacking") for given in options] == ["1", None]


PAIR_AND_ONE = (("prefill", "decode"), ("unified",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens_of", "expected"),
    [
        ({}, {"eos_token_id": [2], "pad_token_id": 0, "bos_token_id": 1}),
        ({"eos_token_id": [7, 8], "pad_token_id": [9, 0]}, {"eos_token_id": [7, 8], "pad_token_id": 9}),
        ({"pad_token_id": None}, {"pad_token_id": 0}),
    ],
)
def test_genai_gets_the_tokens_of_generation_config(tokens_of: dict[str, Any], expected: dict[str, Any]) -> None:
    found = genai_config(model_of("llama", tokens_of), "unified")["model"]
    assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
def test_a_model_without_end_token_does_not_end_at_padding() -> None:
    found = genai_config(model_of("llama", eos_token_id=None, pad_token_id=None), "unified")["model"]
    assert (found["eos_token_id"], found["pad_token_id"]) == ([found["vocab_size"] - 1], found["vocab_size"] - 1)


@pytest.mark.slow
def test_genai_samples_only_with_do_sample_in_generation_config() -> None:
    assert genai_config(model_of("llama"), "unified")["search"]["do_sample"] is False
    content = {"do_sample": True, "top_p": 0.9, "temperature": 0.6, "top_k": None}
    search = genai_config(model_of("llama", content), "unified")["search"]
    assert search["do_sample"] is True and search["top_p"] == 0.9 and "top_k" not in search


@pytest.mark.slow
def test_genai_refuses_a_model_with_several_head_sizes() -> None:
    class Uneven(InputMap):
        def inputs(self, config: Any) -> tuple[Port, ...]:
            *rest, last = super().inputs(config)
            return (*rest, Port(last.name, last.dtype, (*last.axes[:3], 8)))

    with pytest.raises(UnsupportedInput, match="only one number of heads and one head size"):
        genai_client.check(ClientModel(model_of("llama").config, Uneven()))


@pytest.mark.parametrize(("model_type", "warns"), [("mixtral", True), ("llama", False), ("gemma3_text", False)])
def test_a_type_that_transformersjs_has_no_class_for_is_warned_of(model_type: str, warns: bool) -> None:
    warnings: list[str] = []
    with warnings_to(warnings.append):
        transformersjs.check(ClientModel(load_config({"model_type": model_type}), find_input_map(model_type)))
    assert bool(warnings) == warns and all("`AutoModelForCausalLM` refuses" in line for line in warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, (2, 16)),
        ("qwen3", {"head_dim": 24}, (2, 16)),
        ("gemma2", {}, (4, 16)),
        ("bloom", {}, (4, 16)),
    ],
)
def test_optimum_guesses_the_cache(model_type: str, changes: dict[str, Any], expected: tuple[int, int]) -> None:
    model = model_of(model_type, **changes)
    assert guess(model.config, model.input_map.inputs(model.config)[-1]) == expected


@pytest.mark.slow
def test_the_graph_accepts_any_guess_only_if_the_guess_is_wrong(unusual: Path, llama: Path) -> None:
    export(llama, layout="optimum")
    assert axes(llama / "model.onnx", "past_key_values.0.key") == ["batch_size", 2, "past_sequence_length", 16]
    assert axes(unusual / "model.onnx", "past_key_values.0.key")[1::2] == ["kv_heads", "head_dim"]
    assert axes(unusual / "transformersjs.graph", "past_key_values.0.key")[1::2] == [1, 24]


@pytest.mark.slow
def test_an_empty_past_of_any_shape_gives_the_same_outputs(unusual: Path) -> None:
    inputs = tokens(batch=2, length=7)
    past = {f"past_key_values.{i}.{part}": np.zeros((2, 4, 0, 16), np.float32) for i in range(4) for part in PARTS}
    outputs = run_graph(unusual / "model.onnx", inputs, past)
    np.testing.assert_allclose(outputs["logits"], eager_logits(unusual, inputs), atol=3e-6)
    assert outputs["present.3.value"].shape == (2, 1, 7, 24)


PARTS = ("key", "value")


@pytest.mark.slow
def test_the_variant_is_deterministic(deep: Callable[[str], Path]) -> None:
    model = model_of("llama", num_hidden_layers=8)
    past = list(model.input_map.inputs(model.config)[3:])
    encoded = (deep("llama") / "model.onnx").read_bytes()
    assert accept_any_empty_past(encoded, past) == accept_any_empty_past(encoded, past)


@pytest.mark.slow
def test_transformersjs_config_is_written_in_a_new_folder_only(llama: Path, tmp_path: Path) -> None:
    before = (llama / "config.json").read_bytes()
    export(llama, layout="transformersjs")
    export(llama, tmp_path / "new", layout="transformersjs")
    assert (llama / "config.json").read_bytes() == before
    content = json.loads((tmp_path / "new" / "config.json").read_text())["transformers.js_config"]
    assert content == {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}}


@pytest.mark.slow
def test_the_links_of_transformersjs_open_in_place_and_as_copies(unusual: Path, tmp_path: Path) -> None:
    inputs = tokens(batch=2, length=7)
    copied = Path(shutil.copytree(unusual / "onnx", tmp_path / "onnx"))
    linked, plain = (run_graph(folder / "model.onnx", inputs)["logits"] for folder in (unusual / "onnx", copied))
    np.testing.assert_array_equal(linked, plain)


@pytest.mark.slow
def test_transformersjs_takes_a_hundred_data_files() -> None:
    graphs = EncodedGraphs({"unified": b""}, {"unified": "model.onnx"}, tuple(f"{i}.safetensors" for i in range(101)))
    with pytest.raises(UsageProblem, match="at most 100 data files") as refused:
        transformersjs.files(model_of("llama"), graphs)
    assert "--max-shard-size" in refused.value.hint


@pytest.mark.slow
def test_transformersjs_gets_the_generation_config_that_it_requires(llama: Path) -> None:
    (llama / "generation_config.json").unlink()
    export(llama, layout="transformersjs")
    content = json.loads((llama / "generation_config.json").read_text())
    assert content == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert "generation_config.json" in read_manifest(llama).files


@pytest.mark.slow
def test_a_link_leads_to_a_file_of_the_folder(unusual: Path) -> None:
    model, weights = model_of("qwen3"), ("a.safetensors", "b.safetensors")
    graphs = EncodedGraphs({"unified": onnx.ModelProto().SerializeToString()}, {"unified": "model.onnx"}, weights)
    files = transformersjs.files(model, graphs)
    assert files["onnx/model.onnx_data_1"] == Link("../b.safetensors")


@pytest.mark.slow
def test_the_command_lists_the_written_files(llama: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(llama), "--layout", "genai", "--layout", "optimum", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["graphs"] == {"unified": "model.onnx"} and printed["client_files"] == ["genai_config.json"]


@pytest.mark.slow
def test_optimums_graph_of_one_shared_head_has_the_sizes_of_the_model(tmp_path: Path) -> None:
    """Falcon with `multi_query` keeps one head, whatever the number of its query heads."""
    folder = save_tiny("falcon", tmp_path / "falcon", **FALCON)
    export(folder, layout=["optimum", "genai"])
    assert verify(folder, scenario=["decode chain, 16 steps"]).verdict == "pass"
    decoder = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]
    assert decoder["num_key_value_heads"] == 1


FALCON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "multi_query": True,
    "new_decoder_architecture": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", None])
def test_clients_that_read_tokenizer_json_are_named_where_it_is_missing(tmp_path: Path, name: str | None) -> None:
    folder, said = save_tiny("llama", tmp_path / "llama"), list[str]()
    if name:
        (folder / name).write_text("{}")
    with warnings_to(said.append):
        export(folder, layout=ALL, dry_run=True)
    found = [one for one in said if "tokenizer.json" in one]
    assert len(found) == (name == "tokenizer.model")
    assert all(one.startswith("genai, transformersjs: the tokenizer is read from `tokenizer.json`") for one in found)


def test_fields_of_generation_that_genai_does_not_have_are_named() -> None:
    warned: list[str] = []
    with warnings_to(warned.append):
        genai_config(model_of("llama", {"suppress_tokens": [3], "min_new_tokens": 0, "top_k": 5}), "unified")
        genai_config(model_of("llama", {"min_new_tokens": 0, "bad_words_ids": None, "typical_p": 1.0}), "unified")
    assert [one.split(" of ")[0] for one in warned] == ["ONNX Runtime GenAI has no `suppress_tokens`"]


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"do_sample": True, "top_p": 0.9, "min_p": 0.1, "top_k": 5}, "`min_p`, `top_p`"),
        ({"do_sample": False, "top_p": 0.9}, ""),
        (
            {"num_beams": 2, "length_penalty": 2.0, "suppress_tokens": [3], "sequence_bias": [[[3], 1.0]]},
            "`num_beams`, `sequence_bias`",
        ),
    ],
    ids=["samples", "greedy", "others"],
)
def test_settings_that_transformersjs_does_not_follow_are_named(settings: dict[str, Any], lost: str) -> None:
    warned: list[str] = []
    graphs = EncodedGraphs({"unified": onnx.ModelProto().SerializeToString()}, {}, ("model.safetensors",))
    with warnings_to(warned.append):
        transformersjs.files(model_of("llama", settings), graphs)
    assert [one.split(" of ")[0] for one in warned] == ([f"transformers.js 4.3 has no {lost}"] if lost else [])


SAYING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "do_sample": True, "top_k": 0, "eos_token_id": [2, 7]},
    {"eos_token_id": None, "bos_token_id": None, "num_beams": 3},
]


@pytest.mark.parametrize("said", SAYING, ids=["settings", "no ends"])
def test_clients_generate_as_config_json_says_where_it_alone_does(tmp_path: Path, said: dict[str, Any]) -> None:
    """As transformers, which has other defaults of special tokens in the class of a config."""
    model = model_of("llama", **said)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in model.fields.items() if v is not None}))
    theirs = GenerationConfig.from_pretrained(tmp_path, config_file_name="config.json", _from_model_config=True)
    graphs = EncodedGraphs({"unified": onnx.ModelProto().SerializeToString()}, {"unified": "model.onnx"}, ())
    written = transformersjs.files(model, graphs)["generation_config.json"]
    assert isinstance(written, bytes)
    (tmp_path / "generation_config.json").write_bytes(written)
    ours = GenerationConfig.from_pretrained(tmp_path)
    assert {n: v for n, v in ours.to_dict().items() if n != "_from_model_config"} == {
        n: v for n, v in theirs.to_dict().items() if n != "_from_model_config"
    }
    warned: list[str] = []
    with warnings_to(warned.append):
        found = genai_config(model, "unified")
    kept = {name: found["search"][name] for name in genai_client.SEARCH if name in found["search"]}
    wanted = {name: getattr(theirs, name) for name in genai_client.SEARCH if getattr(theirs, name) is not None}
    size = model.config.vocab_size
    assert kept == {"do_sample": False} | wanted | ({"top_k": size} if wanted.get("top_k") == 0 else {})
    assert found["model"]["eos_token_id"] == (theirs.eos_token_id or [size - 1])
    assert ["`num_beams` of config.json" in one for one in warned] == [True] * ("num_beams" in said)
