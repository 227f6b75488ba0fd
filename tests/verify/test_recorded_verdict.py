"""verify records its verdict in the manifest, and changes nothing else of the folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from llmconv.cli import main
from llmconv.errors import InputRefused, MalformedInput
from llmconv.export import export
from llmconv.files.safe_folder import NewEntry, temporary_name
from llmconv.output.manifest import GraphEntry, parse_verdict
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.verify import Report, verify
from llmconv.verify.bisect.replay import VerifiedFolder
from llmconv.verify.reference.eager import Eager
from llmconv.verify.results import Check
from llmconv.verify.run import Judged, _verdict, recording
from tests.builders.mutants.mutants import MUTANTS

Tiny = Callable[[str], Path]
ONE = ("prefill, 3 tokens",)


@pytest.fixture
def folder(exported: Tiny, tmp_path: Path) -> Path:
    """An exported Llama without a recorded verdict."""
    copied = Path(shutil.copytree(exported("llama"), tmp_path / "llama"))
    manifest = json.loads((copied / "llmconv.json").read_bytes())
    manifest.pop("verified", None)
    (copied / "llmconv.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return copied


@pytest.fixture
def verified(folder: Path, eager: Callable[[str], Eager]) -> Callable[..., Report]:
    """`verified(**options)` is the report on one scenario."""
    return lambda **options: verify(folder, eager=eager("llama"), scenario=ONE, **options)


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "llmconv.json").read_bytes())
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_the_verdict_is_added_to_the_manifest(folder: Path, verified: Callable[..., Report]) -> None:
    before = manifest_of(folder)
    report = verified()
    after = manifest_of(folder)
    found = after.pop("verified")
    assert after == before and list(manifest_of(folder)) == [*before, "verified"]
    assert (found["verdict"], found["method"], found["suite"], found["only"]) == ("pass", "whole", "quick", [*ONE])
    assert found["checks"] == {"passed": len(report.checks), "failed": 0, "skipped": 0}
    assert (found["unseen"], found["versions"]) == (report.unseen, report.versions)


@pytest.mark.slow
def test_the_judged_files_are_identified(folder: Path, verified: Callable[..., Report]) -> None:
    verified()
    found = manifest_of(folder)["verified"]
    assert found["graphs"] == {name: digest(folder / name) for name in ("decode.onnx", "prefill.onnx")}
    weights = (folder / "model.safetensors").read_bytes()
    header = weights[: 8 + int.from_bytes(weights[:8], "little")]
    expected = {"bytes": len(weights), "header_sha256": hashlib.sha256(header).hexdigest()}
    assert found["weights"] == {"model.safetensors": expected}, "an export in place has no sha256 of the weights"


@pytest.mark.slow
def test_a_compared_sha256_of_the_weights_is_recorded(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "out", incremental=True)
    verify(tmp_path / "out", scenario=ONE)
    found = manifest_of(tmp_path / "out")["verified"]["weights"]["model.safetensors"]
    assert found["sha256"] == digest(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(
    ("role", "name"),
    [("decode", "config.json"), ("decode", "genai_config.json"), ("decode", "generation_config.json")]
    + [("embed", "modules.json"), ("embed", "1_Pooling/config.json")],
)
def test_configurations_that_were_compared_are_judged_files(role: str, name: str, tmp_path: Path) -> None:
    """With the modules after an embedding model, and what GenAI reads."""
    (tmp_path / "1_Pooling").mkdir()
    for file in ("config.json", "genai_config.json", "generation_config.json", "1_Pooling/config.json", "model.onnx"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "modules.json").write_text(
        '[{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "Normalize", "path": ".."}]'
    )
    judged = Judged.of_graphs(VerifiedFolder(tmp_path, [GraphEntry(role, ("model.onnx",))], {}, SessionSettings()))
    recorded = _verdict(Report("x", "x", "quick"), tmp_path, (), judged.graphs, {}, judged.configs)
    found = parse_verdict(json.loads(json.dumps(recorded.as_dict())))
    assert found.changed_files(tmp_path) == [] and name in found.configs and "../config.json" not in found.configs
    (tmp_path / name).write_text("[]")
    assert found.changed_files(tmp_path) == [name]


@pytest.mark.slow
def test_equal_runs_give_equal_bytes_wherever_the_folder_is(
    folder: Path, verified: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified()
    first = (folder / "llmconv.json").read_bytes()
    other = Path(shutil.copytree(folder, tmp_path / "elsewhere" / folder.name))
    monkeypatch.chdir(other)
    verify(".", scenario=ONE)
    assert (other / "llmconv.json").read_bytes() == first and str(tmp_path).encode() not in first


def test_a_difference_is_recorded_too(folder: Path, verified: Callable[..., Report]) -> None:
    model = onnx.load(folder / "decode.onnx", load_external_data=False)
    mutant = next(mutant for mutant in MUTANTS if mutant.name.startswith("attention scale"))
    assert mutant.apply(model, folder)
    onnx.save(model, folder / "decode.onnx")
    assert verified().exit_code == 1
    found = parse_verdict(manifest_of(folder)["verified"])
    assert found.verdict == "fail" and found.checks["failed"]
    assert found.graphs["decode.onnx"] == digest(folder / "decode.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--no-record",), ("--graph",)])
def test_the_folder_stays_as_it_is_if_nothing_is_to_be_recorded(folder: Path, arguments: tuple[str, ...]) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    target = (str(folder / "decode.onnx"), "--reference", str(folder)) if arguments == ("--graph",) else (str(folder),)
    done = CliRunner().invoke(main, ["verify", *arguments, *target, "--scenario", *ONE])
    assert done.exit_code == 0, done.output
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_folder_without_a_manifest_gets_none(folder: Path, verified: Callable[..., Report]) -> None:
    (folder / "llmconv.json").unlink()
    report = verified()
    assert report and not (folder / "llmconv.json").exists()
    assert not any("not recorded" in note for note in report.notes)


@pytest.mark.slow
def test_unknown_keys_and_the_mode_of_the_manifest_are_kept(folder: Path, verified: Callable[..., Report]) -> None:
    path = folder / "llmconv.json"
    path.write_text(json.dumps({**manifest_of(folder), "reference": ".", "later": {"é": [1.5]}}))
    path.chmod(0o640)
    verified()
    assert (manifest_of(folder)["reference"], manifest_of(folder)["later"]) == (".", {"é": [1.5]})
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_write_protected_manifest_is_a_note(folder: Path, verified: Callable[..., Report]) -> None:
    (folder / "llmconv.json").chmod(0o444)
    report = verified()
    assert report.exit_code == 0 and "verified" not in manifest_of(folder)
    assert report.notes[-1] == "the verdict is not recorded in `llmconv.json`: it is write-protected"


def test_a_manifest_that_is_a_link_is_not_replaced(folder: Path, verified: Callable[..., Report]) -> None:
    (folder / "llmconv.json").rename(folder / "real.json")
    (folder / "llmconv.json").symlink_to("real.json")
    before = (folder / "real.json").read_bytes()
    report = verified()
    assert report.exit_code == 0 and report.notes[-1].endswith("it is not a regular file")
    assert (folder / "llmconv.json").is_symlink() and (folder / "real.json").read_bytes() == before


def test_a_manifest_that_leads_out_of_the_folder_is_refused(
    folder: Path, verified: Callable[..., Report], tmp_path: Path
) -> None:
    (folder / "llmconv.json").rename(tmp_path / "other.json")
    (folder / "llmconv.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(MalformedInput, match="leads out of the folder"):
        verified()


def test_a_full_disk_is_a_note_and_leaves_the_old_manifest(folder: Path, small_disk: Path) -> None:
    full = Path(shutil.copytree(folder, small_disk / "model"))
    before = (full / "llmconv.json").read_bytes()
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    report = verify(full, scenario=ONE)
    assert report.exit_code == 0
    assert report.notes[-1] == "the verdict is not recorded in `llmconv.json`: No space left on device"
    assert (full / "llmconv.json").read_bytes() == before and not list(full.glob(".llmconv-*"))


def test_a_run_that_is_interrupted_while_it_records_leaves_the_old_manifest(
    folder: Path, verified: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: NewEntry) -> None:
        raise KeyboardInterrupt

    before = (folder / "llmconv.json").read_bytes()
    monkeypatch.setattr(NewEntry, "place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verified()
    assert (folder / "llmconv.json").read_bytes() == before and not list(folder.glob(".llmconv-*"))


@pytest.mark.slow
def test_what_a_killed_run_left_is_removed(folder: Path, verified: Callable[..., Report]) -> None:
    (folder / temporary_name()).write_text("half")
    verified()
    assert not list(folder.glob(".llmconv-*"))


def report_of(folder: Path) -> Report:
    return Report(folder.name, folder.name, "quick", [Check("prefill", "decode.onnx", "logits")])


def judged(folder: Path) -> Judged:
    from llmconv.output.manifest import graph_entries  # noqa: PLC0415
    from llmconv.runtime.onnxruntime.session_settings import SessionSettings  # noqa: PLC0415
    from llmconv.verify.graph_folder import _models  # noqa: PLC0415

    entries = graph_entries(folder)
    return Judged.of_graphs(VerifiedFolder(folder, entries, _models(folder, entries), SessionSettings()))


def test_a_graph_that_changes_during_the_run_is_recorded_as_it_was(folder: Path) -> None:
    before = digest(folder / "decode.onnx")
    with recording(judged(folder), folder, report_of(folder)):
        (folder / "decode.onnx").write_bytes(b"other")
    assert manifest_of(folder)["verified"]["graphs"]["decode.onnx"] == before


@pytest.mark.slow
def test_the_method_is_recorded(folder: Path) -> None:
    report = report_of(folder)
    report.method = "induction"
    with recording(judged(folder), folder, report):
        pass
    assert parse_verdict(manifest_of(folder)["verified"]).method == "induction"


@pytest.mark.slow
def test_an_error_during_the_run_keeps_the_last_verdict(folder: Path, verified: Callable[..., Report]) -> None:
    verified()
    before = (folder / "llmconv.json").read_bytes()
    with (
        pytest.raises(InputRefused),
        recording(judged(folder), folder, report_of(folder)),
    ):
        raise InputRefused("no", hint="none")
    assert (folder / "llmconv.json").read_bytes() == before


@pytest.mark.slow
def test_an_export_drops_the_verdict_and_a_resumed_one_that_writes_nothing_keeps_it(
    folder: Path, verified: Callable[..., Report]
) -> None:
    verified()
    before = (folder / "llmconv.json").read_bytes()
    export(folder, prefill=True, incremental=True, resume=True)
    assert (folder / "llmconv.json").read_bytes() == before
    export(folder, unified=True)
    assert "verified" not in manifest_of(folder)


def test_a_resumed_export_still_detects_a_changed_source(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "out", incremental=True)
    verify(tmp_path / "out", scenario=ONE)
    assert "verified" in manifest_of(tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors)
    save_file({**tensors, name: tensors[name] + 1}, folder / "model.safetensors")
    with pytest.raises(InputRefused, match="made from another input"):
        export(folder, tmp_path / "out", incremental=True, resume=True)


@pytest.mark.slow
def test_a_new_export_over_a_verified_folder_has_no_verdict(folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "out", incremental=True)
    verify(tmp_path / "out", scenario=ONE)
    export(folder, tmp_path / "out", incremental=True, overwrite=True)
    assert "verified" not in manifest_of(tmp_path / "out")


def test_no_record_of_a_single_graph_is_a_usage_error(folder: Path) -> None:
    done = CliRunner().invoke(main, ["verify", "--graph", str(folder / "decode.onnx"), "--no-record"])
    assert done.exit_code == 2 and "`--no-record` applies to FOLDER only" in done.stderr


@pytest.mark.slow
def test_a_passing_run_of_fewer_checks_keeps_the_verdict_of_more(folder: Path, eager: Callable[[str], Eager]) -> None:
    def run(*scenarios: str) -> Report:
        return verify(folder, eager=eager("llama"), scenario=scenarios)

    run("prefill, 3 tokens", "prefill, 1 token")
    before = manifest_of(folder)["verified"]
    kept = run("prefill, 3 tokens")
    assert manifest_of(folder)["verified"] == before
    assert f"`llmconv.json` keeps the verdict on these files by {before['checks']['passed']} checks" in kept.notes
    run("prefill, 7 tokens")
    assert manifest_of(folder)["verified"]["only"] == ["prefill, 7 tokens"]


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "fail"},
        {"graphs": {"decode.onnx": "1" * 64}},
        {"versions": {"llmconv": "0.2"}},
        {"reference": "other"},
        {"only": ["batch of 4"]},
        {"checks": {"passed": 9, "failed": 0, "skipped": 0}},
        {"weights": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_verdict_that_says_something_else_is_not_contained(change: dict[str, Any]) -> None:
    weights = {"model.safetensors": {"bytes": 9, "header_sha256": "2" * 64, "sha256": "3" * 64}}
    wide = {
        "verdict": "pass",
        "method": "whole",
        "suite": "quick",
        "only": ["batch of 3", "prefill, 1 token"],
        "checks": {"passed": 9, "failed": 0, "skipped": 0},
        "unseen": [],
        "reference": "merged",
        "versions": {"llmconv": "0.1"},
        "graphs": {"decode.onnx": "0" * 64},
        "weights": weights,
    }
    narrow = {**wide, "only": ["batch of 3"], "checks": {"passed": 3, "failed": 0, "skipped": 0}}
    assert parse_verdict(wide).contains(parse_verdict(narrow))
    assert not parse_verdict(wide).contains(parse_verdict({**narrow, **change}))
