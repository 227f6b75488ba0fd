"""Every hostile input is refused in one clear line or has no effect: proven in a process that is audited."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import (
    adapters,
    advisories,
    configs,
    dcp,
    deepspeed,
    deltas,
    dialects,
    files,
    foreign,
    foreign_deltas,
    gguf,
    legacy,
    megatron,
    models,
    own_code,
    packed,
    pickles,
    ranks,
    states,
    tensors,
    zips,
)
from tests.hostile.case import CANARY, Case
from tests.hostile.honest import composer, meta, mindspore, paddle, save

ROOT = Path(__file__).parents[2]
SECONDS = 8
"""Of a fast idle core, that any input may cost; the bombs that run into a limit cost the most."""

HONEST: dict[str, Case] = {
    "honest: composer": Case(lambda folder: save(folder, composer()), None),
    "honest: meta": Case(meta, None),
    "honest: accessory": Case(configs.accessory_like, None),
    "honest: paddle": Case(paddle, None),
    "honest: mindformers": Case(mindspore, None, {"config": ["run.yaml"]}),
    "honest: zip": zips.CASES["a zip written by hand"],
    "honest: refused": Case(lambda folder: folder, "not of a training format"),
}
KINDS: dict[str, Any] = {
    "pickle": pickles,
    "zip": zips,
    "tensor": tensors,
    "config": configs,
    "file": files,
    "packed": packed,
    "dcp": dcp,
    "deepspeed": deepspeed,
    "megatron": megatron,
    "ranks": ranks,
    "state": states,
    "legacy": legacy,
    "dialect": dialects,
    "adapter": adapters,
    "foreign": foreign,
    "delta": deltas,
    "foreign delta": foreign_deltas,
    "gguf": gguf,
    "model": models,
    "code": own_code,
    "advisory": advisories,
}
"""Kind to the module with its `CASES`, and with what is `HONEST` and only these need."""

CASES = {f"{kind}: {name}": case for kind, module in KINDS.items() for name, case in module.CASES.items()}

CONVERTED = {"hf/config.json", "hf/params.json", "hf/model.ckpt"}

HEAVY = re.compile(
    r"adapter: (names: 20,000 that|rank pattern: ten|replication: 100,000)|config: yaml: billion"
    r"|dcp: (blob: a list a million|chunks: 20,000|chunks: on a)|deepspeed: (weights of stage 3: ten|weights: ten)"
    r"|delta: (index: 30 MB|rows: one, of a|frames: none)|file: safetensors: 100,000|foreign: torchtune: 20,000"
    r"|legacy: a million|megatron: a thousand|model: mpt: 20,000|packed: (gz: a bomb|tar: pax|zst: a bomb|zeros after)"
    r"|pickle: (6 million|a (list|tuple) a million)|state: (lightning: a list a|state: 15,000|index: 20,000)"
    r"|tensor: 20,000|zip: 60,000"
)
"""Cases of more than half a second, of which one after another takes minutes."""

Result = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """`results(name)`: what inspect and the conversion did with a case; all quick ones run at once, in one process.

    Several pytest processes share what the first of them has found.
    """
    found: dict[str, Result] = {}
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def result(name: str) -> Result:
        if name not in found:
            heavy = HEAVY.match(name) is not None
            with open(shared / f"hostile-{heavy}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found.update(once(heavy, shared / f"hostile-{heavy}"))
        return found[name]

    return result


def once(heavy: bool, folder: Path) -> dict[str, Result]:
    """The results of the heavy or the other cases; they run where nobody has run them."""
    if not (folder / "results.json").exists():
        folder.mkdir()
        run({name: case for name, case in CASES.items() if (HEAVY.match(name) is not None) == heavy}, folder)
    results: dict[str, Result] = json.loads((folder / "results.json").read_text())
    return results


def run(cases: dict[str, Case], folder: Path) -> None:
    """Builds cases and runs them in a child, after honest ones of every kind."""
    honest = {
        f"honest: {kind}: {name}": case
        for kind, module in KINDS.items()
        for name, case in getattr(module, "HONEST", {}).items()
    }
    named = enumerate((HONEST | honest | cases).items())
    jobs = [job(name, case, folder / f"case{number}") for number, (name, case) in named]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "tmp").mkdir()
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "torch")  # torch makes it when it is imported
    command = [sys.executable, "-m", "tests.hostile.child", str(folder / "jobs.json"), str(folder / "results.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list((folder / "tmp").iterdir()), "something stays in TMPDIR when the process has ended"


def job(name: str, case: Case, place: Path) -> dict[str, Any]:
    """What the child is written of a case."""
    (place / "in").mkdir(parents=True)
    source = case.build(place / "in")
    options = {key: _in_folder(value, place / "in") for key, value in case.options.items()}
    honest = name.startswith("honest: ")
    written = {"source": str(source), "place": str(place), "options": options, "command": case.command}
    return {"name": name, "honest": honest, **written}


def _in_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [str(folder / file) for file in value]
    return str(folder / value) if isinstance(value, Path) else value


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if HEAVY.match(name) else []) for name in CASES]
)
def test_it_is_refused_in_a_plain_line_or_has_no_effect(results: Callable[[str], Result], name: str) -> None:
    runs, case = results(name), CASES[name]
    for found in runs.values():
        assert found["outcome"] in ("done", "refused"), found["message"]
        assert found["events"] == [] and found["temporary"] == []
        assert found["seconds"] < SECONDS
        if found["outcome"] == "refused":
            assert found["message"].isprintable() and found["hint"].isprintable() and found["hint"]
            assert len(found["message"]) < 600 and not found["message"].endswith(".")
    assert not Path(CANARY).exists()
    assert runs["inspect"]["left"] == []
    converted = runs["convert"]
    if case.refused is None:
        assert converted["outcome"] == "done", converted["message"]
        assert CONVERTED & {*converted["left"]} and not any("partial" in file for file in converted["left"])
        assert not any(file.endswith((".py", ".pkl", ".so")) for file in converted["left"])
    else:
        assert converted["outcome"] == "refused", converted["message"]
        assert re.search(case.refused, converted["message"]), converted["message"]
        assert converted["code"] == 3 and converted["left"] == []


ACTS = {
    "open('/etc/hostname')": "open",
    "open('/tmp/llmconv-elsewhere', 'w')": "open",
    "import antigravity_that_is_not_there": "import",
    "import os; os.system('true')": "os.system",
    "import subprocess; subprocess.run(['true'])": "subprocess.Popen",
    "import socket; socket.socket()": "socket.__new__",
    "eval('1')": "compile",
    "import ctypes; ctypes.CDLL(None).system": "ctypes.dlsym",
    "os.symlink('/etc/passwd', tempfile.gettempdir() + '/x')": "os.symlink",
    "import shutil; shutil.rmtree('/nonexistent-folder', ignore_errors=True)": "shutil.rmtree",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the watch sees of each act; one process does them all, since it imports torch."""
    folder = tmp_path_factory.mktemp("watched")
    code = f"""
import ctypes, json, os, pathlib, shutil, socket, subprocess, sys, tempfile
from tests.hostile.child import Watch
watch, found = Watch(), {{}}
sys.addaudithook(watch.hook)
for act in {list(ACTS)!r}:
    code = compile(act, "<act>", "exec")
    watch.seen.clear()
    watch.begin(pathlib.Path({str(folder)!r}, "in", "x.pt"), pathlib.Path({str(folder)!r}, "out", "hf"))
    try:
        exec(code)
    except Exception:
        pass
    watch.active = False
    found[act] = list(watch.seen)
print(json.dumps(found))
"""
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("act", ACTS)
def test_the_watch_sees(seen: dict[str, list[str]], act: str) -> None:
    assert ACTS[act] in {line.partition(" ")[0] for line in seen[act]}, seen[act]
