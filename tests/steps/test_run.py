"""`llmconv run`: steps are done once, again when something changed, and not after a failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.steps.execution import Execution, run_lock
from llmconv.steps.run_file import read_run_file
from llmconv.steps.step import Step
from tests.hub.conftest import contents

EXAMPLE = Path(__file__).parents[2] / "examples/tiny-llama"
FILE = """
variables: {adapter: adapter}
steps:
  - to-hf: {source: run.pt, output: build/base}
  - merge-lora: {base: build/base, adapters: "${adapter}", output: build/merged}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file whose steps are done; do not write into its folder."""
    return done(prepared(tmp_path_factory.mktemp("finished")))


@pytest.fixture
def again(finished: Path, tmp_path: Path) -> Path:
    """A copy of it with the same times, to write into."""
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / finished.name


def prepared(home: Path, text: str = FILE) -> Path:
    shutil.copy(EXAMPLE / "ep4-ba2400-rank0.pt", home / "run.pt")
    shutil.copytree(EXAMPLE / "adapter", home / "adapter")
    (home / "model.yaml").write_text(text)
    return home / "model.yaml"


def done(file: Path) -> Path:
    assert statuses(file) == {"to-hf": "done", "merge-lora": "done"}
    return file


def run(file: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """The output of `--json`."""
    line = [sys.executable, "-m", "llmconv", "run", str(file), "--json", *options]
    found = subprocess.run(line, capture_output=True, text=True, check=False)
    assert found.returncode == code, found.stderr
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def statuses(file: Path, *options: str, code: int = 0) -> dict[str, str]:
    return {step["name"]: step["status"] for step in run(file, *options, code=code)["steps"]}


def planned(file: Path, *options: str) -> dict[str, str]:
    """The reasons of a plan by step."""
    result = CliRunner().invoke(main, ["run", str(file), "--dry-run", "--json", *options])
    assert result.exit_code == 0, result.output
    return {step["name"]: step["reason"] for step in json.loads(result.stdout)["steps"]}


@pytest.mark.slow
def test_the_outputs_are_those_of_the_commands(finished: Path, tmp_path: Path) -> None:
    for line in (
        ["to-hf", finished.parent / "run.pt", "-o", tmp_path / "base"],
        ["merge-lora", tmp_path / "base", finished.parent / "adapter", "-o", tmp_path / "merged"],
    ):
        assert CliRunner().invoke(main, [str(word) for word in line]).exit_code == 0
    assert contents(finished.parent / "build") == contents(tmp_path)


@pytest.mark.slow
def test_a_second_run_does_nothing(finished: Path) -> None:
    assert statuses(finished) == {"to-hf": "unchanged", "merge-lora": "unchanged"}


@pytest.mark.slow
def test_a_copy_of_the_folder_is_unchanged(again: Path) -> None:
    assert planned(again) == {"to-hf": "", "merge-lora": ""}


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def record(home: Path) -> Path:
    return home / ".model.yaml.llmconv-run"


REFUSED = "`build/base` exists, and no run of this file made it: it is refused"

CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "an input": (lambda home: touch(home / "run.pt"), "`run.pt` changed", "reads `build/base`, which is new"),
    "the adapter": (
        lambda home: touch(home / "adapter/adapter_config.json"),
        "",
        "`adapter/adapter_config.json` changed",
    ),
    "a file more": (lambda home: (home / "adapter/x").write_text(""), "", "`adapter/x` is new"),
    "an output": (lambda home: touch(home / "build/merged/config.json"), "", "`build/merged/config.json` changed"),
    "an output that is gone": (lambda home: shutil.rmtree(home / "build/merged"), "", "is gone"),
    "a manifest that is gone": (lambda home: (home / "build/merged/llmconv.json").unlink(), "", "is gone"),
    "no record": (lambda home: record(home).unlink(), f"not done yet; {REFUSED}", "reads `build/base`"),
    "a wrong record": (lambda home: record(home).write_text("[]"), f"not done yet; {REFUSED}", "reads"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_done_again(change: str, again: Path) -> None:
    edit, first, second = CHANGES[change]
    edit(again.parent)
    found = planned(again)
    assert (found["to-hf"] == first, second in found["merge-lora"]) == (True, True), found


@pytest.mark.slow
def test_options_that_changed_are_used(again: Path) -> None:
    assert statuses(again, "--set", "merge-lora.dtype=float16") == {"to-hf": "unchanged", "merge-lora": "done"}
    manifest = json.loads((again.parent / "build/merged/llmconv.json").read_text())
    assert manifest["steps"][-1]["options"]["dtype"] == "float16"
    assert planned(again) == {"to-hf": "", "merge-lora": "options changed"}


def test_force_does_all(again: Path) -> None:
    assert planned(again, "--force") == {"to-hf": "--force", "merge-lora": "--force"}


def test_another_version_does_all(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmconv.steps.execution.__version__", "9.9")
    assert planned(again)["to-hf"] == "was done by llmconv 0.1.0"


def test_after_a_failure_the_next_steps_are_not_run_and_the_next_run_continues(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    weights = tmp_path / "adapter/adapter_model.safetensors"
    shutil.move(weights, tmp_path / "elsewhere")
    found = run(file, "--report", str(tmp_path / "report"), code=3)
    assert [step["status"] for step in found["steps"]] == ["done", "failed"]
    assert json.loads((tmp_path / "report/run.json").read_text()) == found
    assert "failed with exit code 3" in (tmp_path / "report/run.md").read_text()
    shutil.move(tmp_path / "elsewhere", weights)
    assert statuses(file) == {"to-hf": "unchanged", "merge-lora": "done"}


@pytest.mark.slow
def test_a_folder_that_another_run_made_is_not_replaced(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    done(file)
    (tmp_path / "other.yaml").write_text(FILE.replace("output: build/merged", "output: build/merged, dtype: float16"))
    before = contents(tmp_path / "build/merged")
    assert statuses(tmp_path / "other.yaml", code=3) == {"to-hf": "failed", "merge-lora": "not run"}
    assert contents(tmp_path / "build/merged") == before


def test_another_output_that_another_run_made_is_not_replaced(again: Path) -> None:
    elsewhere = Path(shutil.copytree(again.parent / "build/base", again.parent / "other"))
    before = contents(elsewhere)
    assert statuses(again, "--set", "merge-lora.output=other", code=3)["merge-lora"] == "failed"
    assert contents(elsewhere) == before


@pytest.mark.slow
def test_an_output_that_was_named_before_is_replaced_when_it_is_named_again(again: Path) -> None:
    assert statuses(again, "--set", "merge-lora.output=build/other")["merge-lora"] == "done"
    assert (again.parent / "build/other").is_dir()
    touch(again.parent / "run.pt")
    assert statuses(again) == {"to-hf": "done", "merge-lora": "done"}
    assert statuses(again) == {"to-hf": "unchanged", "merge-lora": "unchanged"}


def test_nothing_runs_if_any_step_is_wrong(tmp_path: Path) -> None:
    file = prepared(tmp_path, FILE + "  - verify: {folder: build/merged, suit: quick}\n")
    result = CliRunner().invoke(main, ["run", str(file)])
    assert (result.exit_code, (tmp_path / "build").exists()) == (3, False)
    assert "no option `suit`" in result.output


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    result = CliRunner().invoke(main, ["run", str(file), "--dry-run"])
    assert "llmconv to-hf --output=build/base -- run.pt" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"run.pt", "adapter", "model.yaml"}


@pytest.mark.slow
def test_a_terminated_run_ends_its_step_and_is_continued(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    line = [sys.executable, "-m", "llmconv", "run", str(file)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / ".model.yaml.llmconv-run").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=60)
    assert (process.returncode, "run the same command again" in messages) == (143, True), messages
    assert not [other for other in psutil.process_iter(["cwd"]) if other.info["cwd"] == str(tmp_path)]
    done(file)


@pytest.mark.slow
def test_a_step_that_outlives_a_killed_run_holds_its_lock(again: Path) -> None:
    sleeper = "import time; print('started', flush=True); time.sleep(60)"
    code = f"""
import subprocess, sys
from pathlib import Path
from llmconv.steps.execution import run_lock
with run_lock(Path({str(again)!r})) as lock:
    subprocess.run([sys.executable, "-c", {sleeper!r}], pass_fds=(lock,))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        (step,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        refused = CliRunner().invoke(main, ["run", str(again)])
        step.kill()
    step.wait()
    assert (refused.exit_code, "another run of `model.yaml` is not finished" in refused.output) == (4, True)
    assert statuses(again) == {"to-hf": "unchanged", "merge-lora": "unchanged"}


@pytest.mark.slow
def test_two_runs_of_a_file_at_a_time_are_refused(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    line = [sys.executable, "-m", "llmconv", "run", str(file)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and "step 1 of 2" in process.stderr.readline()
        refused = CliRunner().invoke(main, ["run", str(file)])
        process.communicate()
    assert (refused.exit_code, process.returncode) == (4, 0)


def test_an_input_that_is_nowhere_is_found_before_anything_runs(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    (tmp_path / "run.pt").unlink()
    for options in ([], ["--dry-run"]):
        result = CliRunner().invoke(main, ["run", str(file), *options])
        assert (result.exit_code, (tmp_path / "build").exists()) == (3, False)
        assert "step `to-hf`: input `run.pt` does not exist, and no earlier step writes it" in result.output


def test_a_plan_says_which_input_is_a_model_of_the_hub(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    shutil.rmtree(tmp_path / "adapter")
    assert (
        planned(file)["merge-lora"]
        == "reads `build/base`, which is new; `adapter` is not here, so it is a model of the Hub"
    )


def test_a_report_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    (tmp_path / "report").write_text("mine")
    result = CliRunner().invoke(main, ["run", str(file), "--report", str(tmp_path / "report")])
    assert (result.exit_code, (tmp_path / "build").exists()) == (3, False)
    assert (tmp_path / "report").read_text() == "mine"


@pytest.mark.slow
def test_verification_is_a_step_with_a_verdict(again: Path) -> None:
    again.write_text(
        FILE
        + "  - export: {model: build/merged, incremental: true}\n"
        + "  - verify: {folder: build/merged, suite: quick, scenario: one-token prompt, report: build/report}\n"
    )
    report = again.parent / "build/report"
    first = run(again, "--report", str(report))["steps"]
    assert (report / "summary.md").read_text().startswith("# PASS") and (report / "run.md").is_file()
    assert [step["status"] for step in first] == ["unchanged", "unchanged", "done", "done"]
    assert first[-1]["verdict"] == "pass"
    assert planned(again) == {"to-hf": "", "merge-lora": "", "export": "", "verify": ""}
    assert statuses(again, "--set", "verify.repeat=2", "--report", str(report))["verify"] == "done"
    assert planned(again, "--set", "verify.repeat=2")["verify"] == ""
    assert statuses(again)["verify"] == "done"
    assert statuses(again, "--report", str(report))["verify"] == "unchanged"  # though it replaces run.json
    manifest = again.parent / "build/merged/llmconv.json"
    passed = manifest.read_text()
    manifest.write_text(passed.replace('"verdict": "pass"', '"verdict": "fail"'))
    assert planned(again)["verify"] == "the recorded verdict is `fail`"
    manifest.write_text(passed)
    (again.parent / "build/merged/decode.onnx").unlink()
    assert planned(again)["export"] == "`build/merged/decode.onnx` is gone"
    assert {step["status"] for step in run(again)["steps"][2:]} == {"done"}


@pytest.mark.slow
def test_a_folder_that_was_made_again_by_hand_is_not_replaced(again: Path) -> None:
    base = again.parent / "build/base"
    shutil.rmtree(base)
    by_hand = ["to-hf", str(again.parent / "run.pt"), "-o", str(base), "--dtype", "float16"]
    assert CliRunner().invoke(main, by_hand).exit_code == 0
    before = contents(base)
    assert statuses(again, code=3) == {"to-hf": "failed", "merge-lora": "not run"}
    assert contents(base) == before


@pytest.mark.slow
def test_an_input_that_changes_while_its_step_runs_makes_it_run_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prepared(tmp_path)
    execution = Execution(read_run_file(file, {}, main))
    call = Execution._call

    def changing(self: Execution, step: Step, **options: bool) -> int:
        code = call(self, step, **options)
        if step.command == "merge-lora":
            touch(tmp_path / "adapter/adapter_model.safetensors")
            (tmp_path / "adapter/new.json").write_text("{}")
        return code

    monkeypatch.setattr(Execution, "_call", changing)
    assert [one.status for one in execution.run(lambda *_: None)] == ["done", "done"]
    assert planned(file) == {"to-hf": "", "merge-lora": "`adapter/adapter_model.safetensors` changed"}


@pytest.mark.slow
def test_no_file_next_to_the_run_file_is_imported(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit(0)")
    (tmp_path / "llmconv").mkdir()
    (tmp_path / "llmconv/__init__.py").write_text("")
    (tmp_path / "llmconv/__main__.py").write_text("")
    command = str(Path(sys.executable).with_name("llmconv"))
    assert subprocess.run([command, "run", str(file), "-q"], cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "build/merged/model.safetensors").is_file()


@pytest.mark.slow
def test_without_its_record_a_run_adopts_no_output(again: Path) -> None:
    record(again.parent).unlink()
    (again.parent / "build/base/model.safetensors").write_bytes(b"damaged")
    before = contents(again.parent / "build")
    assert planned(again)["to-hf"] == f"not done yet; {REFUSED}"
    assert statuses(again, code=3) == {"to-hf": "failed", "merge-lora": "not run"}
    assert contents(again.parent / "build") == before


def test_a_run_file_that_is_saved_during_its_run_stays_locked(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    with run_lock(file):
        file.with_name("new").write_text(file.read_text())
        file.with_name("new").replace(file)
        assert CliRunner().invoke(main, ["run", str(file)]).exit_code == 4
    assert not list(tmp_path.glob(".*.lock"))


@pytest.mark.slow
def test_a_failed_verification_is_no_pass_of_an_earlier_one(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("steps: [{verify: {folder: model}}]\n")
    (tmp_path / "model").mkdir()
    manifest = {"manifest_version": 1, "steps": [], "files": {}, "graphs": {}, "verified": {"verdict": "pass"}}
    (tmp_path / "model/llmconv.json").write_text(json.dumps(manifest))
    (step,) = run(file, code=3)["steps"]
    assert (step["status"], "verdict" in step) == ("failed", False)


def test_an_input_that_is_reached_by_a_link_is_planned_as_it_is_done(again: Path) -> None:
    (again.parent / "link").symlink_to("build")
    again.write_text(FILE.replace("base: build/base", "base: link/base"))
    found = planned(again, "--set", "to-hf.dtype=float16")
    assert found == {"to-hf": "options changed", "merge-lora": "reads `link/base`, which is new"}


@pytest.mark.slow
def test_a_step_that_failed_is_done_once_more_and_not_twice(tmp_path: Path) -> None:
    file = prepared(tmp_path)
    weights = tmp_path / "adapter/adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert statuses(file, code=3)["merge-lora"] == "failed"
    weights.write_bytes(whole)
    assert statuses(file) == {"to-hf": "unchanged", "merge-lora": "done"}
    assert statuses(file) == {"to-hf": "unchanged", "merge-lora": "unchanged"}


CHAIN = """
steps:
  - to-hf: {source: run.pt, output: build/base}
  - merge-lora: {base: build/base, adapters: adapter, output: build/merged}
  - export: {model: build/merged, prefill: true, incremental: true}
  - verify: {folder: build/merged, scenario: "prefill, 33 tokens"}
  - generate:
      model: build/merged
      prompt: ["-- The sea", "A 'word'"]
      max-new-tokens: 5
      temperature: 0
      add-special-tokens: false
      output-file: build/texts.jsonl
"""


@pytest.mark.slow
def test_a_chain_ends_in_text(tmp_path: Path) -> None:
    file = prepared(tmp_path, CHAIN)
    found = run(file, "--report", str(tmp_path / "report"))
    assert [step["status"] for step in found["steps"]] == ["done"] * 5
    lines = [json.loads(line) for line in (tmp_path / "build/texts.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["-- The sea", "A 'word'"]
    shown = (tmp_path / "report/run.md").read_text()
    assert "| generate | done |" in shown and "llmconv generate '--prompt=-- The sea'" in shown
    assert statuses(file) == dict.fromkeys(("to-hf", "merge-lora", "export", "verify", "generate"), "unchanged")
    (tmp_path / "build/texts.jsonl").unlink()
    again = statuses(file, "--set", "generate.prompt=Once")
    assert again["verify"] == "unchanged" and again["generate"] == "done"
    assert json.loads((tmp_path / "build/texts.jsonl").read_text())["prompt"] == "Once"


TEXTS = """
steps:
  - generate: {model: MODEL, backend: torch, prompt-file: prompts.txt, max-new-tokens: 3, output-file: texts.jsonl}
"""


@pytest.fixture
def texts(finished: Path, tmp_path: Path) -> Path:
    """A run file with one step, whose texts are written."""
    (tmp_path / "prompts.txt").write_text("The sea\n")
    file = tmp_path / "model.yaml"
    file.write_text(TEXTS.replace("MODEL", str(finished.parent / "build/merged")))
    assert statuses(file) == {"generate": "done"}
    return file


def prompts_of(file: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in (file.parent / "texts.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_texts_are_written_again_when_the_prompts_changed(texts: Path) -> None:
    assert planned(texts) == {"generate": ""}
    (texts.parent / "prompts.txt").write_text("The sea\nThe land\n")
    assert planned(texts) == {"generate": "`prompts.txt` changed"}
    assert statuses(texts) == {"generate": "done"}
    assert prompts_of(texts) == ["The sea", "The land"]


@pytest.mark.slow
def test_a_file_of_texts_that_no_run_of_this_file_made_is_kept(texts: Path) -> None:
    record(texts.parent).unlink()
    (texts.parent / "prompts.txt").write_text("The land\n")
    assert statuses(texts, code=3) == {"generate": "failed"}
    assert prompts_of(texts) == ["The sea"]


@pytest.mark.slow
def test_a_generate_step_that_was_interrupted_starts_again_if_its_prompts_changed(texts: Path) -> None:
    begun = json.loads(record(texts.parent).read_text())
    begun["steps"]["generate"]["command"] = ""
    record(texts.parent).write_text(json.dumps(begun))
    (texts.parent / "prompts.txt").write_text("The land\n")
    assert statuses(texts) == {"generate": "done"}
    assert prompts_of(texts) == ["The land"]


def test_a_misspelled_intermediate_path_is_no_model_of_the_hub(tmp_path: Path) -> None:
    file = prepared(tmp_path, FILE.replace("base: build/base", "base: build/bas"))
    for options in ([], ["--dry-run"]):
        result = CliRunner().invoke(main, ["run", str(file), *options])
        assert (result.exit_code, (tmp_path / "build").exists()) == (3, False)
        assert "input `build/bas` does not exist, and no earlier step writes it" in result.stderr
        assert "is `build/base` meant, the output of step `to-hf`?" in result.stderr
        assert "a model of the Hub is `hf://build/bas`" in result.stderr


def test_a_name_in_the_folder_of_an_output_is_no_model_of_the_hub(tmp_path: Path) -> None:
    file = prepared(tmp_path, FILE.replace("base: build/base", "base: build/other"))
    result = CliRunner().invoke(main, ["run", str(file)])
    assert result.exit_code == 3 and "input `build/other` does not exist" in result.stderr
    assert "a model of the Hub is `hf://build/other`" in result.stderr


def test_a_model_of_the_hub_with_another_name_is_one(tmp_path: Path) -> None:
    file = prepared(tmp_path, FILE.replace("base: build/base", "base: meta-llama/Llama-3.2-1B"))
    assert "`meta-llama/Llama-3.2-1B` is not here, so it is a model of the Hub" in planned(file)["merge-lora"]


def test_what_a_later_step_writes_is_no_model_of_the_hub(tmp_path: Path) -> None:
    text = "steps: [{export: {model: build/base}}, {to-hf: {source: run.pt, output: build/base}}]"
    result = CliRunner().invoke(main, ["run", str(prepared(tmp_path, text)), "--dry-run"])
    assert result.exit_code == 3 and "step `to-hf` writes it: put that step first" in result.stderr


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = """
steps:
  - to-hf: {source: gone.pt, output: build/base}
  - merge-lora: {base: build/bas, adaptors: adapter, dtyp: x, output: build/merged}
  - exprt: {model: build/merged}
  - export: {model: build/merged, quant: int5}
  - verify: {folder: "${x}"}
  - generate: {model: build/merged}
"""
    result = CliRunner().invoke(main, ["run", str(prepared(tmp_path, text)), "--dry-run"])
    assert result.exit_code == 3 and "`model.yaml` has 8 mistakes" in result.stderr
    for mistake in (
        "input `gone.pt` does not exist",
        "input `build/bas` does not exist",
        "no option `adaptors` (hint: is `adapters` meant?)",
        "no option `dtyp` (hint: is `dtype` meant?)",
        "unknown command `exprt`",
        "invalid value",
        "no variable `x`",
        "step `generate`: no text is given",
    ):
        assert result.stderr.count(mistake) == 1, result.stderr
    assert result.stderr.count("\n- ") == 8
