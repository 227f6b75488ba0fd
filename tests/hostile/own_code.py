"""Models with code of their own: nothing runs without consent, and nothing is copied that `auto_map` cannot name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.deltas import model, tuned
from tests.hostile.honest import CONFIG, weights
from tests.hostile.pickles import PYTHON

MAP = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
LONG = "a" * 300
Change = Callable[[Path], object]


def own(name: str = "own.py", content: str | bytes = PYTHON) -> Change:
    """Puts a Python file into the folder."""

    def put(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return put


def rewritten(refused: str | None, change: Change | None = None, **config: Any) -> Case:
    """A Hugging Face folder that gets another dtype, without consent."""

    def build(folder: Path) -> Path:
        path = model(folder / "base", weights(), **{"auto_map": MAP, **config})
        (change or own())(path)
        return path

    return Case(build, refused, {"dtype": "float16"})


def converted(refused: str, **config: Any) -> Case:
    """Safetensors in a trainer's folder, whose configuration is given: a type that transformers does not have."""

    def build(folder: Path) -> Path:
        path = model(folder / "base", {f"module.{name}": tensor for name, tensor in weights().items()})
        (path / "config.json").write_text(json.dumps({**CONFIG, "auto_map": MAP, **config}))
        own()(path)
        return path

    return Case(build, refused)


def extracted(change: Change, found: Any = MAP, tokenizer: Any = None) -> Case:
    """A tuned model from which a delta is made; its code is not among the files to copy."""

    def build(folder: Path) -> Path:
        model(folder / "base", weights())
        path = model(folder / "tuned", tuned(), auto_map=found)
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer or {}))
        change(path)
        return path

    return Case(build, None, {"base": Path("base")}, "extract")


def merged_into(change: Change, found: Any = MAP) -> Case:
    """A base whose code is not among the files to copy, under a difference that is added to it."""

    def build(folder: Path) -> Path:
        change(model(folder / "base", weights(), auto_map=found))
        return model(folder / "delta", {name: tensor * 1e-3 for name, tensor in weights().items()})

    return Case(build, None, {"base": Path("base")}, "delta")


def link(target: str) -> Change:
    return lambda folder: (folder / "own.py").symlink_to(target)


def linked_folder(folder: Path) -> None:
    """`sub` leads to a folder next to the model's."""
    own("elsewhere/own.py")(folder.parent)
    (folder / "sub").symlink_to(folder.parent / "elsewhere")


def sparse(folder: Path) -> None:
    own()(folder)
    os.truncate(folder / "own.py", 8 << 30)


HONEST = {"extract": extracted(lambda folder: None), "delta": merged_into(lambda folder: None)}
CASES: dict[str, Case] = {
    "not run, a native type": rewritten(None),
    "not run, a type of its own": rewritten(None, model_type="own"),
    "not run, in a trainer's folder": converted("unsupported model_type", model_type="own"),
    "not run, a module that shadows another": rewritten(None, own("json.py")),
    "consent in the configuration": rewritten(None, trust_remote_code=True),
    "consent in the configuration, in a trainer's folder": converted(
        "unsupported model_type", model_type="own", trust_remote_code=True
    ),
    "a tokenizer's code": rewritten(
        None, lambda folder: own("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["own.T", null]}}')(folder)
    ),
    "above the folder": extracted(own("../own.py"), {"AutoModelForCausalLM": "../own.Model"}),
    "above the folder, with dots": extracted(own("../own.py"), {"AutoModelForCausalLM": "..own.Model"}),
    "a file of the system": extracted(own(), {"AutoModelForCausalLM": "/etc/passwd.Model"}),
    "another repository": extracted(own(), {"AutoModelForCausalLM": "evil/repository--own.Model"}),
    "a name with a zero": extracted(own(), {"AutoModelForCausalLM": "own\0.Model"}),
    "a name of 300 letters": extracted(own(), {"AutoModelForCausalLM": f"{LONG}.Model"}),
    "a name of 1,000 packages": extracted(own(), {"AutoModelForCausalLM": "a." * 1000 + "Model"}),
    "an auto_map of numbers": extracted(own(), {"AutoModel": 7, "AutoConfig": [None, 7, []], "x": {}}),
    "an auto_map that is a text": extracted(own(), "own.Model; import os"),
    "a tokenizer's file above": extracted(own("../own.py"), {}, {"auto_map": ["../own.T", "..own.T"]}),
    "a link to /etc/passwd": extracted(link("/etc/passwd")),
    "a link to a pipe": extracted(lambda folder: os.mkfifo(folder / "own.py")),
    "a link to /dev/zero": extracted(link("/dev/zero")),
    "behind a link": extracted(linked_folder, {"AutoModelForCausalLM": "sub.own.Model"}),
    "8 GB": extracted(sparse),
    "null bytes": extracted(own(content=b"import os\0\n")),
    "bytes that are not text": extracted(own(content=b"\xff\xfe\x00")),
    "a syntax error": extracted(own(content="def (")),
    "100,000 brackets": extracted(own(content="(" * 100_000)),
    "100,000 signs": extracted(own(content="x = " + "-" * 100_000 + "1")),
    "a sum of 100,000": extracted(own(content="x = " + "1+" * 100_000 + "1")),
    "an import from above": extracted(own(content="from .. import own")),
    "an import from far above": extracted(own(content="from ......etc import passwd")),
    "an import of what is missing": extracted(own(content="from .missing import x")),
    "a base with a syntax error": merged_into(own(content="def (")),
    "a base with a link": merged_into(link("/etc/passwd")),
}
