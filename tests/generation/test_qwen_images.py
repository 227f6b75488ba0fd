"""Prompts with images for Qwen2-VL and later: the text is that of transformers' own model and processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmconv.errors import InputRefused
from llmconv.export import export
from llmconv.generation import Prompt, generate
from llmconv.runtime.images.family import load_processor
from llmconv.runtime.images.qwen_vl import positions_on_axes
from tests.builders.seeing import save_picture
from tests.builders.seeing_qwen import IMAGE, PLACEHOLDER, TEXT, TOKENS, VIDEO, save_qwen
from tests.builders.slow_rows import slow_but

pytestmark = pytest.mark.slow

Seeing = Callable[[str], Path]

COUNT = 8
OPTIONS: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": ()}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wide image and a high one."""
    home = tmp_path_factory.mktemp("pictures")
    return [save_picture(home / "a.png", size=(30, 23)), save_picture(home / "b.jpg", seed=1, size=(9, 40))]


@cache
def opened(folder: Path) -> tuple[Any, Any]:
    """Processor and model of a folder."""
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    return load_processor(folder, model.config), model


def eager_tokens(folder: Path, text: str, pictures: Sequence[Path]) -> list[int]:
    """New tokens of transformers' model on its own processor's inputs."""
    from PIL import Image  # noqa: PLC0415

    processor, model = opened(folder)
    images = {"images": [[Image.open(path) for path in pictures]]} if pictures else {}
    given = processor(text=[text], **images, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    return [int(token) for token in found[0, given["input_ids"].shape[1] :]]


@pytest.mark.one_row_in(4)
@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize("model_type", slow_but(TEXT, "qwen2_vl"))
def test_a_batch_gives_the_texts_of_the_eager_model(
    seeing_qwen: Seeing, pictures: list[Path], model_type: str, backend: str
) -> None:
    folder, (wide, high) = seeing_qwen(model_type), pictures
    texts = {f"Look:{PLACEHOLDER}!": [wide], f"{PLACEHOLDER}and{PLACEHOLDER} differ?": [high, wide], "Only text": []}
    prompts = [Prompt(text, images=tuple(given)) for text, given in texts.items()]
    found = generate(folder, prompts, backend=backend, **OPTIONS).completions
    assert [one.tokens for one in found] == [eager_tokens(folder, text, given) for text, given in texts.items()]


def test_images_precede_a_text_without_placeholders(seeing_qwen: Seeing, pictures: list[Path]) -> None:
    folder = seeing_qwen("qwen2_vl")
    found = generate(folder, Prompt("Look", images=tuple(pictures)), **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, f"{PLACEHOLDER}{PLACEHOLDER}Look", pictures)


def test_a_chat_has_its_images_where_the_template_writes_them(seeing_qwen: Seeing, pictures: list[Path]) -> None:
    folder = seeing_qwen("qwen2_vl")
    found = generate(folder, Prompt("Look", images=(pictures[0],)), system="Be brief", **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, f"s:Be brief;u:{PLACEHOLDER}Look;a:", pictures[:1])


def test_images_without_text_between_them_are_refused(seeing_qwen: Seeing, pictures: list[Path]) -> None:
    with pytest.raises(InputRefused, match="not one run for each image"):
        generate(seeing_qwen("qwen2_vl"), Prompt(TOKENS[IMAGE] * 2, images=tuple(pictures)), **OPTIONS)


def test_a_request_may_give_the_positions_on_all_axes(seeing_qwen: Seeing) -> None:
    folder, positions = seeing_qwen("qwen2_vl"), [[0, 1, 2, 3]] * 3
    given = generate(folder, Prompt("Look", inputs={"position_ids": positions}), **OPTIONS).completions[0]
    assert given.tokens == generate(folder, "Look", **OPTIONS).completions[0].tokens


def test_positions_count_on_after_a_tuned_prefix(seeing_qwen: Seeing, pictures: list[Path], tmp_path: Path) -> None:
    np.save(tmp_path / "pre_caches.npy", np.random.default_rng(0).standard_normal((4, 2, 2, 5, 16), dtype=np.float32))
    folder, options = seeing_qwen("qwen2_vl"), {**OPTIONS, "prefix_tuning": tmp_path}
    given = Prompt("Look", inputs={"position_ids": [[0, 1, 2, 3]] * 3})
    seen = Prompt(f"{PLACEHOLDER}Look", images=(pictures[0],))
    alone = [generate(folder, one, **options).completions[0].tokens for one in (given, "Look", seen)]
    assert alone[0] == alone[1]
    assert alone[1:] == [one.tokens for one in generate(folder, ["Look", seen], **options).completions]


@pytest.mark.parametrize("images", [0, 1])
def test_videos_are_refused(seeing_qwen: Seeing, pictures: list[Path], images: int) -> None:
    text = PLACEHOLDER * images + TOKENS[VIDEO]
    with pytest.raises(InputRefused, match="placeholder of a video"):
        generate(seeing_qwen("qwen2_vl"), Prompt(text, images=tuple(pictures[:images])), **OPTIONS)


@pytest.mark.parametrize("model_type", TEXT)
def test_positions_are_those_of_transformers(model_type: str) -> None:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import MODEL_MAPPING  # noqa: PLC0415

    config = transformers.AutoConfig.for_model(model_type)
    grids = [(3, 5), (4, 1), (2, 2)]
    where = np.concatenate([np.repeat([False, True], [2, rows * columns]) for rows, columns in grids] + [[False] * 3])
    with torch.device("meta"):
        model = MODEL_MAPPING[type(config)]._from_config(config)
    patches = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids])
    kinds = torch.from_numpy(where.astype(np.int32))[None]
    expected, deltas = model.get_rope_index(torch.zeros_like(kinds).long(), kinds, patches)
    found = positions_on_axes(where, grids)
    assert np.array_equal(found, expected[:, 0].numpy())
    assert found.max() + 1 == len(where) + int(deltas)


def test_a_checkpoint_with_one_flat_config_gives_the_same_text(pictures: list[Path], tmp_path: Path) -> None:
    folder = save_qwen(tmp_path / "flat", "qwen2_vl")
    fields = json.loads((folder / "config.json").read_text())
    text = fields.pop("text_config")
    rotary = text.pop("rope_parameters")
    old = {"rope_theta": rotary["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (folder / "config.json").write_text(json.dumps({**text, **old, **fields}))
    export(folder)
    prompt = f"Look:{PLACEHOLDER}!"
    found = generate(folder, Prompt(prompt, images=(pictures[0],)), **OPTIONS).completions[0].tokens
    assert found == eager_tokens(folder, prompt, pictures[:1])
