"""The steps of action.yml run as they stand, with the inputs that a workflow gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from tests.conftest import save_tiny

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
EXAMPLE = ROOT / "examples/tiny-llama"
STEPS = [step for step in ACTION["runs"]["steps"] if "run" in step]
EXPRESSION = re.compile(r"\$\{\{\s*inputs\.([\w-]+)\s*\}\}")


@dataclass
class Job:
    """What a run of the steps left.

    Attributes:
        codes: exit codes of the steps that ran, by name.
        output: of all of them.
        summary: the summary of the job.
        outputs: what steps wrote for later steps.
    """

    codes: dict[str, int]
    output: str
    summary: str
    outputs: str


def is_to_run(condition: str, inputs: dict[str, str], failed: bool) -> bool:
    """The value of an `if:`: comparisons of inputs with texts, and `always()`."""
    parts = condition.split(" && ") if condition else []
    holds = True
    for part in parts:
        if part == "always()":
            failed = False
            continue
        found = re.fullmatch(r"inputs\.([\w-]+) (==|!=) '([^']*)'", part)
        assert found, f"the test does not know the condition {part!r}"
        holds &= (inputs[found[1]] == found[3]) == (found[2] == "==")
    return holds and not failed


def run(folder: Path, *, scripts: Path | None = None, **given: str) -> Job:
    """Runs the steps in a folder, as GitHub does.

    Args:
        folder: the checkout of the workflow.
        scripts: those of an environment to install into; None for this one, without the step that installs.
        given: inputs.
    """
    inputs = {name: field.get("default", "") for name, field in ACTION["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    files = {name: folder / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    path = f"{scripts or Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common = {**os.environ, "PATH": path, "GITHUB_ACTION_PATH": str(ROOT)}
    codes: dict[str, int] = {}
    output = ""
    for step in STEPS:
        if scripts is None and step["name"] == "Install":
            continue
        if not is_to_run(step.get("if", ""), inputs, any(codes.values())):
            continue
        variables = {
            name: EXPRESSION.sub(lambda found: inputs[found[1]], text) for name, text in step.get("env", {}).items()
        }
        environment = {**common, **{name: str(file) for name, file in files.items()}, **variables}
        line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        codes[step["name"]] = done.returncode
        output += done.stdout + done.stderr
    texts = [file.read_text() if file.exists() else "" for file in files.values()]
    return Job(codes, output, *texts)


def test_no_input_is_pasted_into_a_script() -> None:
    assert [step["name"] for step in STEPS if "${{" in step["run"]] == []


def test_every_input_is_used_and_described() -> None:
    text = (ROOT / "action.yml").read_text()
    used = {*re.findall(r"inputs\.([\w-]+)", text)}
    assert used == {*ACTION["inputs"]}
    assert all(field["description"] for field in ACTION["inputs"].values())


@pytest.mark.slow
def test_a_checkpoint_and_an_adapter_become_a_folder(tmp_path: Path) -> None:
    first = run(tmp_path, source=str(EXAMPLE / "ep4-ba2400-rank0.pt"), model="my base", export="false", verify="false")
    assert first.codes == {"Convert": 0, "Summary": 0}, first.output
    adapters = f"{EXAMPLE}/adapter\n"
    second = run(tmp_path, base="my base", adapters=adapters, merge_options="--dtype float16", export="", verify="")
    assert second.codes == {"Merge": 0, "Summary": 0}, second.output
    assert (tmp_path / "model/model.safetensors").stat().st_size * 2 < 620_000


@pytest.mark.slow
def test_a_checkpoint_and_its_adapters_become_one_folder(tmp_path: Path) -> None:
    source, adapters = str(EXAMPLE / "ep4-ba2400-rank0.pt"), f"{EXAMPLE}/adapter\n"
    job = run(tmp_path, source=source, adapters=adapters, export="false", verify="false")
    assert job.codes == {"Convert": 0, "Merge": 0, "Summary": 0}, job.output
    assert (tmp_path / "model/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["--schema", "--help"])
def test_an_input_is_never_read_as_an_option(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, file=name).codes["Run file"] != 0
    assert run(tmp_path, source=name, export="false", verify="false").codes["Convert"] != 0


@pytest.mark.slow
def test_options_are_words_and_never_run(tmp_path: Path) -> None:
    source = str(EXAMPLE / "ep4-ba2400-rank0.pt")
    job = run(tmp_path, source=source, to_hf_options="--dtype $(touch x) ; touch x", export="", verify="")
    assert job.codes["Convert"] == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_quotes_keep_the_blanks_of_an_option(tmp_path: Path) -> None:
    source, name = str(EXAMPLE / "ep4-ba2400-rank0.pt"), "my tokenizer"
    job = run(tmp_path, source=source, to_hf_options=f"--dtype bf16\n  --tokenizer '{name}'", export="", verify="")
    assert (job.codes["Convert"], f"`{name}`" in job.output) == (3, True), job.output


def test_options_with_an_open_quote_are_refused(tmp_path: Path) -> None:
    source = str(EXAMPLE / "ep4-ba2400-rank0.pt")
    job = run(tmp_path, source=source, to_hf_options="--dtype 'float16", export="", verify="")
    assert (job.codes["Convert"], (tmp_path / "model").exists()) == (2, False)
    assert "no closing quotation in the options: --dtype 'float16" in job.output


def test_words_may_be_empty_and_have_line_breaks(tmp_path: Path) -> None:
    script = f'source {ROOT}/tools/action.sh; split_words "$1"; printf "<%s>" "${{words[@]}}"'
    line = ["bash", "-c", script, "bash", "--scenario '' \"a\nb\" $(touch x) `touch x` ; *"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "<--scenario><><a\nb><$(touch><x)><`touch><x`><;><*>"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("options", ["-o out", "--output=out --quant int4", "-oout", "--out out"])
def test_an_output_among_the_options_is_refused(tmp_path: Path, options: str) -> None:
    job = run(tmp_path, export_options=options)
    assert (job.codes, "give the input `export-output`" in job.output) == ({"Export": 2, "Summary": 0}, True)


@pytest.mark.slow
def test_quantized_graphs_are_exported_and_verified_in_a_folder_of_their_own(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    options = "--unified --quant int8 --quant-block 16"
    job = run(tmp_path, export_output="quantized model", export_options=options, verify_options="--suite quick")
    assert job.codes == {"Export": 0, "Verify": 0, "Summary": 0}, job.output
    assert (job.summary.startswith("# PASS: quantized model"), job.outputs) == (True, "verdict=pass\n")


@pytest.mark.parametrize(("value", "runs"), [("yes", True), ("True", True), ("false", False), ("", False)])
def test_only_false_leaves_out_a_verification(value: str, runs: bool) -> None:
    (step,) = (step for step in STEPS if step["name"] == "Verify")
    inputs = {name: field.get("default", "") for name, field in ACTION["inputs"].items()} | {"verify": value}
    assert is_to_run(step["if"], inputs, failed=False) is runs


@pytest.mark.slow
def test_the_first_step_installs_and_removes_the_report_of_an_earlier_job(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (tmp_path / "llmconv-report").mkdir()
    (tmp_path / "llmconv-report/report.json").write_text('{"verdict": "pass"}')
    job = run(
        tmp_path, scripts=environment / "bin", pip_options="--no-deps --ignore-installed", export="", verify="false"
    )
    assert (job.codes, job.outputs) == ({"Install": 0, "Summary": 0}, ""), job.output
    assert "transformers" in job.output and [*site.glob("llmconv-*.dist-info")]


@pytest.mark.slow
def test_graphs_are_exported_and_verified(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    job = run(tmp_path)
    assert job.codes == {"Export": 0, "Verify": 0, "Summary": 0}, job.output
    assert job.summary.startswith("# PASS: model")
    assert job.outputs == "verdict=pass\n"
    assert (tmp_path / "llmconv-report/report.html").is_file()


@pytest.mark.slow
def test_a_wrong_graph_fails_the_job_with_annotations_and_a_summary(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    assert run(tmp_path, verify="false").codes == {"Export": 0, "Summary": 0}
    model = onnx.load(tmp_path / "model/prefill.onnx", load_external_data=False)
    norm = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
    next(one for one in norm.attribute if one.name == "epsilon").f *= 10
    onnx.save(model, tmp_path / "model/prefill.onnx")
    job = run(tmp_path, export="false")
    assert job.codes == {"Verify": 1, "Summary": 0}
    assert "::error" in job.output
    assert (job.summary.startswith("# FAIL: model"), job.outputs) == (True, "verdict=fail\n")


@pytest.mark.slow
def test_a_run_file_is_done(tmp_path: Path) -> None:
    source = EXAMPLE / "ep4-ba2400-rank0.pt"
    (tmp_path / "model.yaml").write_text(
        f"variables: {{out: x}}\nsteps: [{{to-hf: {{source: '{source}', output: '${{out}}'}}}}]\n"
    )
    job = run(tmp_path, file="model.yaml", set="out=build/a b\nto-hf.dtype=float16\n")
    assert job.codes == {"Run file": 0, "Summary": 0}, job.output
    assert (tmp_path / "build/a b/model.safetensors").is_file()
    assert job.summary.startswith("# model.yaml: all steps are done")
