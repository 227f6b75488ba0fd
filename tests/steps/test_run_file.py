"""What a run file may contain, and what is said about one that is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from llmconv.bench.bench import RUNTIMES as KNOWN_RUNTIMES
from llmconv.cli import main
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem
from llmconv.steps.run_file import RunFile, read_run_file
from llmconv.steps.step import RUNTIMES

GROUP: click.Group = main


def read(tmp_path: Path, text: str, changes: Mapping[str, str] | None = None) -> RunFile:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return read_run_file(path, changes or {}, GROUP)


def lines(file: RunFile) -> list[str]:
    return [step.line for step in file.steps]


def test_options_become_the_command_line(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        """
        steps:
          - merge-lora: {base: base, adapters: [one, two], weight: [0.5, 1], output: merged, max_shard_size: 1GB}
          - export: {model: merged, prefill: true, unified: false, layout: genai, opset: 24}
          - delta extract: {base: base, tuned: merged, output: delta}
        """,
    )
    assert lines(file) == [
        "llmconv merge-lora --weight=0.5 --weight=1 --output=merged --max-shard-size=1GB -- base one two",
        "llmconv export --prefill --layout=genai --opset=24 -- merged",
        "llmconv delta extract --output=delta -- base merged",
    ]


def test_a_step_knows_what_it_reads_and_writes(tmp_path: Path) -> None:
    (step,) = read(
        tmp_path, "steps: [{to-hf: {source: a.pt, output: base, config: [one.json, two.json], tokenizer: tok}}]"
    ).steps
    assert {*step.inputs} == {"a.pt", "one.json", "two.json", "tok"}
    assert step.outputs == step.changes == ("base",)


def test_an_export_without_output_changes_the_folder_of_the_model(tmp_path: Path) -> None:
    (step,) = read(tmp_path, "steps: [{export: {model: base}}]").steps
    assert (step.outputs, step.changes) == ((), ("base",))


def test_steps_have_the_name_of_their_command_and_a_number_from_the_second_on(tmp_path: Path) -> None:
    text = "steps: [{export: {model: a}}, {export: {model: b}}, {name: own, export: {model: c}}, {export: {model: d}}]"
    assert [step.name for step in read(tmp_path, text).steps] == ["export", "export-2", "own", "export-3"]


VARIABLES = """
variables: {out: build, layouts: [genai, optimum]}
steps:
  - export: {model: base, output: "${out}/$${x}", layout: "${layouts}"}
"""


def test_variables_are_replaced(tmp_path: Path) -> None:
    (line,) = lines(read(tmp_path, VARIABLES))
    assert line == "llmconv export '--output=build/${x}' --layout=genai --layout=optimum -- base"


def test_set_replaces_a_variable_or_an_option(tmp_path: Path) -> None:
    changes = {"out": "other", "export.layout": "[genai]", "export.quant": "int4", "export.last_logits": "true"}
    (line,) = lines(read(tmp_path, VARIABLES, changes))
    assert line == "llmconv export '--output=other/${x}' --layout=genai --quant=int4 --last-logits -- base"


WRONG: dict[str, tuple[str, type[LlmconvError]]] = {
    "- a": ("is not a YAML mapping", MalformedInput),
    "steps: []": ("no list of `steps`", MalformedInput),
    "stepps: []": ("unknown key `stepps`", MalformedInput),
    "steps: [export]": ("`model.yaml`, step 1: not a mapping", MalformedInput),
    "steps: [{exprt: {}}]": ("unknown command `exprt`", MalformedInput),
    "steps: [{chat: {model: a}}]": ("unknown command `chat`", MalformedInput),
    "steps: [{export: {model: a}, verify: {folder: a}}]": ("step 1: not one command", MalformedInput),
    "steps: [{name: a b, export: {model: a}}]": ("no plain `name`", MalformedInput),
    "steps: [{name: x, export: {model: a}}, {name: x, verify: {folder: a}}]": ("two steps .* `x`", MalformedInput),
    "steps: [{export: [a]}]": ("options that are not a mapping", MalformedInput),
    "steps: [{export: {model: a, prefil: true}}]": ("no option `prefil`", MalformedInput),
    "steps: [{export: {model: a, json: true}}]": ("no option `json`", MalformedInput),
    "steps: [{export: {model: a, prefill: 1}}]": ("`prefill` is `1`, not true or false", MalformedInput),
    "steps: [{export: {model: [a]}}]": ("`model` is a list, not a text or a number", MalformedInput),
    "steps: [{export: {model: yes}}]": ("`model` is true", MalformedInput),
    "steps: [{export: {model: a, output: '${x}'}}]": ("no variable `x`", MalformedInput),
    "steps: [{export: {model: a, quant: int5}}]": ("step `export`: invalid value .* `int5`", UsageProblem),
    "steps: [{export: {}}]": ("step `export`: missing argument `MODEL`", UsageProblem),
    "steps: [{to-hf: {source: a}}]": ("step `to-hf`: missing option `-o`", UsageProblem),
    "steps: [{verify: {folder: a, budget: 5x}}]": ("step `verify`: invalid budget `5x`", UsageProblem),
    "steps:\n- verify:\n    folder: b: c": (r"not valid YAML: .* \(line 3\)", MalformedInput),
    "steps: [{export: {model: ''}}]": ("step `export`: `MODEL` is empty", UsageProblem),
    "steps: [!!python/object/apply:os.system [x]]": ("not valid YAML", MalformedInput),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_with_the_place(text: str, tmp_path: Path) -> None:
    message, kind = WRONG[text]
    with pytest.raises(kind, match=message) as caught:
        read(tmp_path, text)
    assert type(caught.value) is kind


SLIPS = {
    "- to-hf: {source: a, output: b}": "write `steps:` above the list",
    "# mine\n\n- to-hf: {source: a, output: b}": "write `steps:` above the list",
    "steps:\n\t- to-hf: {source: a, output: b}": "line 2 begins with a tab; YAML is indented with spaces",
    "steps:\n  to-hf: {source: a, output: b}": "each step begins with `- `, such as `- to-hf: {…}`",
    "steps:\n- to-hf:\n  source: a\n  output: b": "indent options deeper than the command",
    "steps:\n- verify: {model: a}": "its arguments are `folder`; options: `llmconv verify --help`",
    "steps:\n- to-hf": "write `- COMMAND: {OPTION: VALUE}`",
}


@pytest.mark.parametrize("text", SLIPS)
def test_the_hint_of_a_usual_slip_says_what_to_write(text: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedInput) as caught:
        read(tmp_path, text)
    assert caught.value.hint == SLIPS[text]


def test_a_tab_within_a_text_is_no_slip(tmp_path: Path) -> None:
    (line,) = lines(read(tmp_path, "steps:\n- verify:\n    folder: |-\n      a\n      \tb\n"))
    assert line == "llmconv verify -- 'a\n\tb'"


@pytest.mark.parametrize("change", ["ouut", "export.lay", "nothing.layout", "export"])
def test_set_of_something_that_is_not_there_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(LlmconvError, match=f"no `{change}`|no option `lay`"):
        read(tmp_path, VARIABLES, {change: "1"})


@pytest.mark.parametrize("name", ["none.yaml", "model.json"])
def test_a_file_that_is_missing_or_not_yaml_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(InputRefused):
        read_run_file(tmp_path / name, {}, GROUP)


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    text = "a: &a [x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24)
    )
    with pytest.raises(MalformedInput, match="without end"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("steps: [{export: {model: a}}]\nsteps: [{export: {model: b}}]", "has the duplicate key `steps`"),
        ("steps: [{export: {model: a, kv_cache: int8, kv-cache: int8}}]", "has the duplicate key `kv-cache`"),
        ("steps: [{to-hf: {source: a, output: b}}, {to-hf: {source: c, output: ./b}}]", "two steps that write `b`"),
        (
            "variables: {a: '${b}', b: x}\nsteps: [{export: {model: '${a}'}}]",
            "a variable in the value of the variable `a`",
        ),
        ("variables: {a: }\nsteps: [{export: {model: in, output: '${a}'}}]", "the variable `a` has no value"),
        ("variables: {a: [1]}\nsteps: [{export: {model: 'x${a}'}}]", "neither text nor number"),
        ('steps: [{export: {model: "a\\0b"}}]', "cannot be given on a command line"),
    ],
)
def test_what_would_be_lost_or_misread_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(MalformedInput, match=re.escape(problem)):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["007", "12:30", "null", "1e3", "#1", "yes", ""])
def test_a_value_of_set_is_the_text_as_it_is(tmp_path: Path, text: str) -> None:
    content = "variables: {out: old}\nsteps: [{export: {model: in, output: 'x${out}'}}]"
    (step,) = read(tmp_path, content, {"out": text}).steps
    assert step.outputs == (f"x{text}",)


def test_an_empty_value_of_set_is_an_empty_path_and_never_no_path(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="empty"):
        read(tmp_path, "variables: {out: old}\nsteps: [{export: {model: in, output: '${out}'}}]", {"out": ""})


def test_a_flag_and_a_list_can_be_set(tmp_path: Path) -> None:
    (step,) = read(
        tmp_path, "steps: [{export: {model: in}}]", {"export.prefill": "true", "export.layout": "[genai, optimum]"}
    ).steps
    assert step.arguments == ("--prefill", "--layout=genai", "--layout=optimum", "--", "in")


@pytest.mark.parametrize("text", ["010", "1.10", "12:30", "1e3", "0x10", "2026-11-26", "1_000"])
def test_a_number_is_the_text_that_the_file_has(tmp_path: Path, text: str) -> None:
    content = f"variables: {{epoch: {text}}}\nsteps: [{{to-hf: {{source: 'ep${{epoch}}', output: {text}}}}}]"
    (step,) = read(tmp_path, content).steps
    assert (step.inputs, step.outputs) == ((f"ep{text}",), (text,))


def test_two_steps_that_write_to_one_place_by_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for name in (tmp_path / "out", "link/out", "./out/"):
        text = f"steps: [{{to-hf: {{source: a, output: out}}}}, {{to-hf: {{source: b, output: '{name}'}}}}]"
        with pytest.raises(MalformedInput, match="two steps that write"):
            read(tmp_path, text)


def test_a_flag_with_two_forms_can_be_turned_off(tmp_path: Path) -> None:
    generate = "generate: {model: a, texts: [b], add-special-tokens: false}"
    text = f"steps: [{{{generate}}}, {{verify: {{folder: a, low-memory: false}}}}]"
    assert lines(read(tmp_path, text)) == [
        "llmconv generate --no-add-special-tokens -- a b",
        "llmconv verify --no-low-memory -- a",
    ]


def test_a_step_of_texts_knows_what_it_reads(tmp_path: Path) -> None:
    steps = read(
        tmp_path,
        """
        steps:
          - generate: {model: m, prompt-file: p.jsonl, template: own.jinja, output-file: out.jsonl}
          - embed: {model: e, texts: [some text], output-file: out.npy}
          - bench: {folder: m, against: [torch, "optimum:other", third], csv: out.csv}
        """,
    ).steps
    assert [{*step.inputs} for step in steps] == [{"m", "p.jsonl", "own.jinja"}, {"e"}, {"m", "other", "third"}]
    assert [step.outputs for step in steps] == [("out.jsonl",), ("out.npy",), ("out.csv",)]


@pytest.mark.parametrize(
    "step", ["generate: {model: a}", "embed: {model: a}", "generate: {model: a, prompt-file: '-'}"]
)
def test_a_step_that_would_read_standard_input_is_refused(step: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="no text is given|no standard input"):
        read(tmp_path, f"steps: [{{{step}}}]")


def test_the_runtimes_of_bench_are_known() -> None:
    assert {*RUNTIMES} == {*KNOWN_RUNTIMES}


def test_all_mistakes_of_a_step_are_reported(tmp_path: Path) -> None:
    with pytest.raises(MalformedInput, match="has 3 mistakes") as caught:
        read(tmp_path, "steps: [{to-hf: {source: '${x}', dtyp: b}}]")
    for part in ("no variable `x`", "no option `dtyp`", "step `to-hf`: missing `output`"):
        assert part in caught.value.message
