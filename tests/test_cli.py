"""The command line as a whole: it loads no heavy packages, and its options are those of the library."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import llmconv.cli
import llmconv.convert
import llmconv.embedding
import llmconv.export
import llmconv.generation
import llmconv.push
import llmconv.verify
from llmconv.cli.command_group import BUG_EXIT_CODE
from llmconv.cli.other_spellings import HINTS
from llmconv.convert.adapters.merge_options import DEFAULTS as MERGE_DEFAULTS
from llmconv.errors import InputRefused, LlmconvError, UsageProblem
from llmconv.export.export_options import DEFAULTS as EXPORT_DEFAULTS
from llmconv.generation.running_options import RunningOptions
from llmconv.progress import set_quiet
from llmconv.runtime.onnxruntime.session_options import SessionOptions

ROOT = Path(__file__).parents[1]
CHECKPOINT = str(ROOT / "examples/tiny-llama/ep4-ba2400-rank0.pt")

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "huggingface_hub")

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "inspect": llmconv.convert.inspect,
    "to-hf": llmconv.convert.to_hf,
    "from-hf": llmconv.convert.from_hf,
    "merge-lora": llmconv.convert.merge_lora,
    "onnx-adapter": llmconv.convert.onnx_adapter,
    "delta apply": llmconv.convert.apply_delta,
    "delta extract": llmconv.convert.extract_delta,
    "export": llmconv.export.export,
    "verify": llmconv.verify.verify,
    "push": llmconv.push.push,
    "generate": llmconv.generation.generate,
    "embed": llmconv.embedding.embed,
}
"""The function behind each command; the other commands only list a registry."""

PRESENTATION = {"as_json", "stream", "null", "github", "help"}
"""Options for the output of a command, which are not parameters of the function."""


ELSEWHERE = {
    "export": {"verify"},
    "verify": {"graphs", "input_map", "text", "max_divergence", "min_agreement"},
    "generate": {"texts", "images"},
}
"""Options for another function, `verify` or `verify_graphs`; and prompts, which are one argument of `generate`."""


SPELLED: dict[str, str] = {
    "from": "format",  # a word of Python
    "stop": "stop_strings",  # as in transformers
    "no_record": "record",
    "json": "as_json",
    "csv": "csv_file",
    "plot": "plot_file",
    "stage": "number",
}
"""Options to their parameters where the names differ; those that may be repeated are plural in Python."""

PLURALS = {"density": "densities"}


def command(path: str) -> click.Command:
    """One command of llmconv, such as `export`, or one of a group, such as `delta apply`."""
    found: click.Command | None = llmconv.cli.main
    for name in path.split():
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name)
    assert found is not None
    return found


def paths(name: str) -> list[str]:
    """A command, or those of a group."""
    found = command(name)
    return [f"{name} {below}" for below in found.commands] if isinstance(found, click.Group) else [name]


LEAVES = [path for name in llmconv.cli.main.commands for path in paths(name)]
"""Every command that is not a group."""


def options(name: str) -> dict[str, click.Parameter]:
    """The options and arguments that reach the function."""
    parameters = {str(option.name): option for option in command(name).params if option.expose_value}
    return {key: option for key, option in parameters.items() if key not in PRESENTATION | ELSEWHERE.get(name, set())}


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of a function's parameters; for option objects, those of their fields."""
    found = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for hint in typing.get_type_hints(function).values():
        for kind in filter(dataclasses.is_dataclass, typing.get_args(hint)):
            found |= {field.name: field.default for field in dataclasses.fields(kind)}
    if function is llmconv.generation.generate:  # what is left out is as generation_config.json or a file says
        found |= {field.name: None for field in dataclasses.fields(llmconv.generation.GenerationSettings)}
        found |= {**dict.fromkeys(RunningOptions.__annotations__), "backend": "onnx"}
        found |= {field.name: field.default for field in dataclasses.fields(llmconv.generation.Wording)}
    if function is llmconv.embedding.embed:
        found |= dict.fromkeys(SessionOptions.__annotations__)
    if "provider" in found:  # left out, it is the session file's or the CPU
        found["provider"] = found["provider"] if function is llmconv.bench.bench else None
    if function is llmconv.export.export:
        found |= EXPORT_DEFAULTS
    return found | (dict(MERGE_DEFAULTS) if function is llmconv.convert.merge_lora else {})


def loaded_by(*arguments: str) -> set[str]:
    """The packages that `llmconv ARGUMENTS` has imported when it ends."""
    code = f"""
import sys, llmconv.cli
try:
    llmconv.cli.main({list(arguments)!r})
finally:
    print("\\n" + " ".join({{name.partition(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_by("--help") & {*HEAVY, "numpy"}


@pytest.mark.parametrize("name", LEAVES)
def test_the_help_of_a_command_loads_nothing_heavy(name: str) -> None:
    assert not loaded_by(*name.split(), "--help") & set(HEAVY)


def test_a_conversion_does_not_load_torch(tmp_path: Path) -> None:
    loaded = loaded_by("to-hf", CHECKPOINT, "-o", str(tmp_path / "base"))
    assert (tmp_path / "base/model.safetensors").exists()
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}


def test_from_hf_does_not_load_torch(tmp_path: Path) -> None:
    loaded_by("to-hf", CHECKPOINT, "-o", str(tmp_path / "base"))
    loaded = loaded_by("from-hf", str(tmp_path / "base"), "-o", str(tmp_path / "out"), "--to", "meta")
    assert (tmp_path / "out/consolidated.00.pth").exists()
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}


def test_every_file_of_the_command_line_is_a_command() -> None:
    files = {path.stem.replace("_", "-") for path in (ROOT / "llmconv/cli").glob("*.py")}
    shared = {
        "--init--",
        "command-group",
        "file-names",
        "generation-options",
        "options",
        "other-spellings",
        "plans",
        "terminal",
        "text-printer",
        "verdict",
    }
    assert files - shared == set(llmconv.cli.main.commands)


@pytest.mark.parametrize("name", [*llmconv.cli.main.commands, *LEAVES])
def test_a_command_has_the_name_of_its_file_and_a_sentence_of_help(name: str) -> None:
    assert command(name).name == name.split()[-1]
    assert not command(name).get_short_help_str(limit=75).endswith("...")


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_has_help(name: str) -> None:
    bare = [option.name for option in command(name).params if isinstance(option, click.Option) and not option.help]
    assert not bare


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_can_be_quiet_and_answer_in_json(name: str) -> None:
    spellings = {spelling for option in command(name).params for spelling in option.opts}
    assert {"--json", "-q", "--quiet", "-v", "--verbose"} <= spellings


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_option_is_a_parameter_of_the_function(name: str) -> None:
    assert set(options(name)) <= set(parameters(FUNCTIONS[name]))


@pytest.mark.parametrize("name", LEAVES)
def test_an_option_is_spelled_as_its_parameter(name: str) -> None:
    for option in (param for param in command(name).params if isinstance(param, click.Option) and param.expose_value):
        spellings = [text.lstrip("-").replace("-", "_") for text in option.opts]
        plurals = [PLURALS.get(text, f"{text}s") for text in spellings] if option.multiple else []
        assert option.name in {*spellings, *plurals, *(SPELLED.get(text) for text in spellings)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_option_has_the_default_of_the_function(name: str) -> None:
    ours = command(name).make_context(name, [], resilient_parsing=True).params
    theirs = parameters(FUNCTIONS[name])
    chosen = [key for key, option in options(name).items() if not option.required]
    given = {key: None if theirs[key] is inspect.Parameter.empty else theirs[key] for key in chosen}
    assert {key: ours[key] or None for key in chosen} == {key: given[key] or None for key in chosen}


def test_the_registries_are_listed_in_json() -> None:
    for name in ("formats", "families"):
        done = CliRunner().invoke(llmconv.cli.main, [name, "--json"])
        assert done.exit_code == 0
        assert "llama" in json.loads(done.stdout) or "composer" in json.loads(done.stdout)


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


def test_spellings_of_other_commands_are_not_options() -> None:
    for name, option in HINTS:
        assert option not in {spelling for one in command(name).params for spelling in one.opts}


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["--version"])
    assert done.stdout == f"llmconv, version {llmconv.__version__}\n"


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "llmconv", "--version"], capture_output=True, text=True, check=True)
    assert llmconv.__version__ in done.stdout


def test_a_refusal_is_one_line_and_a_hint(tmp_path: Path) -> None:
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", str(tmp_path / "nothing")])
    message, blank, hint = done.stderr.splitlines()
    assert done.exit_code == InputRefused.exit_code == 3
    assert message.startswith("error: ")
    assert not message.endswith(".")
    assert (blank, hint[:6]) == ("", "hint: ")


def test_a_traceback_is_shown_on_demand_only(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    for flags, shown in ([], False), (["-v"], True), (["-qv"], True):
        done = CliRunner().invoke(llmconv.cli.main, ["inspect", missing, *flags])
        assert ("Traceback" in done.stderr) == shown


def test_quiet_hides_messages(tmp_path: Path) -> None:
    set_quiet(False)
    done = CliRunner().invoke(llmconv.cli.main, ["to-hf", CHECKPOINT, "-o", str(tmp_path / "base"), "-q"])
    set_quiet(False)
    assert done.exit_code == 0
    assert done.stderr == ""


def test_the_exit_codes_are_those_of_the_contract() -> None:
    codes = {kind.__name__: kind.exit_code for kind in every_kind(LlmconvError)}
    assert codes == {
        "UsageProblem": 2,
        "InputRefused": 3,
        "MalformedInput": 3,
        "UnsupportedInput": 3,
        "OutputFailed": 4,
        "OutOfMemory": 4,
        "StageFailed": 4,
        "Inconclusive": 5,
    }


def every_kind(kind: type[LlmconvError]) -> list[type[LlmconvError]]:
    """All subclasses of `kind`."""
    return [found for child in kind.__subclasses__() for found in (child, *every_kind(child))]


UNFORESEEN = [
    (RuntimeError("a defect"), 70),
    (AssertionError(), 70),
    (RecursionError("maximum recursion depth exceeded"), 70),
    (MemoryError(), 4),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), 4),
    (OSError(28, "No space left on device"), 4),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("raised", "code"), UNFORESEEN)
def test_an_unexpected_error_is_neither_a_traceback_nor_a_difference(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr(sys.modules["llmconv.convert.inspect"], "inspect", fail)
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", "anything"])
    assert done.exit_code == code
    assert done.stderr.startswith("error: ") and "\n\nhint: " in done.stderr and "Traceback" not in done.stderr


def test_a_bug_has_its_own_exit_code_and_one_line_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise KeyError("half\nof \x1b[2J it")

    monkeypatch.setattr(sys.modules["llmconv.convert.inspect"], "inspect", fail)
    done = CliRunner().invoke(llmconv.cli.main, ["inspect", "anything"], prog_name="llmconv")
    line, blank, hint = done.stderr.splitlines()
    assert done.exit_code == BUG_EXIT_CODE == 70
    assert line.startswith(f"error: llmconv {llmconv.__version__} has a bug: llmconv inspect: KeyError: ")
    assert line.isprintable() and "test_cli.py:" in line and not blank
    assert hint.startswith("hint: report this line and the command that you ran; `-v` ")
    shown = CliRunner().invoke(llmconv.cli.main, ["inspect", "anything", "-v"])
    assert shown.exit_code == 70 and "Traceback" in shown.stderr


EMPTY = (
    "inspect ?",
    "to-hf ? -o out",
    "to-hf x -o ?",
    "to-hf x -o out --base ?",
    "to-hf x -o out --config ?",
    "from-hf x -o ? --to meta",
    "merge-lora ? a -o out",
    "merge-lora b ? -o out",
    "delta apply b ? -o out",
    "delta extract b t -o ?",
    "export ?",
    "export m -o ?",
    "verify ?",
    "verify m --reference ?",
    "verify m --report ?",
    "verify --graph ?",
    "generate ? --prompt x",
    "generate m --output-file ?",
    "chat ?",
    "serve ?",
    "bench ?",
    "bench m --csv ?",
)


@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_path_is_a_usage_error(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["" if word == "?" else word for word in line.split()]
    done = CliRunner().invoke(llmconv.cli.main, words, prog_name="llmconv")
    assert done.exit_code == 2
    assert "is empty, which is not the name of a file or folder\n\nhint: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call",
    [
        lambda: llmconv.convert.inspect(""),
        lambda: llmconv.convert.to_hf(CHECKPOINT, ""),
        lambda: llmconv.convert.to_hf("", "out"),
        lambda: llmconv.convert.from_hf("m", "", to="meta"),
        lambda: llmconv.convert.merge_lora("m", "a", ""),
        lambda: llmconv.convert.apply_delta("m", "d", ""),
        lambda: llmconv.convert.extract_delta("m", "t", ""),
        lambda: llmconv.export.export(""),
        lambda: llmconv.verify.verify(""),
        lambda: llmconv.generation.generate("", ["x"]),
    ],
)
def test_an_empty_path_is_a_usage_problem_in_python(
    call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageProblem, match="is empty, which is not the name of a file or folder"):
        call()
    assert not list(tmp_path.iterdir())


def test_an_unknown_opset_is_a_usage_problem_in_python(tmp_path: Path) -> None:
    llmconv.convert.to_hf(CHECKPOINT, tmp_path / "base")
    with pytest.raises(UsageProblem, match="`opset` is 22"):
        llmconv.export.export(tmp_path / "base", opset=22)


def test_resume_of_an_output_that_has_graphs_names_what_wrote_them(tmp_path: Path) -> None:
    command = ["to-hf", CHECKPOINT, "-o", str(tmp_path / "base")]
    assert CliRunner().invoke(llmconv.cli.main, command).exit_code == 0
    llmconv.export.export(tmp_path / "base")
    again = CliRunner().invoke(llmconv.cli.main, [*command, "--resume"])
    assert again.exit_code == 3 and "is complete, but `export` has changed it since" in again.stderr


def test_resume_of_a_complete_output_says_so_and_exits_0(tmp_path: Path) -> None:
    command = ["to-hf", CHECKPOINT, "-o", str(tmp_path / "base")]
    assert CliRunner().invoke(llmconv.cli.main, command).exit_code == 0
    again = CliRunner().invoke(llmconv.cli.main, [*command, "--resume"])
    assert again.exit_code == 0 and "base` is complete: nothing to resume" in again.stderr
    assert again.stdout.startswith(f"found {tmp_path / 'base'}: llama")
    result = json.loads(CliRunner().invoke(llmconv.cli.main, [*command, "--resume", "--json"]).stdout)
    assert result["written"] is False
    other = CliRunner().invoke(llmconv.cli.main, [*command, "--resume", "--dtype", "float16"])
    assert other.exit_code == 3 and "with other options" in other.stderr


@pytest.mark.parametrize("line", [["help", "delta", "extract"], ["help", "to-hf"], ["help"]])
def test_help_is_a_command_too(line: list[str]) -> None:
    done, other = (CliRunner().invoke(llmconv.cli.main, words) for words in (line, [*line[1:], "--help"]))
    assert done.exit_code == 0 and done.output == other.output


def test_the_version_has_a_short_option() -> None:
    short, long = (CliRunner().invoke(llmconv.cli.main, [option]).output for option in ("-V", "--version"))
    assert short == long != ""
