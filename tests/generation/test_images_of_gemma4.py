"""Gemma 4: texts about images of any size are those of transformers; the processor needs no torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import LlmconvError, UsageProblem
from llmconv.export import export
from llmconv.generation import Prompt, TextModel, generate
from llmconv.runtime.images.families import PatchProcessor
from tests.builders.seeing import save_picture
from tests.builders.seeing_gemma4 import BOI, EOI, IMAGE_ID, IMAGE_TOKEN, save_gemma4

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": ()}
TWO = "Look:~ and ~?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 with its graphs."""
    folder = save_gemma4(tmp_path_factory.mktemp("seeing") / "gemma4", max_position_embeddings=512)
    export(folder, embeds=True)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two images of different sizes and formats."""
    home = tmp_path_factory.mktemp("pictures")
    return [save_picture(home / "a.png"), save_picture(home / "b.jpg", seed=1, size=(9, 31))]


def eager_tokens(folder: Path, text: str, pictures: list[Path]) -> list[int]:
    """New tokens of transformers' model, on what its processor makes according to `test_the_processor_…`."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    made = PatchProcessor.of(folder)([text], [[Image.open(path).convert("RGB") for path in pictures]])
    given = {name: torch.from_numpy(np.asarray(array)) for name, array in made.items()}
    given["mm_token_type_ids"] = (given["input_ids"] == IMAGE_ID).long()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    found = model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=None)
    return [int(token) for token in found[0, given["input_ids"].shape[1] :]]


def test_the_processor_expands_placeholders_as_that_of_transformers(folder: Path, pictures: list[Path]) -> None:
    import transformers  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    images = [Image.open(path).convert("RGB") for path in pictures]
    processor = PatchProcessor.of(folder)
    made, ready = processor([TWO], [images]), processor.images(images, return_tensors="np")

    class Own(transformers.Gemma4Processor):  # type: ignore[misc]
        """Without the checks of its parts."""

        def __init__(self) -> None:
            self.image_token, self.boi_token, self.eoi_token = IMAGE_TOKEN, BOI, EOI

    first, second = (Own().replace_image_token(ready, at) for at in (0, 1))
    text = f"Look:{first} and {second}?"
    assert made["input_ids"].tolist() == [processor.tokenizer(text)["input_ids"]]
    assert len(first) != len(second) or first == second
    np.testing.assert_array_equal(made["pixel_values"], ready["pixel_values"])


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_the_text_is_that_of_the_eager_model(folder: Path, pictures: list[Path], backend: str) -> None:
    for text, images in ((TWO, pictures), ("~What is this?", pictures[1:])):
        found = generate(folder, Prompt(text, images=tuple(images)), backend=backend, **OPTIONS).completions[0]
        assert found.tokens == eager_tokens(folder, text, images)


def test_each_prompt_of_a_batch_gives_the_text_that_it_gives_alone(folder: Path, pictures: list[Path]) -> None:
    model = TextModel.open(folder)
    prompts: list[Any] = ["A text", Prompt("~Look", images=(pictures[0],)), Prompt(TWO, images=tuple(pictures))]
    together = generate(model, prompts, **OPTIONS).completions
    assert [one.tokens for one in together] == [
        generate(model, [one], **OPTIONS).completions[0].tokens for one in prompts
    ]


def test_a_model_with_embeddings_per_layer_takes_texts_only(tmp_path: Path, pictures: list[Path]) -> None:
    small = save_gemma4(tmp_path / "small", hidden_size_per_layer_input=16, vocab_size_per_layer_input=96)
    assert generate(small, "A text", backend="torch", **OPTIONS).completions[0].tokens
    with pytest.raises(UsageProblem, match="takes no images"):
        generate(small, Prompt("~What?", images=(pictures[0],)), backend="torch", **OPTIONS)
    with pytest.raises(LlmconvError, match="takes tokens"):
        rows = np.zeros((1, 64), dtype=np.float32)
        generate(small, Prompt("What?", embeddings=rows), backend="torch", **OPTIONS)
