"""The file of completions: links at its name are never followed, and a full disk is reported with the path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmconv.errors import InputRefused, OutputFailed
from llmconv.generation import TextModel, generate
from llmconv.generation.completions import Completion, CompletionFile
from llmconv.generation.prompts import Prompt

PROMPTS = [Prompt("a"), Prompt("b")]


IMAGE = Image.new("RGB", (3, 2))


def row(last: float) -> Any:
    """An array of which numpy shows the first and last numbers alone, and one of which is `last` but two."""
    rows = np.zeros((2000, 2), np.float32)
    rows[1000, 0] = last
    return rows


def completion(prompt: str, text: str = "x") -> Completion:
    return Completion(prompt=prompt, text=text, tokens=[1], prompt_tokens=1, finish="length")


def test_a_link_at_its_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(InputRefused, match="is a symbolic link, so it is not written to"):
        CompletionFile(tmp_path / "out.jsonl", PROMPTS, {})
    assert not (tmp_path / "victim").read_bytes()


def test_overwrite_replaces_a_link_but_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "victim")
    with CompletionFile(tmp_path / "out.jsonl", PROMPTS, {}, overwrite=True) as file:
        file.write([completion("a")])
    assert (tmp_path / "victim").read_text() == "dear" and not (tmp_path / "out.jsonl").is_symlink()


def test_no_file_is_created_before_the_first_batch(tmp_path: Path) -> None:
    with CompletionFile(tmp_path / "out.jsonl", PROMPTS, {}):
        assert not [*tmp_path.iterdir()]
    with CompletionFile(tmp_path / "out.jsonl", PROMPTS, {}) as file:
        file.write([completion("a")])
        assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", ".out.jsonl.options.json"}


def test_overwrite_leaves_the_old_file_until_the_first_batch(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with CompletionFile(path, PROMPTS, {}) as file:
        file.write([completion("a"), completion("b")])
    before = {entry: entry.read_bytes() for entry in tmp_path.iterdir()}
    with CompletionFile(path, PROMPTS, {"seed": 1}, overwrite=True) as file:
        assert {entry: entry.read_bytes() for entry in tmp_path.iterdir()} == before
        file.write([completion("a", "new")])
    assert path.read_text().count("\n") == 1 and '"new"' in path.read_text()
    with CompletionFile(path, PROMPTS, {"seed": 1}) as file:
        assert file.done == 1
        file.write([completion("b")])
    assert path.read_text().count("\n") == 2


def test_overwrite_does_not_write_through_a_hard_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    os.link(tmp_path / "victim", tmp_path / "out.jsonl")
    with CompletionFile(tmp_path / "out.jsonl", PROMPTS, {}, overwrite=True) as file:
        file.write([completion("a")])
    assert (tmp_path / "victim").read_text() == "dear"


def test_an_incomplete_line_stays_until_the_next_batch(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with CompletionFile(path, PROMPTS, {}) as file:
        file.write([completion("a")])
    path.write_text(path.read_text() + '{"prompt')
    with CompletionFile(path, PROMPTS, {}) as file:
        assert path.read_text().endswith('{"prompt')
        file.write([completion("b")])
    assert [line[:13] for line in path.read_text().splitlines()] == ['{"prompt": "a', '{"prompt": "b']


def test_a_full_disk_leaves_the_old_file_even_with_overwrite(small_disk: Path) -> None:
    path = small_disk / "out.jsonl"
    with CompletionFile(path, PROMPTS, {}) as file:
        file.write([completion("a"), completion("b")])
    before = {entry: entry.read_bytes() for entry in small_disk.iterdir()}
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096 * 2))
    with (
        CompletionFile(path, PROMPTS, {}, overwrite=True) as file,
        pytest.raises(OutputFailed, match="No space left"),
    ):
        file.write([completion("a", "x" * 20_000)])
    (small_disk / "other").unlink()
    assert {entry: entry.read_bytes() for entry in small_disk.iterdir()} == before


def test_an_empty_file_with_a_second_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    os.link(tmp_path / "victim", tmp_path / "out.jsonl")
    with pytest.raises(InputRefused, match="hard link"):
        CompletionFile(tmp_path / "out.jsonl", PROMPTS, {})


def test_a_link_at_the_name_of_the_options_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    (tmp_path / ".out.jsonl.options.json").symlink_to(tmp_path / "victim")
    with CompletionFile(tmp_path / "out.jsonl", PROMPTS, {}) as file:
        file.write([completion("a")])
    assert (tmp_path / "victim").read_text() == "dear"


def test_after_a_full_disk_the_run_can_continue(small_disk: Path) -> None:
    path = small_disk / "out.jsonl"
    with CompletionFile(path, PROMPTS, {}) as file:
        file.write([completion("a")])
        (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        with pytest.raises(OutputFailed, match=r"`.*out\.jsonl` cannot be written: No space left"):
            file.write([completion("b", "x" * 20_000)])
    (small_disk / "other").unlink()
    with CompletionFile(path, PROMPTS, {}) as file:
        assert file.done == 1
        file.write([completion("b")])
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"embeddings": row(1)}, {"embeddings": row(2)}),
        ({"inputs": {"weights": row(1)}}, {"inputs": {"weights": row(2)}}),
        ({"images": (b"one",)}, {"images": (b"two",)}),
        ({"images": (IMAGE,)}, {"images": (Image.new("RGB", (3, 2), "red"),)}),
        ({"images": (IMAGE,)}, {"images": (IMAGE, IMAGE)}),
    ],
    ids=["embeddings", "inputs", "bytes", "images", "one more"],
)
def test_a_prompt_with_other_content_is_another_prompt(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    with CompletionFile(path, [Prompt("a", **first)], {}) as file:
        file.write([completion("a")])
    with CompletionFile(path, [Prompt("a", **first)], {}) as file:
        assert file.done == 1
    with pytest.raises(InputRefused, match="was begun with other prompts"):
        CompletionFile(path, [Prompt("a", **second)], {})


def test_a_changed_image_is_another_prompt(tmp_path: Path) -> None:
    path, image = tmp_path / "out.jsonl", tmp_path / "image.png"
    image.write_bytes(b"one")
    with CompletionFile(path, [Prompt("a", images=(image,))], {}) as file:
        file.write([completion("a")])
    image.write_bytes(b"two")
    with pytest.raises(InputRefused, match="was begun with other prompts"):
        CompletionFile(path, [Prompt("a", images=(image,))], {})
    image.unlink()
    with pytest.raises(InputRefused, match="cannot be read"):
        CompletionFile(path, [Prompt("a", images=(image,))], {})


@pytest.mark.parametrize("name", ["model.gguf", "decode.onnx_data", "decode.onnx.data", "weights.bin"])
def test_a_file_of_other_weights_is_not_continued(name: str, chatting: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(chatting, tmp_path / "model"))
    (folder / name).write_bytes(b"weights")
    options: dict[str, Any] = {"max_new_tokens": 1, "output_file": tmp_path / "out.jsonl"}
    generate(folder, ["a"], **options)
    (folder / name).write_bytes(b"other weights")
    with pytest.raises(InputRefused, match="was begun with other prompts or options"):
        generate(folder, ["a"], **options)


def test_a_file_is_continued_with_the_same_tokens_and_type_alone(chatting: Path, tmp_path: Path) -> None:
    model, path, chat = TextModel.open(chatting), tmp_path / "out.jsonl", [{"role": "user", "content": "a"}]
    options: dict[str, Any] = {"max_new_tokens": 1, "output_file": path}
    generate(model, [chat], **options)
    assert generate(model, [chat], **options).kept == 1
    usual, model.tokenizer.chat_template = model.tokenizer.chat_template, "{{ messages[0].content }}"
    with pytest.raises(InputRefused, match="was begun with other prompts or options"):
        generate(model, [chat], **options)
    model.tokenizer.chat_template = usual
    for dtype in ("float32", "bfloat16"):
        options = {"max_new_tokens": 1, "output_file": tmp_path / "torch.jsonl", "backend": "torch", "dtype": dtype}
        if dtype == "bfloat16":
            with pytest.raises(InputRefused, match="was begun with other prompts or options"):
                generate(chatting, "a", **options)
        else:
            generate(chatting, "a", **options)
