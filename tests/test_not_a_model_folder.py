"""Paths that are mistaken for a model folder: every command names the kind and the way out."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from llmconv.cli import main
from llmconv.errors import LlmconvError
from llmconv.not_a_model_folder import refused_model
from tests.builders.dcp_folders import save
from tests.builders.torch_states import FIXTURES, LLAMA, llama_state

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
CONFIG = json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]})


def model(folder: Path) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True)
    save_file(llama_state(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(CONFIG)
    return folder


def files(folder: Path, **contents: bytes | str) -> Path:
    """A folder of files; `__` in a name stands for the dot."""
    folder.mkdir(parents=True)
    for name, content in contents.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def trainer(folder: Path) -> Path:
    for step in (500, 1000, 90):
        model(folder / f"checkpoint-{step}")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def adapter(folder: Path) -> Path:
    files(folder, adapter_config__json=json.dumps({"peft_type": "LORA", "base_model_name_or_path": "acme/tiny"}))
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    return folder


def outputs(folder: Path) -> Path:
    model(folder / "merged")
    adapter(folder / "lora")
    return folder


def torch_checkpoint(folder: Path) -> Path:
    files(folder, config__json=CONFIG)
    torch.save(llama_state(), folder / "last.ckpt")
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    return folder


def archive(kind: str) -> Callable[[Path], Path]:
    return lambda path: Path(shutil.make_archive(str(path), kind, model(path.with_name("inside"))))


def weights_alone(folder: Path) -> Path:
    (model(folder) / "config.json").unlink()
    return folder


def optimizer(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.bin")
    return folder / "optimizer.bin"


GIVEN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "an empty folder": (lambda path: files(path), "is an empty folder", "complete"),
    "a Trainer's output": (trainer, "contains 3 Trainer checkpoint(s)", "checkpoint-1000`"),
    "an adapter": (adapter, "is an adapter of `acme/tiny`, not a model", "llmconv merge-lora acme/tiny"),
    "a model and an adapter inside": (outputs, "`lora` (an adapter), `merged` (a model)", "merged`"),
    "models two folders below": (
        lambda path: model(path / "weights" / "step_10").parents[1],
        "is not a model itself; it contains `weights/step_10` (a model)",
        "weights/step_10`",
    ),
    "a delta": (lambda path: files(path, delta__json="{}"), "is a delta, not a model", "llmconv delta apply BASE"),
    "torch weights": (
        lambda path: files(path, config__json=CONFIG, pytorch_model__bin=b"x"),
        "are torch files (`pytorch_model.bin`)",
        "llmconv to-hf",
    ),
    "a torch checkpoint": (torch_checkpoint, "contains a torch checkpoint (`last.ckpt`)", "llmconv to-hf"),
    "TensorFlow": (
        lambda path: files(path, config__json=CONFIG, tf_model__h5=b"x"),
        "are TensorFlow weights",
        "from_tf",
    ),
    "Flax": (
        lambda path: files(path, config__json=CONFIG, flax_model__msgpack=b"x"),
        "are Flax weights",
        "from_flax",
    ),
    "GGUF": (
        lambda path: files(path, model__gguf=b"GGUF"),
        "a GGUF file of llama.cpp (`model.gguf`)",
        "llmconv to-hf",
    ),
    "ONNX": (
        lambda path: files(path, config__json=CONFIG, model__onnx=b"x"),
        "contains ONNX graphs (`model.onnx`)",
        "llmconv verify --graph",
    ),
    "a config alone": (
        lambda path: files(path, config__json=CONFIG, training_args__bin=b"x"),
        "contains no safetensors weights",
        "model.safetensors",
    ),
    "weights without a config": (
        weights_alone,
        "contains weights (`model.safetensors`), but no `config.json`",
        "--config CONFIG",
    ),
    "a safetensors file": (
        lambda path: model(path) / "model.safetensors",
        "is a weights file, not a model folder",
        "give its folder",
    ),
    "a lone safetensors file": (
        lambda path: Path(shutil.copy(model(path) / "model.safetensors", path.with_name("x.safetensors"))),
        "without the model's `config.json`",
        "--config CONFIG",
    ),
    "a graph": (
        lambda path: files(path, model__onnx=b"x") / "model.onnx",
        "is an ONNX graph, not a model folder",
        "exported from",
    ),
    "a GGUF file": (
        lambda path: files(path, x__gguf=b"GGUF" + bytes(99)) / "x.gguf",
        "is a GGUF file",
        "llmconv to-hf",
    ),
    "a pointer of Git LFS": (
        lambda path: files(path, model__safetensors=POINTER) / "model.safetensors",
        "is a Git LFS pointer",
        "git lfs pull",
    ),
    "a torch file": (lambda path: torch_checkpoint(path) / "last.ckpt", "is a torch file", "llmconv to-hf"),
    "an optimizer": (optimizer, "is the optimizer's state", "the weights"),
    "a zip": (archive("zip"), "is a zip archive", "unpack it"),
    "a tar": (archive("tar"), "is a tar archive", "unpack it"),
    "an empty file": (lambda path: files(path, x__safetensors=b"") / "x.safetensors", "is empty", "copy it again"),
}


@pytest.mark.parametrize(("make", "problem", "way"), GIVEN.values(), ids=GIVEN.keys())
def test_it_is_named_with_the_way_out(tmp_path: Path, make: Callable[[Path], Path], problem: str, way: str) -> None:
    try:
        error: LlmconvError = refused_model(make(tmp_path / "x"))
    except LlmconvError as raised:
        error = raised
    assert problem in error.message and way in error.hint


def llmconv(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


COMMANDS = {
    "export": ("export", "{}", "-o", "{out}"),
    "merge-lora": ("merge-lora", "{}", "nowhere/at-all.pt", "-o", "{out}"),
    "generate": ("generate", "{}", "x"),
    "generate, eager": ("generate", "{}", "x", "--backend", "torch"),
    "serve": ("serve", "{}"),
    "verify": ("verify", "{}"),
    "from-hf": ("from-hf", "{}", "--to", "meta", "-o", "{out}"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", ["an adapter", "a Trainer's output", "a safetensors file", "Flax", "an empty folder"])
def test_every_command_reports_the_same(tmp_path: Path, command: str, given: str) -> None:
    make, problem, _ = GIVEN[given]
    path = make(tmp_path / "x")
    done = llmconv(*(part.format(path, out=tmp_path / "out") for part in COMMANDS[command]))
    assert done.exit_code == 3, done.stderr
    assert problem in done.stderr and "\n\nhint: " in done.stderr
    assert not (tmp_path / "out").exists()


NAMED = ["ONNX", "TensorFlow", "Flax", "a Trainer's output", "an empty folder", "a zip", "a graph", "a delta"]


@pytest.mark.parametrize("command", ["to-hf", "inspect"])
@pytest.mark.parametrize("given", [name for name in NAMED if name != "a delta"])
def test_conversion_and_inspection_say_it_too(tmp_path: Path, command: str, given: str) -> None:
    make, problem, _ = GIVEN[given]
    output = ("-o", tmp_path / "out") if command == "to-hf" else ()
    done = llmconv(command, make(tmp_path / "x"), *output)
    assert done.exit_code == 3 and problem in done.stderr


def test_a_pickled_model_is_named_with_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    done = llmconv("to-hf", tmp_path / "model.pt", "-o", tmp_path / "out")
    assert done.exit_code == 3 and "torch.nn.modules.linear.Linear" in done.stderr and "state_dict()" in done.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("command", ["inspect", "export", "to-hf"])
def test_a_pointer_in_a_model_folder_is_reported(tmp_path: Path, command: str, name: str) -> None:
    (model(tmp_path / "x") / name).write_bytes(POINTER)
    more = () if command == "inspect" else ("-o", tmp_path / "out", "--dtype", "float16")
    done = llmconv(command, tmp_path / "x", *more)
    assert done.exit_code == 3 and f"`{name}` is a Git LFS pointer" in done.stderr and "git lfs pull" in done.stderr


def test_a_pointer_in_the_place_of_torch_weights_is_reported(tmp_path: Path) -> None:
    path = files(tmp_path / "x", config__json=CONFIG, pytorch_model__bin=POINTER)
    done = llmconv("to-hf", path, "-o", tmp_path / "out")
    assert done.exit_code == 3 and "`pytorch_model.bin` is a Git LFS pointer" in done.stderr


def test_the_error_for_graphs_of_another_exporter_has_the_command_to_verify_them(tmp_path: Path) -> None:
    path = files(tmp_path / "x", config__json=CONFIG, model__onnx=b"x")
    done = llmconv("verify", path)
    assert done.exit_code == 3 and "llmconv did not export" in done.stderr
    assert f"--graph {path / 'model.onnx'} --reference HF_FOLDER" in done.stderr


# Models that are not causal language models


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_json_file_of_a_model_is_answered_with_its_folder(name: str, tmp_path: Path) -> None:
    file = model(tmp_path / "x") / name
    file.write_text(file.read_text() if file.exists() else "{}")
    done = llmconv("export", file)
    assert done.exit_code == 3 and f"give its folder: `{tmp_path / 'x'}`" in done.stderr


def test_shards_without_the_first_and_without_an_index_are_no_folder_to_convert(tmp_path: Path) -> None:
    folder = model(tmp_path / "x")
    (folder / "model.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    for command in ("export", "to-gguf", "from-hf"):
        done = llmconv(
            command, folder, "-o", tmp_path / "out.gguf", *(("--to", "meta") if command == "from-hf" else ())
        )
        assert done.exit_code == 3 and "1 of 3 shards, and no index; number 1 is missing" in done.stderr
        assert "to-hf" not in done.stderr
    (folder / "model-00002-of-00003.safetensors").rename(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    done = llmconv("generate", folder, "x")
    assert done.exit_code == 3 and "--backend" not in done.stderr


OTHERS = {
    "bert": ({"model_type": "bert", "architectures": ["BertModel"]}, "`architectures` is BertModel"),
    "classifier": (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "not a causal language model: `architectures` is LlamaForSequenceClassification",
    ),
    "masked": ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "RobertaForMaskedLM"),
    "t5": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        "is an encoder-decoder (t5), which is not supported",
    ),
    "bart": (
        {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True},
        "is an encoder-decoder (bart)",
    ),
}


@pytest.mark.parametrize("command", ["export", "generate", "verify"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_model_is_reported(tmp_path: Path, command: str, name: str) -> None:
    config, problem = OTHERS[name]
    (model(tmp_path / "x") / "config.json").write_text(json.dumps(config))
    done = llmconv(command, tmp_path / "x", *(("x",) if command == "generate" else ()))
    assert done.exit_code == 3 and problem in done.stderr


def test_an_encoder_decoder_is_reported_without_importing_torch(tmp_path: Path) -> None:
    (model(tmp_path / "x") / "config.json").write_text(json.dumps(OTHERS["t5"][0]))
    code = "import sys; from llmconv.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "export", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "architectures",
    [["LlamaForCausalLM"], ["GPT2LMHeadModel"], ["LlavaForConditionalGeneration"], ["OwnModelOfMine2"], [], None],
)
def test_models_that_may_continue_texts_are_let_pass(architectures: list[str] | None) -> None:
    from llmconv.causal_lm import require_causal  # noqa: PLC0415

    require_causal({"model_type": "x", "architectures": architectures}, "x")
    require_causal({"model_type": "bart", "architectures": ["BartForCausalLM"], "is_encoder_decoder": True}, "x")


def _verl(home: Path) -> Path:
    return shutil.copytree(FIXTURES / "verl" / "one_rank", home / "actor") / "huggingface"


def _beside_dcp(home: Path) -> Path:
    """NeMo RL, slime and others: the distributed checkpoint in a folder next to that of the configuration."""
    source = next(one.parent for one in sorted((FIXTURES / "dcp").rglob(".metadata")))
    shutil.copytree(source, home / "step_5" / "weights")
    config = next((one for one in (source / "config.json", source.parent / "config.json") if one.is_file()), None)
    return files(home / "step_5" / "hf", config__json=config.read_text() if config else CONFIG)


def _deepspeed(home: Path) -> Path:
    files(home / "global_step5", mp_rank_00_model_states__pt=b"")
    return files(home / "hf_config", config__json=CONFIG)


def _whole(home: Path) -> Path:
    return files(model(home / "model") / "tokenizer", config__json=CONFIG)


@pytest.mark.parametrize(
    ("made", "above", "command"),
    [
        (_verl, "actor", "llmconv to-hf {above} -o OUT"),
        (_beside_dcp, "step_5/weights", "llmconv to-hf {above} --config {given}/config.json -o OUT"),
        (_deepspeed, "", "llmconv to-hf {above} -o OUT"),
        (_whole, "model", ""),
    ],
)
def test_a_config_alone_names_the_folder_of_its_weights(
    tmp_path: Path, made: Callable[[Path], Path], above: str, command: str
) -> None:
    given = made(tmp_path)
    found = refused_model(given)
    place = tmp_path / above
    assert f"they are in `{place}`" in found.message
    assert (command.format(above=place, given=given) or "give that folder") in str(found.hint)
    assert refused_model(files(tmp_path / "other" / "inner", config__json=CONFIG)).message.endswith("`config.json`")


@pytest.mark.slow
@pytest.mark.parametrize("made", [_verl, _beside_dcp])
def test_the_command_of_the_hint_converts_it(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    hint = str(refused_model(made(tmp_path)).hint)
    words = hint[hint.index("llmconv ") + 8 : hint.rindex("`")].replace("OUT", str(tmp_path / "out")).split()
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("given", ["run", "run/step100", "run/step100/model_and_optim"])
@pytest.mark.parametrize("arguments", [("inspect",), ("to-hf", "-o", "OUT"), ("generate", "--prompt", "x")])
def test_a_checkpoint_of_olmo_core_is_named_with_its_own_converter(
    arguments: tuple[str, ...], given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "run/step100"
    save(step / "model_and_optim", {"model": llama_state()})
    (step / "config.json").write_text('{"run_name": "x", "model": {"d_model": 64}}')
    file = step / "model_and_optim/.metadata"
    module = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo"
    content = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)
    assert module in content
    file.write_bytes(content.replace(module, b"colmo_core.distributed.checkpoint.filesystem\n_StorageInfo"))
    done = CliRunner().invoke(main, [arguments[0], given, *arguments[1:]])
    assert done.exit_code == 3 and "run/step100` is a checkpoint of OLMo-core" in done.output
    assert "convert_checkpoint_to_hf.py -i " in done.output


@pytest.mark.parametrize("command", ["to-hf", "export", "merge-lora"])
def test_a_folder_of_hqqs_own_is_named(tmp_path: Path, command: str) -> None:
    """`qmodel.pt` is a torch file of codes: hints led from `export` to `to-hf`, which did not know it."""
    module = {"W_q": torch.ones(2, 2, dtype=torch.uint8), "nbits": 4, "shape": torch.Size([4, 2])}
    torch.save({"model.embed_tokens": {"weight": torch.ones(2, 2)}, "model.layers.0": module}, tmp_path / "qmodel.pt")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    adapter = [str(tmp_path)] if command == "merge-lora" else []
    done = llmconv(command, str(tmp_path), *adapter, "-o", str(tmp_path / "out"))
    assert done.exit_code == 3 and "codes of HQQ (`qmodel.pt`)" in done.stderr
