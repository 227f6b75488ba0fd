"""Prompts with images of models whose images become tiles or keep their sizes: the tokens are those of transformers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.export import export
from llmconv.generation import Prompt, generate
from llmconv.generation.images import ImageEncoder
from llmconv.runtime.images.families import image_family
from tests.builders.seeing import save_picture, save_seeing
from tests.builders.slow_rows import slow_but
from tests.builders.tiled import CONFIGS, MARKERS, UNLOADABLE, fields_of, save_tiled

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": ()}


@dataclass(frozen=True)
class Seeing:
    """A model with its graphs.

    Attributes:
        model_type: of the model.
        folder: of the model.
        processor: of the model.
        marker: text that stands for an image.
    """

    model_type: str
    folder: Path
    processor: Any
    marker: str


@pytest.fixture(scope="module", params=slow_but(CONFIGS, "idefics3"))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A model of each family."""
    folder = tmp_path_factory.mktemp("tiled") / request.param
    processor = save_tiled(request.param, folder)
    export(folder)
    return Seeing(request.param, folder, processor, MARKERS.get(request.param, "~"))


@pytest.fixture
def seeing(exported: Seeing, monkeypatch: pytest.MonkeyPatch) -> Seeing:
    """The same, with its processor where transformers cannot load it here."""
    if exported.model_type in UNLOADABLE:
        monkeypatch.setattr(ImageEncoder, "processor", exported.processor)
    return exported


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of three shapes."""
    home = tmp_path_factory.mktemp("pictures")
    sizes = ((20, 13), (9, 31), (40, 38))
    return [save_picture(home / f"{at}.png", seed=at, size=size) for at, size in enumerate(sizes)]


def prompts_of(marker: str, pictures: list[Path]) -> list[Prompt]:
    """One image each way, two, and three."""
    return [
        Prompt(f"Look:{marker} there", images=tuple(pictures[:1])),
        Prompt(f"{marker}?", images=tuple(pictures[1:2])),
        Prompt(f"Look:{marker} and {marker}?", images=tuple(pictures[:2])),
        Prompt(marker * 3, images=tuple(pictures)),
        Prompt(f"{marker}", images=tuple(pictures[2:])),
    ]


def eager_tokens(seeing: Seeing, prompts: list[Prompt]) -> list[tuple[int, list[int]]]:
    """Length of each prompt and new tokens of transformers' model on the processor's inputs."""
    import transformers  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    model, found = transformers.AutoModelForImageTextToText.from_pretrained(seeing.folder).eval(), []
    for prompt in prompts:
        images = [[Image.open(path) for path in prompt.images]]
        given = dict(seeing.processor(text=[str(prompt.content)], images=images, return_tensors="pt"))
        given["pixel_values"] = given["pixel_values"].float()  # Llama 4's are of bfloat16
        length = given["input_ids"].shape[1]
        made = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
        found.append((length, [int(token) for token in made[0, length:]]))
    return found


@pytest.mark.one_row_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_the_tokens_are_those_of_the_eager_model(seeing: Seeing, pictures: list[Path], backend: str) -> None:
    prompts = prompts_of(seeing.marker, pictures)
    expected = eager_tokens(seeing, prompts)
    assert len({tuple(tokens) for _, tokens in expected}) > 2
    found = generate(seeing.folder, ["A text", *prompts], backend=backend, **OPTIONS).completions[1:]
    assert [(one.prompt_tokens, one.tokens) for one in found] == expected
    alone = generate(seeing.folder, prompts[:1], backend=backend, **OPTIONS).completions[0]
    assert (alone.prompt_tokens, alone.tokens) == expected[0]


def family(model_type: str) -> Any:
    """Of a config alone."""
    import transformers  # noqa: PLC0415

    return image_family(transformers.AutoConfig.for_model(model_type, **fields_of(model_type)))


def test_a_tile_with_padding_is_refused() -> None:
    pixels, mask = np.ones((1, 2, 3, 24, 24)), np.ones((1, 2, 24, 24))
    mask[0, 1, 20:] = 0
    with pytest.raises(InputRefused, match="pads a tile"):
        list(family("idefics3").runs({"pixel_values": pixels, "pixel_attention_mask": mask}))
    pixels[0, 1] = 0  # a tile that is padding only
    (run,) = family("idefics3").runs({"pixel_values": pixels, "pixel_attention_mask": mask})
    assert run["pixel_values"].shape == (1, 3, 24, 24)


def test_an_empty_image_is_refused() -> None:
    with pytest.raises(InputRefused, match="all of its pixels are 0"):
        list(family("smolvlm").runs({"pixel_values": np.zeros((1, 1, 3, 24, 24))}))


def test_fewer_tiles_than_the_size_of_an_image_needs_are_refused() -> None:
    given = {"pixel_values": np.ones((1, 2, 3, 12, 12)), "image_sizes": np.array([[30, 30]])}
    with pytest.raises(InputRefused, match="makes 2 tiles of an image, and the model takes"):
        list(family("llava_next").runs(given))


def test_a_size_that_is_not_a_multiple_of_merged_patches_is_refused() -> None:
    given = {"pixel_values": np.ones((1, 3, 12, 16)), "image_sizes": np.array([[12, 16]])}
    with pytest.raises(InputRefused, match="12 × 16 pixels, and the model takes multiples of 8"):
        list(family("mistral3").runs(given))


def test_a_processor_that_needs_a_missing_package_names_it(tmp_path: Path) -> None:
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec("torchvision"):
        pytest.skip("torchvision is installed")
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    encoder = ImageEncoder(tmp_path, family("mistral3"), lambda: lambda given: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputRefused, match="requires the Torchvision library(?m:$)") as found:
        encoder.encode("~", [save_picture(tmp_path / "a.png")], starts=True)
    assert "install the torchvision" in str(found.value.hint)


@pytest.mark.slow
def test_the_processor_of_images_of_one_size_is_refused_for_tiles(pictures: list[Path], tmp_path: Path) -> None:
    save_tiled("llava_next", folder := tmp_path / "llava_next")
    export(folder)
    shutil.copy(save_seeing(tmp_path / "llava") / "processor_config.json", folder)
    with pytest.raises(InputRefused, match="makes no 'image_sizes'"):
        generate(folder, Prompt("Look", images=(pictures[0],)))
