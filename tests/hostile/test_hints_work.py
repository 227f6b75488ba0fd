"""Who does what a hint says gets a result: the second command is made of the words of the hint itself.

A row is a command that is refused, and how a user reads the hint: as a command to type, an option to add, to change or
to leave out, a value to choose, or a path to give. Placeholders in capitals are what a user would put there.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from llmconv.checkpoint import open_checkpoint
from llmconv.cli import main
from tests.builders.embedding_models import save_modules
from tests.cli.commands import ROOT
from tests.cli.hint_words import hint_problem, is_open, path_of, spellings

EXAMPLE = ROOT / "examples/tiny-llama"
ZERO = ROOT / "tests/fixtures/deepspeed/z2_bf16_groups/global_step3"


def run(words: list[str]) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(main, words, prog_name="llmconv")


def succeed(words: list[str]) -> str:
    """What a command prints, which has to end well."""
    done = run(words)
    assert done.exit_code == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


class Refusal(NamedTuple):
    """A command that was refused, with its message and its hint."""

    words: list[str]
    message: str
    hint: str

    def quotes(self, beginning: str) -> list[str]:
        """What the hint has between backticks that begins so."""
        return [text for text in re.findall(r"`([^`]+)`", self.hint) if text.startswith(beginning)]


Follow = Callable[[Refusal], list[list[str]]]
"""The commands that a user types after a refusal."""


def type_it(at: int = 0, *, again: bool = False, **given: str) -> Follow:
    """The command number `at` of the hint with what is `given` for its placeholders; `again`: then the first, too.

    What the command writes takes the place of the source in the first.
    """

    def follow(refusal: Refusal) -> list[list[str]]:
        words = type_all(**given)(refusal)[at]
        return [words, [refusal.words[0], given["OUT"], *refusal.words[2:]]] if again else [words]

    return follow


def type_all(**given: str) -> Follow:
    """All commands of the hint, one after another; `FILE` also stands for `FILE.gguf`."""
    return lambda refusal: [
        [given.get(word.partition(".")[0], word) for word in shlex.split(text)[1:]]
        for text in refusal.quotes("llmconv ")
    ]


def with_option(at: int = 0, value: str = "") -> Follow:
    """The first command with the option number `at` of the hint; `value` for a placeholder."""

    def follow(refusal: Refusal) -> list[list[str]]:
        option, *given = shlex.split(refusal.quotes("-")[at])
        given = [value] if value and (not given or is_open(given[0])) else given
        return [[*without(refusal.words, option), option, *given]]

    return follow


def without(words: list[str], option: str) -> list[str]:
    """Words without an option and its value."""
    known, kept, skip = spellings(path_of(words)), list[str](), False
    for word in words:
        if skip or known.get(word) is known.get(option) is not None:
            skip = not skip and not known[word].is_flag
        else:
            kept.append(word)
    return kept


def leave_out(refusal: Refusal) -> list[list[str]]:
    """The first command without the option that the hint, or else the message, names first."""
    assert "leave" in refusal.hint or "give one of them" in refusal.hint or "give only one" in refusal.hint
    named = refusal.quotes("--") or re.findall(r"`(--[^`]+)`", refusal.message)
    return [without(refusal.words, named[0].split()[0])]


def choose(option: str, value: str) -> Follow:
    """The first command with a value that the hint lists for an option."""

    def follow(refusal: Refusal) -> list[list[str]]:
        assert re.search(rf"[ `]{re.escape(value)}(?:[,`]|$)", refusal.hint), refusal.hint
        return [[*without(refusal.words, option), option, value]]

    return follow


def give_path(refusal: Refusal) -> list[list[str]]:
    """The first command with the path that the hint names in place of the source."""
    (path,) = [text for text in re.findall(r"`([^`]+)`", refusal.hint) if Path(text).exists()][:1]
    return [[refusal.words[0], path, *refusal.words[2:]]]


def other_output(refusal: Refusal) -> list[list[str]]:
    """The first command with another output."""
    assert "choose another `-o`" in refusal.hint
    return [[*without(refusal.words, "-o"), "-o", "other"]]


Check = Callable[[Mapping[str, Path], str], bool]


def model(name: str, place: str = "out") -> Check:
    """The output has every bit of one of the models of `made`."""

    def same(made: Mapping[str, Path], printed: str) -> bool:
        tensors = [
            {key: one.read() for key, one in open_checkpoint(path).items()} for path in (Path(place), made[name])
        ]
        return {*tensors[0]} == {*tensors[1]} and all((tensors[0][key] == tensors[1][key]).all() for key in tensors[0])

    return same


def is_there(path: str) -> Check:
    """The output has a file."""
    return lambda made, printed: Path(path).is_file()


def says(text: str) -> Check:
    """The command prints a text."""
    return lambda made, printed: text in printed


class Row(NamedTuple):
    """A refused `command`, how its hint is followed, what is right then, and what is made before.

    `before` is a command, a function, or the name of a folder of `made`, of which a copy is `model`.
    """

    command: str
    follow: Follow
    check: Check
    before: str | Callable[[Mapping[str, Path]], object] = ""


def two_files(made: Mapping[str, Path]) -> None:
    """A folder with two checkpoints."""
    for name in ("ep1.pt", "ep2.pt"):
        Path("run").mkdir(exist_ok=True)
        shutil.copyfile(made["ckpt"], Path("run") / name)


def my_drive(made: Mapping[str, Path]) -> None:
    """An adapter, a base and a checkpoint in a folder with a space in its name."""
    for name in ("adapter", "base"):
        shutil.copytree(made[name], Path("My Drive") / name)
    shutil.copyfile(made["ckpt"], "My Drive/ckpt.pt")


def padded(made: Mapping[str, Path]) -> None:
    """A model whose embedding has more rows than its vocabulary, as trainers pad it, and the configuration for it."""
    shutil.copytree(made["base"], "padded")
    tensors = load_file("padded/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = -len(tensors[name]) % 64 or 64
            tensors[name] = np.concatenate([tensors[name], np.zeros((rows, tensors[name].shape[1]), np.float32)])
    save_file(tensors, "padded/model.safetensors", {"format": "pt"})
    Path("FILE").write_text(json.dumps({"vocab_size": len(tensors["model.embed_tokens.weight"])}))


def doubles(made: Mapping[str, Path]) -> None:
    """The model in float64, which no graph and no file of llama.cpp has."""
    no_tokenizer(made)
    tensors = {name: one.astype(np.float64) for name, one in load_file("model/model.safetensors").items()}
    save_file(tensors, "model/model.safetensors", {"format": "pt"})


def links(made: Mapping[str, Path]) -> None:
    """The model with its weights as a link."""
    shutil.copytree(made["base"], "model")
    Path("model/model.safetensors").unlink()
    Path("model/model.safetensors").symlink_to(made["base"] / "model.safetensors")


def other_positions(made: Mapping[str, Path]) -> None:
    """An adapter next to a configuration with other rotary positions than the base."""
    shutil.copytree(made["adapter"], "adapter")
    config = json.loads((made["base"] / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    Path("adapter/config.json").write_text(json.dumps(config))


def no_tokenizer(made: Mapping[str, Path]) -> None:
    """The model without a tokenizer."""
    shutil.copytree(made["base"], "model", ignore=shutil.ignore_patterns("tokenizer*", "special*"))


def existing_gguf(made: Mapping[str, Path]) -> None:
    """The model without a tokenizer, and a file of the name."""
    no_tokenizer(made)
    Path("out.gguf").touch()


def without_tokenizer(refusal: Refusal) -> list[list[str]]:
    """The first command, after the tokenizer's files were removed."""
    assert "remove the tokenizer's files" in refusal.hint
    for file in Path("model").glob("*token*"):
        file.unlink()
    return [refusal.words]


TEXT = "once there was a fox"
ASK = "--prompt fox --max-new-tokens 3 --temperature 0 --no-export"
ROWS = {
    # to-hf
    "an output of llmconv": Row("to-hf {ckpt} -o out", with_option(1), model("base"), "to-hf {ckpt} -o out"),
    "resumed with other options": Row(
        "to-hf {ckpt} -o out --resume --dtype float16", with_option(1), model("half"), "to-hf {ckpt} -o out"
    ),
    "a folder of someone else": Row(
        "to-hf {ckpt} -o out", other_output, model("base", "other"), lambda made: Path("out").mkdir()
    ),
    "an adapter for a model": Row("to-hf {adapter} -o out", type_it(BASE="{base}", OUT="out"), model("merged")),
    "the file of an adapter": Row(
        "to-hf {adapter}/adapter_model.safetensors -o out", type_it(BASE="{base}", OUT="out"), model("merged")
    ),
    "a file of a model folder": Row("to-hf {base}/model.safetensors -o out --dtype float16", give_path, model("half")),
    "a model folder already": Row("to-hf {base} -o out", with_option(0, "float16"), model("half")),
    "a model folder already, shards": Row("to-hf {base} -o out", with_option(1, "100KB"), model("base")),
    "not of that format": Row("to-hf {ckpt} -o out --from meta", leave_out, model("base")),
    "no such format": Row("to-hf {ckpt} -o out --from compozer", choose("--from", "composer"), model("base")),
    "no size": Row(
        "to-hf {ckpt} -o out --max-shard-size apples",
        lambda refusal: [[*without(refusal.words, "--max-shard-size"), "--max-shard-size", refusal.quotes("5")[0]]],
        model("base"),
    ),
    "a delta for a model": Row("to-hf {delta} -o out", type_it(BASE="{base}", OUT="out"), model("merged")),
    "two checkpoints": Row("to-hf run -o out", give_path, model("base"), two_files),
    "no configuration": Row(
        "to-hf model.safetensors -o out",
        with_option(0, "{base}"),
        model("base"),
        lambda made: shutil.copyfile(made["base"] / "model.safetensors", "model.safetensors"),
    ),
    "padded rows": Row(
        "to-hf padded -o out --dtype float32",
        lambda refusal: [
            [
                {"FOLDER": "padded", "OUT": "out"}.get(word, word)
                for word in shlex.split(refusal.quotes("llmconv")[0])[1:]
            ]
        ],
        is_there("out/model.safetensors"),
        padded,
    ),
    "not quantized": Row("to-hf {ckpt} -o out --quant dequantize", leave_out, model("base")),
    "no adapter in it": Row("to-hf {ckpt} -o out --adapter split", leave_out, model("base")),
    "codes have no other type": Row(
        "to-hf {codes} -o out --dtype bfloat16",
        with_option(0),
        is_there("out/model.safetensors"),
    ),
    "an option of another program": Row(
        "to-hf {ckpt} -o out --output_precision fp16",
        lambda refusal: (
            [["to-hf", refusal.words[1], "-o", "out", "--dtype", "float16"]] if "`float16`" in refusal.hint else []
        ),
        model("half"),
    ),
    "one file of DeepSpeed": Row(
        f"to-hf {ZERO}/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt -o out",
        lambda refusal: [["inspect", give_path(refusal)[0][1]]],
        says("deepspeed"),
    ),
    "a name with a slip": Row(
        "inspect mode",
        lambda refusal: [["inspect", refusal.hint.split("`")[1]]],
        says("llama"),
        "base",
    ),
    # merge-lora
    "swapped arguments": Row("merge-lora {adapter} {base} -o out", type_it(OUT="out"), model("merged")),
    "swapped, in My Drive": Row(
        "merge-lora 'My Drive/adapter' 'My Drive/base' -o out", type_it(OUT="out"), model("merged"), my_drive
    ),
    "a checkpoint for a base": Row(
        "merge-lora {ckpt} {adapter} -o out", type_all(HF_BASE="new", OUT="out"), model("merged")
    ),
    "a checkpoint for a base, in My Drive": Row(
        "merge-lora 'My Drive/ckpt.pt' 'My Drive/adapter' -o out",
        type_all(HF_BASE="new", OUT="out"),
        model("merged"),
        my_drive,
    ),
    "a checkpoint for an adapter": Row("merge-lora {base} {ckpt} -o out", type_it(OUT="out"), model("base")),
    "a delta for an adapter": Row(
        "merge-lora {base} {delta} -o out", type_it(BASE="{base}", OUT="out"), model("merged")
    ),
    "two weights": Row(
        "merge-lora {base} {adapter} -o out --weight 1 --weight 2", with_option(0, "1"), model("merged")
    ),
    "no density": Row("merge-lora {base} {adapter} -o out --combine ties", with_option(), is_there("out/config.json")),
    "a density of linear": Row(
        "merge-lora {base} {adapter} -o out --density 0.5",
        choose("--combine", "ties"),
        is_there("out/model.safetensors"),
    ),
    "a seed of linear": Row(
        "merge-lora {base} {adapter} -o out --seed 3 --density 0.5 --combine ties",
        choose("--combine", "dare_linear"),
        is_there("out/model.safetensors"),
    ),
    "a checked dry run": Row("merge-lora {base} {adapter} -o out --check --dry-run", leave_out, model("merged")),
    "a merge that exists": Row(
        "merge-lora {base} {adapter} -o out", with_option(1), model("merged"), "merge-lora {base} {adapter} -o out"
    ),
    "a quantized base": Row("merge-lora {codes} {adapter} -o out", with_option(), is_there("out/model.safetensors")),
    "other positions": Row(
        "merge-lora {base} adapter -o out",
        lambda refusal: [
            [{"BASE": "new"}.get(word, word) for word in shlex.split(refusal.quotes("llmconv")[0])[1:]],
            ["merge-lora", "new", "adapter", "-o", "out"],
        ],
        is_there("out/config.json"),
        other_positions,
    ),
    # delta, also as an adapter
    "a model for a delta": Row(
        "delta apply {base} {merged} -o out",
        lambda refusal: [
            *type_it(BASE="{base}", TUNED="{merged}", DELTA="new")(refusal),
            ["delta", "apply", "{base}", "new", "-o", "out"],
        ],
        model("merged"),
    ),
    "a delta that a script does not write": Row(
        "delta extract {base} {merged} -o out --to fastchat",
        lambda refusal: [without(refusal.words, refusal.quotes("--")[0])] if "without" in refusal.hint else [],
        is_there("out/delta.json"),
    ),
    "an adapter in a format": Row(
        "delta extract {base} {merged} -o out --to fastchat --rank 16",
        lambda refusal: [without(refusal.words, "--to")],
        is_there("out/adapter_config.json"),
    ),
    "a delta that exists": Row(
        "delta extract {base} {merged} -o out",
        with_option(1),
        is_there("out/delta.json"),
        "delta extract {base} {merged} -o out",
    ),
    "the shards of a delta": Row(
        "delta extract {base} {merged} -o out --shards 2",
        lambda refusal: [without(refusal.words, "--shards")],
        is_there("out/delta.json"),
    ),
    # from-hf and to-gguf
    "no such training format": Row(
        "from-hf {base} -o out --to lama", choose("--to", "meta"), is_there("out/params.json")
    ),
    "three shards": Row(
        "from-hf {base} -o out --to meta --shards 3", choose("--shards", "4"), is_there("out/params.json")
    ),
    "codes for Meta": Row(
        "from-hf {codes} -o out --to meta",
        lambda refusal: [
            *type_it(MODEL="{codes}", OUT="new")(refusal),
            ["from-hf", "new", "-o", "out", "--to", "meta"],
        ],
        is_there("out/params.json"),
    ),
    "a checkpoint for Meta": Row(
        "from-hf {ckpt} -o out --to meta", type_it(again=True, OUT="new"), is_there("out/params.json")
    ),
    "no name of a GGUF file": Row("to-gguf model -o out", with_option(), is_there("out.gguf"), no_tokenizer),
    "a GGUF file that exists": Row("to-gguf model -o out.gguf", with_option(), is_there("out.gguf"), existing_gguf),
    "a tokenizer that GGUF cannot state": Row(
        "to-gguf model -o out.gguf",
        without_tokenizer,
        is_there("out.gguf"),
        "base",
    ),
    "float64 for llama.cpp": Row(
        "to-gguf model -o out.gguf", type_it(MODEL="model", FILE="out.gguf"), is_there("out.gguf"), doubles
    ),
    # quantize
    "groups that do not fit": Row(
        "quantize {base} -o out --scheme w4a16", with_option(1, "32"), is_there("out/model.safetensors")
    ),
    "no such groups": Row(
        "quantize {base} -o out --scheme w4a16 --quant-block 48",
        choose("--quant-block", "32"),
        is_there("out/model.safetensors"),
    ),
    "a method without a text": Row(
        "quantize {base} -o out --scheme w4a16 --quant-block 32 --method gptq",
        with_option(1),
        is_there("out/model.safetensors"),
    ),
    "zero points of GPTQ": Row(
        "quantize {base} -o out --scheme w4a16-asym --quant-block 32 --base-format gptq",
        with_option(),
        is_there("out/model.safetensors"),
    ),
    "a text that nothing uses": Row(
        "quantize {base} -o out --scheme w4a16 --quant-block 32 --method rtn --calibrate default",
        lambda refusal: [without(refusal.words, "--calibrate")],
        is_there("out/model.safetensors"),
    ),
    "an adapter to quantize": Row(
        "quantize {adapter} -o out --scheme w8a8",
        type_it(again=True, BASE="{base}", OUT="new"),
        is_there("out/model.safetensors"),
    ),
    # export and verify
    "a file instead of its folder": Row(
        "export {base}/model.safetensors -o out", give_path, is_there("out/decode.onnx")
    ),
    "graphs that exist": Row("export model", with_option(), is_there("model/decode.onnx"), "graphs"),
    "codes need a folder": Row("export model --quant int8", with_option(0, "out"), is_there("out/decode.onnx"), "base"),
    "codes without codes": Row("export {base} -o out --quant-block 32", with_option(), is_there("out/decode.onnx")),
    "static without a length": Row(
        "export {base} -o out --shapes static", with_option(0, "32"), is_there("out/decode.onnx")
    ),
    "weights that are a link": Row("export model", with_option(0, "out"), is_there("out/decode.onnx"), links),
    "float64 for graphs": Row("export model", type_it(MODEL="model", OUT="out"), is_there("out/decode.onnx"), doubles),
    "graphs of a checkpoint": Row("export {ckpt} -o out", type_it(again=True, OUT="new"), is_there("out/decode.onnx")),
    "graphs of an adapter": Row(
        "export {adapter} -o out", type_it(again=True, BASE="{base}", OUT="new"), is_there("out/decode.onnx")
    ),
    "only graphs, in place": Row(
        "export model --graphs-only", with_option(0, "out"), is_there("out/decode.onnx"), "base"
    ),
    "no graphs to verify": Row(
        "verify model",
        lambda refusal: [*type_it()(refusal), ["verify", "model"]],
        says("PASS"),
        "base",
    ),
    "a graph for a folder": Row(
        "verify {graphs}/prefill.onnx",
        lambda refusal: [["verify", *shlex.split(refusal.quotes("--graph")[0].replace("HF_FOLDER", "{graphs}"))]],
        says("PASS"),
    ),
    # generate, chat, serve, embed
    "no prompt": Row("generate {base} --backend torch --max-new-tokens 2", with_option(0, TEXT), says("")),
    "two lengths": Row(
        "generate {base} --backend torch --prompt fox --max-length 90 --max-new-tokens 3",
        lambda refusal: [without(refusal.words, refusal.quotes("--")[0])],
        says(""),
    ),
    "a prompt beyond the length": Row(
        "generate {base} --backend torch --prompt 'once there was a fox' --max-length 2", with_option(0, "64"), says("")
    ),
    "two equal sequences": Row(
        "generate {base} --backend torch --prompt fox --max-new-tokens 2 --num-return-sequences 2",
        with_option(),
        says("\n"),
    ),
    "more sequences than beams": Row(
        "generate {base} --backend torch --prompt fox --max-new-tokens 2 --num-beams 2 --num-return-sequences 3",
        with_option(),
        says("\n"),
    ),
    "nothing to overwrite": Row(
        "generate {base} --backend torch --prompt fox --max-new-tokens 2 --overwrite", leave_out, says("")
    ),
    "a text that exists": Row(
        "generate {base} --backend torch --prompt fox --max-new-tokens 2 --output-file a.jsonl",
        with_option(),
        is_there("a.jsonl"),
        lambda made: Path("a.jsonl").write_text("{}"),
    ),
    "no tokenizer": Row(
        "generate model --backend torch --prompt fox --max-new-tokens 2",
        with_option(0, "{base}"),
        says(""),
        no_tokenizer,
    ),
    "an adapter and graphs without inputs": Row(
        "generate {graphs} --prompt fox --max-new-tokens 2 --adapter {adapter}",
        with_option(),
        says(""),
    ),
    "an adapter and graphs without inputs, exported again": Row(
        "generate model --prompt fox --max-new-tokens 2 --adapter {adapter}",
        lambda refusal: [*type_it(MODEL="model")(refusal), refusal.words],
        says(""),
        "graphs",
    ),
    "no graphs for an adapter": Row(
        "generate model --prompt fox --max-new-tokens 2 --adapter {adapter}",
        lambda refusal: [*type_it()(refusal), refusal.words],
        says(""),
        lambda made: shutil.copytree(made["base"], "model"),
    ),
    "a graph for a prompt": Row(
        "generate {graphs}/prefill.onnx {graphs}/decode.onnx",
        lambda refusal: [[*refusal.words[:2], *shlex.split(refusal.quotes("--decode")[0]), "--prompt", "fox"]],
        says(""),
    ),
    "a chat without a template": Row(
        "chat {base} --backend torch --max-new-tokens 2 --tokenizer {base}",
        lambda refusal: [[*refusal.words, refusal.quotes("--template")[0], "alpaca"]],
        says(""),
    ),
    "no graph of embeddings": Row(
        "embed model fox", lambda refusal: [*type_it()(refusal), refusal.words], says(""), "pooled"
    ),
    "no text to embed": Row(
        "embed model",
        lambda refusal: (
            [["export", "model", "--task", "embed"], [*refusal.words, "fox"]]
            if "after the folder" in refusal.hint
            else []
        ),
        says(""),
        "pooled",
    ),
    # adapters for graphs, and the Hub
    "no inputs for an adapter": Row(
        "onnx-adapter model {adapter} -o out.onnx_adapter",
        lambda refusal: [*type_it()(refusal), refusal.words],
        is_there("out.onnx_adapter"),
        "graphs",
    ),
    "no name of an adapter": Row(
        "onnx-adapter {graphs} {adapter} -o sub/x.bin",
        lambda refusal: [["inspect", "{adapter}"]] if refusal.quotes("-o ") == ["-o sub/x.onnx_adapter"] else [],
        says(""),
    ),
    "not made by llmconv": Row(
        "push model me/model",
        type_it(OUT="out"),
        model("base"),
        lambda made: shutil.copytree(made["base"], "model", ignore=shutil.ignore_patterns("llmconv.json")),
    ),
    "a file of a store": Row(
        "to-gguf model -o file:///{tmp}/out.gguf",
        lambda refusal: [[*refusal.words[:3], re.findall(r"`(/[^`]+)`", refusal.hint)[0]]],
        is_there("out.gguf"),
        no_tokenizer,
    ),
}
SLOW = (
    "{graphs}",
    "export ",
    "verify ",
    "embed ",
    "chat ",
    "padded",
    "gptq",
    "onnx-adapter ",
    "--adapter",
)
"""What is in the commands of rows that trace a model, or measure one on a text."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, the model in it and what other commands make of it; do not write into them."""
    home = tmp_path_factory.mktemp("made")
    found = {name: home / name for name in ("base", "half", "merged", "delta", "codes", "adapter", "graphs", "pooled")}
    found["ckpt"] = EXAMPLE / "ep4-ba2400-rank0.pt"
    shutil.copytree(EXAMPLE / "adapter", found["adapter"])
    for line in (
        "to-hf {ckpt} -o {base}",
        "to-hf {ckpt} -o {half} --dtype float16",
        "merge-lora {base} {adapter} -o {merged}",
        "delta extract {base} {merged} -o {delta}",
        "quantize {base} -o {codes} --scheme w8a8",
    ):
        succeed(line.format(**found).split())
    save_modules(shutil.copytree(found["base"], found["pooled"]))
    return found


@pytest.fixture
def graphs(made: dict[str, Path], request: pytest.FixtureRequest) -> dict[str, Path]:
    """`made`, with graphs where a row names them."""
    row = ROWS[request.getfixturevalue("name")]
    uses = "{graphs}" in row.command or row.before == "graphs"
    if uses and not made["graphs"].exists():
        succeed(f"export {made['base']} -o {made['graphs']}".split())
    return made


def filled(words: list[str], made: Mapping[str, Path]) -> list[str]:
    """Words with the paths of `made`."""
    return [re.sub(r"\{(\w+)\}", lambda found: str(made.get(found[1], found[0])), word) for word in words]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if any(word in ROWS[name].command for word in SLOW) else [])
        for name in ROWS
    ],
)
def test_a_hint_that_is_followed_leads_to_a_result(
    name: str, graphs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, made = ROWS[name], {**graphs, "tmp": tmp_path}
    monkeypatch.chdir(tmp_path)
    if callable(row.before):
        row.before(made)
    elif row.before in made:
        shutil.copytree(made[row.before], "model")
    elif row.before:
        succeed(filled(shlex.split(row.before), made))
    words = filled(shlex.split(row.command), made)
    refused = run(words)
    assert refused.exit_code in (2, 3), refused.stderr
    message, _, hint = refused.stderr.partition("error: ")[2].partition("\n\nhint: ")
    assert hint_problem(path_of(words), hint.strip()) == ""
    steps = row.follow(Refusal(words, message, hint.strip()))
    assert steps, hint
    for step in steps:
        printed = succeed(filled(step, made))
    assert row.check(made, printed)


def test_there_are_rows_of_all_commands() -> None:
    first = {path_of(row.command.split()) for row in ROWS.values()}
    assert len(ROWS) >= 60 and len(first) >= 13
