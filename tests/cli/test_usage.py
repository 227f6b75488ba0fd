"""Wrong arguments give one line, and a hint at what to give."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import llmconv
import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify
from llmconv.cli.other_spellings import HINTS
from llmconv.errors import UsageProblem
from tests.cli.commands import CHECKPOINT, LEAVES, command


def test_an_unknown_command_is_a_usage_error() -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["convert"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: no such command `convert`\n\nhint: see `")


USAGE = {
    "--nope": "no such option `--nope`",
    "inspect": "missing argument `PATH`",
    "inspect a --jsn": "no such option `--jsn`",
    "delta": "",
    "delta aply": "no such command `aply`",
    "delta apply a": "missing argument `DELTA`",
    "to-hf a": "missing option `-o`",
    "to-hf a -o": "option `-o` requires an argument",
    "export a --graph-name": "option `--graph-name` requires an argument",
    "delta apply a b -o": "option `-o` requires an argument",
    "export a --prefill=3": "option `--prefill` does not take a value",
    "to-hf a -o b --dtype int8": "invalid value for `--dtype`: `int8` is not one of `keep`",
}


@pytest.mark.parametrize("line", USAGE)
def test_wrong_arguments_give_one_line_and_a_hint_to_the_help(line: str) -> None:
    done = CliRunner().invoke(llmconv.cli.main, line.split(), prog_name="llmconv")
    assert done.exit_code == 2 and not done.stdout
    if not USAGE[line]:  # no arguments at all: the help itself
        assert done.stderr.startswith("Usage: llmconv delta")
        return
    message, blank, hint = done.stderr.splitlines()
    assert message.startswith(f"error: {USAGE[line]}") and not message.endswith(".") and not blank
    path = " ".join(["llmconv", *(word for word in line.split()[:2] if word in {*LEAVES, "delta", "apply"})])
    assert hint == f"hint: see `{path} --help`"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("embed MODEL --prompt abc", "`llmconv embed FOLDER TEXT…`"),
        ("embed MODEL abc -o x.npy", "`--output-file FILE`"),
        ("generate MODEL --text abc", "`--prompt TEXT`"),
    ],
)
def test_an_option_of_another_command_is_answered_with_the_one_to_give(line: str, hint: str) -> None:
    done = CliRunner().invoke(llmconv.cli.main, line.split())
    assert done.exit_code == 2 and f"error: no such option `{line.split()[-2]}`\n" in done.stderr
    assert hint in done.stderr and done.stderr.endswith(f"; see `main {line.split()[0]} --help`\n")


SEEDS = {
    "to-hf --composer_path a.pt --hf_output_path b": "the checkpoint is an argument: `llmconv to-hf SOURCE -o OUT`",
    "to-hf a.pt -o b --output_precision bf16": "`--dtype float32`",
    "generate m --top_p 0.9 x": "`--top-p`",
    "generate m --src_length 8 x": "`--src-length`",
    "generate m --prefix_path p x": "`--prefix-tuning PATH`",
    "generate m --run_mode predict": "`llmconv run FILE`",
    "generate --config x.yaml": "`llmconv run FILE`",
    "generate m --max_seq_len 100 x": "`--max-length N`",
    "generate m --quant_type weight_only_int8": "`llmconv export MODEL --quant int8`",
    "export m --quant_type weight_only_int8": "`llmconv export MODEL --quant int8`",
    "export m --quant weight_only_int8": "here it is `int8`",
    "export m --export_batch_size 1": "graphs take any batch",
    "export m --max_seq_len 32000": "`--max-seq-len`",
    "merge-lora --model_name_or_path a": "BASE is an argument",
}


@pytest.mark.parametrize("line", SEEDS)
def test_a_name_of_another_program_is_answered_with_ours(line: str) -> None:
    done = CliRunner().invoke(llmconv.cli.main, line.split())
    assert done.exit_code == 2 and SEEDS[line] in done.stderr.partition("hint: ")[2]


def test_spellings_of_other_commands_are_not_options() -> None:
    for name, option in HINTS:
        assert option not in {spelling for one in command(name).params for spelling in one.opts}


def test_an_unknown_opset_is_a_usage_problem_in_python(tmp_path: Path) -> None:
    llmconv.convert.to_hf(CHECKPOINT, tmp_path / "base")
    with pytest.raises(UsageProblem, match="`opset` is 22"):
        llmconv.export.export(tmp_path / "base", opset=22)
