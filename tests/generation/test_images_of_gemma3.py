"""Gemma 3: texts about images are those of transformers; an image is read whole, or the prompt is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.export import export
from llmconv.generation import Prompt, TextModel, generate
from tests.builders.eager_images import eager_tokens
from tests.builders.seeing import save_picture, save_seeing
from tests.builders.seeing_gemma import BOI, save_gemma3

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": ()}
TWO = f"Look:{BOI} and {BOI}?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with its graphs."""
    folder = save_gemma3(tmp_path_factory.mktemp("seeing") / "gemma3")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two images of different sizes and formats."""
    home = tmp_path_factory.mktemp("pictures")
    return [save_picture(home / "a.png"), save_picture(home / "b.jpg", seed=1, size=(9, 31))]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_the_text_is_that_of_the_eager_model(folder: Path, pictures: list[Path], backend: str) -> None:
    for text, images in ((TWO, pictures), (f"{BOI}What is this?", pictures[1:])):
        found = generate(folder, Prompt(text, images=tuple(images)), backend=backend, **OPTIONS).completions[0]
        assert found.tokens == eager_tokens(folder, text, images, 8)


@pytest.mark.slow
def test_images_precede_a_text_without_markers(folder: Path, pictures: list[Path]) -> None:
    found = generate(folder, Prompt("Look", images=tuple(pictures)), **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, f"{BOI}{BOI}Look", pictures, 8)


@pytest.mark.slow
def test_each_prompt_of_a_batch_gives_the_text_that_it_gives_alone(folder: Path, pictures: list[Path]) -> None:
    model = TextModel.open(folder)
    prompts: list[Any] = ["A text", Prompt(f"{BOI}Look", images=(pictures[0],)), Prompt(TWO, images=tuple(pictures))]
    together = generate(model, prompts, **OPTIONS).completions
    assert [one.tokens for one in together] == [
        generate(model, [one], **OPTIONS).completions[0].tokens for one in prompts
    ]


@pytest.mark.slow
def test_an_image_is_read_whole_where_texts_are_read_in_steps(folder: Path, pictures: list[Path]) -> None:
    model = TextModel.open(folder)
    assert model.images
    prompt = model.images.encode(TWO, pictures, starts=True)
    assert prompt.embeddings
    settings = model.defaults.but(**OPTIONS)
    pieces = list(model.stream([prompt.ids], settings, None, 3, [prompt.embeddings()]))
    assert [piece.token for piece in pieces] == eager_tokens(folder, TWO, pictures, 8)


@pytest.mark.slow
def test_a_request_that_marks_tokens_is_read_whole(folder: Path) -> None:
    model = TextModel.open(folder)
    kinds = {"token_type_ids": np.array([0, 1, 1, 1, 1, 0])}
    ids, settings = model.encode("abcdef"), model.defaults.but(**OPTIONS)
    found = [
        [piece.token for piece in model.stream([ids], settings, None, most, inputs=[kinds]) if piece.token is not None]
        for most in (0, 2)
    ]
    assert found[0] == found[1]


@pytest.mark.slow
def test_graphs_that_would_divide_an_image_refuse_it(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"shapes": "static", "max_seq_len": 64}
    short = export(folder, tmp_path / "short", **sizes, prompt_len=8).folder
    with pytest.raises(InputRefused, match="8 tokens at a time"):
        generate(short, Prompt(TWO, images=tuple(pictures)), **OPTIONS)
    long = export(folder, tmp_path / "long", **sizes, prompt_len=32).folder
    found = generate(long, Prompt(TWO, images=tuple(pictures)), **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, TWO, pictures, 8)
    assert generate(short, "A text", **OPTIONS).completions[0].tokens == eager_tokens(folder, "A text", [], 8)


@pytest.mark.slow
def test_a_start_of_an_image_without_an_image_is_refused(folder: Path) -> None:
    with pytest.raises(InputRefused, match="placeholder of an image, and no image"):
        generate(folder, f"Look:{BOI}", **OPTIONS)


@pytest.mark.slow
def test_the_processor_of_another_family_is_refused(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shutil.copy(save_seeing(tmp_path / "llava") / "processor_config.json", copy)
    with pytest.raises(InputRefused, match="no attribute 'boi_token'"):
        generate(copy, Prompt("Look", images=(pictures[0],)))
