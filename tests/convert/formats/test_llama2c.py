"""llama2.c: genuine `ckpt.pt` and `.bin` files of every version give the upstream model's logits and tokens."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer

from llmconv.convert import to_hf
from llmconv.convert.formats import formats
from llmconv.convert.formats.llama2c import header_of
from llmconv.convert.models.head_and_dtype import settled
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput
from tests.builders.torch_states import FIXTURES

FOLDER = FIXTURES / "llama2c"
UNTIED = "grouped_untied_compiled"
CASES = ["tied", "tied/v0.bin", "tied/v1.bin", UNTIED, f"{UNTIED}/v0.bin", "codes", "codes_untied/model.bin"]


@pytest.mark.quick_rows("tied/v1.bin", UNTIED, "codes")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_upstream_model(tmp_path: Path, logits_of: Callable[..., Any], case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")
    with np.load(FOLDER / case.split("/")[0] / "reference.npz") as reference:
        assert np.abs(logits_of(tmp_path / "hf", reference["input_ids"]) - reference["logits"]).max() < 1e-5


@pytest.mark.parametrize("case", [*CASES, "tied/ckpt.pt"])
def test_only_this_format_claims_folder_and_file(case: str) -> None:
    assert [name for name, found in formats().items() if found.detect(FOLDER / case)] == ["llama2c"]


@pytest.mark.parametrize(("case", "bins"), [("tied", ["v0.bin", "v1.bin"]), (UNTIED, ["v0.bin"])])
def test_files_have_the_trainers_weights_to_the_bit(case: str, bins: list[str]) -> None:
    whole = settled(open_training(FOLDER / case))
    assert whole.config["tie_word_embeddings"] is (case == "tied")
    for name in bins:
        found = settled(open_training(FOLDER / case / name))
        assert found.config == whole.config and set(found) == set(whole)
        assert all(np.array_equal(found[one].read(), whole[one].read()) for one in whole)


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_codes_are_the_same_in_row_blocks_of_any_size(blocks: int) -> None:
    matrix = open_training(FOLDER / "codes")["model.layers.0.mlp.down_proj.weight"]  # rows of 1.5 groups
    parts = [matrix.rows(at, min(at + blocks, matrix.num_rows)) for at in range(0, matrix.num_rows, blocks)]
    assert matrix.shape == (32, 48) and np.array_equal(np.concatenate(parts), matrix.read())


@pytest.mark.parametrize("case", ["tied", UNTIED])
def test_tokens_are_those_of_sentencepiece(tmp_path: Path, case: str) -> None:
    to_hf(FOLDER / case, tmp_path / "hf")  # from `tokenizer.model`, and from `tokenizer.bin`
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tied" / "tokenizer.model"))
    for text in ("once upon a time", "Lily's dog, 512 ran\n\tfar", "ünknown 漢字 mom"):
        assert ours(text)["input_ids"] == [1, *model.encode(text)]
        assert ours.decode(ours(text)["input_ids"], skip_special_tokens=True) == text
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [2, 1]


def test_a_tokenizer_of_another_size_is_not_taken(tmp_path: Path) -> None:
    shutil.copy(FOLDER / UNTIED / "tokenizer.bin", tmp_path)
    shutil.copy(FOLDER / "tied" / "v1.bin", tmp_path / "model.bin")
    assert open_training(tmp_path).side_files.keys() > {"tokenizer.json"}
    data = (tmp_path / "tokenizer.bin").read_bytes()
    (tmp_path / "tokenizer.bin").write_bytes(data + struct.pack("<fI", 0, 1) + b"x")
    found = open_training(tmp_path)
    assert "tokenizer.json" not in found.side_files and any("has 321 tokens" in one for one in found.warnings)
    given = open_training(tmp_path, tokenizer=FOLDER / UNTIED / "tokenizer.bin")
    assert "tokenizer.json" in given.side_files
    (tmp_path / "tokenizer.bin").write_bytes(data[:-1])
    with pytest.raises(MalformedInput, match=r"tokenizer\.bin"):
        open_training(tmp_path)


@pytest.mark.parametrize("cut", [-4, 4])
def test_a_file_of_another_size_is_refused(tmp_path: Path, cut: int) -> None:
    for name in ("v0.bin", "v1.bin"):
        data = (FOLDER / "tied" / name).read_bytes()
        (tmp_path / name).write_bytes(data[:cut] if cut < 0 else data + bytes(cut))
        with pytest.raises(MalformedInput, match="by the sizes in its header"):
            open_training(tmp_path / name)


@pytest.mark.parametrize(("at", "value"), [(8, 0), (8, -16), (16, 1 << 30), (20, 3), (24, 3), (24, 0), (28, -320)])
def test_impossible_headers_are_refused(tmp_path: Path, at: int, value: int) -> None:
    data = bytearray((FOLDER / "tied" / "v1.bin").read_bytes())
    struct.pack_into("<i", data, at, value)
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(MalformedInput):
        open_training(tmp_path / "model.bin")


def test_other_versions_and_other_files(tmp_path: Path) -> None:
    data = bytearray((FOLDER / "tied" / "v1.bin").read_bytes())
    struct.pack_into("<i", data, 4, 3)
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(UnsupportedInput, match="version 3"):
        open_training(tmp_path / "model.bin")
    for content in (b"", b"abc", bytes(400), b"\x01" * 400, bytes(range(256)) * 2):
        (tmp_path / "other.bin").write_bytes(content)
        assert header_of(tmp_path / "other.bin") is None


@pytest.mark.parametrize(
    "change", [{"n_layers": 3}, {"n_layers": 1}, {"n_heads": 3}, {"dim": 0}, {"vocab_size": 321}, {"n_kv_heads": 1}],
    ids=str,
)  # fmt: skip
def test_model_args_of_another_model_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    content = torch.load(FOLDER / "tied" / "ckpt.pt")
    content["model_args"] |= change
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(InputRefused):
        open_training(tmp_path)
