"""What all tests share: tiny seeded models of every supported family, made once, and folders of given tensors."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from tests.builders.seeded import TEXT, save_seeded
from tests.builders.slow_rows import each_value
from tests.builders.tracing import SHARED, trace_once
from tests.cli.hint_words import hint_problem, path_of
from tests.stores.bucket import Bucket, served


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a test run share their traces."""
    if SHARED not in os.environ:
        os.environ[SHARED] = folder = tempfile.mkdtemp(prefix="llmconv-traces-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection() -> None:
    """Nothing becomes garbage while tests are collected."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rows of parametrized tests are slow if `slow_rows` has their id, or `quick_rows` has those of others."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        row = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        slow, quick = item.get_closest_marker("slow_rows"), item.get_closest_marker("quick_rows")
        if (slow and row in slow.args) or (quick and row not in quick.args):
            item.add_marker(pytest.mark.slow)
        for mark in filter(None, (slow, quick)):
            test = f"{item.nodeid.partition('[')[0]} {mark.name}"
            unknown.setdefault(test, {*mark.args}).discard(row)
    wrong = {test: ids for test, ids in unknown.items() if ids}
    if wrong and not any("::" in str(given) for given in config.args):  # of some tests not all rows are collected
        raise pytest.UsageError(f"no row has these ids: {wrong}")
    if os.environ.get("ROWS") != "all" and not any("[" in str(given) for given in config.args):
        _leave_out_rows(config, items)


def _leave_out_rows(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the slow rows of a test, as many as contain every value of every parameter; `ROWS=all` runs the others too."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for rows in tests.values():
        chosen = [rows[at] for at in each_value([row.callspec.params for row in rows])]
        spread = rows[0].get_closest_marker("one_row_in")
        left_out |= {*rows} - {*(chosen[:: spread.args[0]] if spread else chosen)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Thousands of tests and the libraries that they import are never garbage: no collection looks at them again."""
    import hypothesis  # noqa: F401, PLC0415 - its plugin imports it later, and then looks for references to objects

    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module leaves is kept for the session: no collection, of which a verification makes some, looks again."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


DECODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A Llama-like decoder with grouped-query attention."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": {**DECODER, "sliding_window": None},
    "qwen2": {**DECODER, "tie_word_embeddings": True},
    "qwen3": {**DECODER, "head_dim": 16},
    "gemma2": {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "qwen3_moe": {
        **DECODER,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "bloom": {
        "vocab_size": 96,
        "hidden_size": 64,
        "n_layer": 4,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}


def save_tiny(model_type: str, folder: Path, **changes: Any) -> Path:
    """Saves a seeded float32 model, every weight random; `changes` are fields beside those in `CONFIGS`."""
    import transformers  # noqa: PLC0415

    assert model_type in CONFIGS or changes, "the default sizes are those of a real model, of many gigabytes"
    config = transformers.AutoConfig.for_model(model_type, **(CONFIGS.get(model_type, {}) | changes))
    return save_seeded(config, folder, TEXT)


@pytest.fixture(scope="session", autouse=True)
def _followed_hints() -> Iterator[None]:
    """Every hint with which a command refuses an input in a test can be followed as it is written."""
    invoke = CliRunner.invoke

    def checked(self: CliRunner, cli: Any, args: Any = None, *rest: Any, **given: Any) -> Result:
        result = invoke(self, cli, args, *rest, **given)
        words = shlex.split(args) if isinstance(args, str) else [str(word) for word in args or ()]
        if result.exit_code:
            for hint in re.findall(r"^hint: (.*)$", result.stderr, re.MULTILINE):
                problem = hint_problem(path_of(words) if words else "", hint)
                assert not problem, f"the hint of {words} cannot be followed: {problem}"
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CliRunner, "invoke", checked)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny(model_type)` is the folder of a tiny model; do not write into it."""
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = save_tiny(model_type, tmp_path_factory.mktemp("tiny") / model_type)
        return folders[model_type]

    return folder


@pytest.fixture(scope="session")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with graphs and a tokenizer of characters with a chat template; do not write into it."""
    from tests.builders.chatting import save_chatting  # noqa: PLC0415 - only the tests that ask for it pay for it

    trace_once()
    return save_chatting(tmp_path_factory.mktemp("chatting") / "tiny-chat")


@pytest.fixture(scope="session")
def seeing_qwen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`seeing_qwen(model_type)`: a model with images, its graphs, processor and tokenizer; do not write into it."""
    from llmconv.export.exporter import export  # noqa: PLC0415 - only the tests that ask for graphs pay for it
    from tests.builders.seeing_qwen import save_qwen  # noqa: PLC0415

    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = save_qwen(tmp_path_factory.mktemp("seeing") / model_type, model_type)
            export(folders[model_type])
        return folders[model_type]

    return folder


@pytest.fixture
def save_tensors(tmp_path: Path) -> Callable[..., Path]:
    """`save_tensors(name, {tensor name: torch tensor}, {json file name: content})` is a folder with weights.

    The weights file of an adapter is `weights="adapter_model.safetensors"`.
    """
    from safetensors.torch import save_file  # noqa: PLC0415

    def save(
        name: str, tensors: Mapping[str, Any], files: Mapping[str, Any], weights: str = "model.safetensors"
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file(dict(tensors), folder / weights)
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
        return folder

    return save


@pytest.fixture(scope="session")
def talking_as(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`talking_as(model_type)`: weights, two graphs and a tokenizer of characters; do not write into it."""
    from llmconv.export.exporter import export  # noqa: PLC0415 - only the tests that ask for graphs pay for it
    from tests.builders.talking import save_letters  # noqa: PLC0415

    trace_once()
    folders: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in folders:
            home = tmp_path_factory.mktemp("talking") / model_type
            shutil.copytree(tiny(model_type), home)
            export(home, prefill=True, incremental=True)
            folders[model_type] = save_letters(home)
        return folders[model_type]

    return folder


@pytest.fixture(scope="session")
def talking(talking_as: Callable[[str], Path]) -> Path:
    """A Llama with weights, prefill.onnx, decode.onnx and a tokenizer of characters; do not write into it."""
    return talking_as("llama")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model reads its tokens as words, without a space before the first, as Llama 2's tokenizer does."""
    from llmconv.generation import TextModel  # noqa: PLC0415

    class Words:
        special_texts: ClassVar[dict[int, str]] = {}

        def __call__(self, tokens: Sequence[int]) -> str:
            return " ".join(f"w{token}" for token in tokens)

    monkeypatch.setattr(TextModel, "decode", property(lambda _: Words()))


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """The bucket of an S3 server that runs as long as the tests; see `bucket`."""
    with served(tmp_path_factory.mktemp("stores")) as found:
        yield found


@pytest.fixture
def bucket(bucket_server: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A folder of this test in a bucket of a faultless S3 server, with its credentials in the environment."""
    for name, value in bucket_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket_server.set_faults()
    return replace(bucket_server, prefix=f"{tmp_path.parent.name}/{tmp_path.name}")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
