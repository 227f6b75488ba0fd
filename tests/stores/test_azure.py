"""Azure Blob Storage, as far as its emulator is like it: ETags have quotes in some answers and not in others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmconv.convert import merge_lora, to_hf
from llmconv.errors import InputRefused, OutputFailed
from llmconv.export.exporter import export
from llmconv.output.store_folder import clean
from llmconv.output.work import Finish, Part
from tests.stores.azure import ENVIRONMENT, HOME, container, is_free

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[2] / "examples/tiny-llama/ep4-ba2400-rank0.pt"
ADAPTER = CHECKPOINT.parent / "adapter"
SIZE = "100KB"


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A container, with its credentials in the environment."""
    if not ((HOME / "complete").exists() and shutil.which("node")):
        pytest.skip("needs azurite: `make clients`")
    if not is_free():
        pytest.skip("needs port 10000, where obstore expects azurite")
    with pytest.MonkeyPatch.context() as patch, container(tmp_path_factory.mktemp("azurite"), "models") as uri:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield uri


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_what_is_written_and_read_there_has_the_bytes_of_a_local_run(azure: str, tmp_path: Path) -> None:
    to_hf(CHECKPOINT, f"{azure}/base", max_shard_size=SIZE)
    merge_lora(f"{azure}/base", ADAPTER, f"{azure}/merged")
    to_hf(f"{azure}/merged", tmp_path / "back", max_shard_size="keep")
    to_hf(CHECKPOINT, tmp_path / "base", max_shard_size=SIZE)
    merge_lora(tmp_path / "base", ADAPTER, tmp_path / "merged")
    assert weights(tmp_path / "back") == weights(tmp_path / "merged")
    export(f"{azure}/merged", tmp_path / "graphs", graphs_only=True)
    assert (tmp_path / "graphs" / "decode.onnx").is_file()


def test_a_second_run_is_refused_and_parts_meet(azure: str) -> None:
    to_hf(CHECKPOINT, f"{azure}/parts", max_shard_size=SIZE, work=Part(0, 2))
    with pytest.raises(OutputFailed, match="another run is writing"):
        to_hf(CHECKPOINT, f"{azure}/parts", max_shard_size=SIZE)
    to_hf(CHECKPOINT, f"{azure}/parts", max_shard_size=SIZE, work=Part(1, 2))
    to_hf(CHECKPOINT, f"{azure}/parts", max_shard_size=SIZE, work=Finish())
    with pytest.raises(InputRefused, match="already exists"):
        to_hf(CHECKPOINT, f"{azure}/parts", max_shard_size=SIZE)


def test_clean_leaves_nothing_of_an_unfinished_run(azure: str) -> None:
    to_hf(CHECKPOINT, f"{azure}/unfinished", max_shard_size=SIZE, work=Part(0, 2))
    assert clean(f"{azure}/unfinished").objects
    assert not clean(f"{azure}/unfinished").objects
