"""Prompts with images: the text is that of transformers' own model and processor, and bad images are refused."""

from __future__ import annotations

import io
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from click.testing import CliRunner

import llmconv
from llmconv.cli import main
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.generation import Prompt, TextModel, generate
from llmconv.generation.images import LARGEST_FILE, open_image
from llmconv.generation.prompts import read_prompts
from tests.builders.seeing import save_picture, save_seeing

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": ()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with its graphs."""
    folder = save_seeing(tmp_path_factory.mktemp("seeing") / "llava")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    """The same model, open."""
    return TextModel.open(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two images of different sizes and formats."""
    home = tmp_path_factory.mktemp("pictures")
    return [save_picture(home / "a.png"), save_picture(home / "b.jpg", seed=1, size=(9, 31))]


def eager_tokens(folder: Path, text: str, pictures: list[Path], count: int) -> list[int]:
    """New tokens of transformers' model on its own processor's inputs."""
    import transformers  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    given = processor(text=[text], images=[Image.open(path) for path in pictures], return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return [int(token) for token in found[0, given["input_ids"].shape[1] :]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_the_text_is_that_of_the_eager_model(folder: Path, pictures: list[Path], backend: str) -> None:
    prompt = Prompt("Look:~ and ~?", images=tuple(pictures))
    found = generate(folder, prompt, backend=backend, **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, "Look:~ and ~?", pictures, 8)
    assert found.prompt_tokens == len("Look: and ?") + 2 * 4


@pytest.mark.slow
def test_other_pixels_give_another_text(model: TextModel, pictures: list[Path]) -> None:
    texts = [generate(model, Prompt("Look:~", images=(one,)), **OPTIONS).completions[0].text for one in pictures]
    assert texts[0] != texts[1]


def test_images_precede_a_text_without_placeholders(folder: Path, model: TextModel, pictures: list[Path]) -> None:
    found = generate(model, Prompt("Look", images=tuple(pictures[:1])), **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, "~\nLook", pictures[:1], 8)


def test_a_chat_has_its_images_where_the_template_writes_them(
    folder: Path, model: TextModel, pictures: list[Path]
) -> None:
    prompt = Prompt("Look", images=tuple(pictures[:1]))
    found = generate(model, prompt, system="Be brief", **OPTIONS).completions[0]
    assert found.tokens == eager_tokens(folder, "s:Be brief;u:~Look;a:", pictures[:1], 8)


def test_each_prompt_of_a_batch_gives_the_text_that_it_gives_alone(model: TextModel, pictures: list[Path]) -> None:
    prompts: list[Any] = ["A text", Prompt("~ Look", images=(pictures[0],)), Prompt("~", images=(pictures[1],))]
    together = generate(model, prompts, **OPTIONS).completions
    assert [one.tokens for one in together] == [
        generate(model, [one], **OPTIONS).completions[0].tokens for one in prompts
    ]


@pytest.mark.slow
def test_a_new_folder_has_the_processor(folder: Path, model: TextModel, pictures: list[Path], tmp_path: Path) -> None:
    made = export(folder, tmp_path / "new").folder
    prompt = Prompt("Look:~", images=(pictures[0],))
    found, expected = (generate(one, prompt, **OPTIONS).completions[0].tokens for one in (made, model))
    assert found == expected


def run(*line: Any) -> Any:
    return CliRunner().invoke(main, ["generate", *(str(word) for word in line)])


@pytest.mark.slow
def test_the_command_takes_images(folder: Path, model: TextModel, pictures: list[Path]) -> None:
    result = run(folder, "Look:~", "--image", pictures[0], "--max-new-tokens", 8, "--temperature", 0)
    assert result.exit_code == 0, result.stderr
    prompt = Prompt("Look:~", images=(pictures[0],))
    expected = generate(model, prompt, max_new_tokens=8, temperature=0, do_sample=False)
    assert result.stdout == expected.completions[0].text + "\n"


def test_json_lines_refer_to_images_next_to_them(model: TextModel, pictures: list[Path]) -> None:
    file = pictures[0].parent / "prompts.jsonl"
    several = {"prompt": "~~", "image": [pictures[0].name, str(pictures[1])]}
    file.write_text(json.dumps({"prompt": "Look:~", "image": pictures[0].name}) + "\n" + json.dumps(several))
    found = read_prompts(file)
    assert [prompt.images for prompt in found] == [(pictures[0],), tuple(pictures)]
    assert len(generate(model, found, **OPTIONS).completions) == 2


def test_json_lines_may_say_images(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "images": ["x.png"]}')
    assert read_prompts(tmp_path / "p.jsonl")[0].images == (tmp_path / "x.png",)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "images": ["x.png"], "image": "y.png"}')
    with pytest.raises(InputRefused, match="both `image` and `images`"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_placeholder_without_an_image_is_refused(model: TextModel) -> None:
    with pytest.raises(InputRefused, match="a placeholder of an image, and no image"):
        generate(model, "What is ~?", **OPTIONS)


def test_embeddings_take_the_places_of_the_placeholder_only_if_they_name_it(model: TextModel) -> None:
    rows = np.ones((2, 64), np.float32)
    assert generate(model, Prompt("What is ~?", embeddings=rows, placeholder="~"), **OPTIONS).completions
    with pytest.raises(InputRefused, match="a placeholder of an image") as refused:
        generate(model, Prompt("What is ~?", embeddings=rows), **OPTIONS)
    assert "`placeholder`" in refused.value.hint


@pytest.mark.parametrize("line", ['{"prompt": "a", "image": 3}', '{"prompt": "a", "image": [""]}'])
def test_images_in_lines_are_paths(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(InputRefused, match="`image` in line 1"):
        read_prompts(tmp_path / "p.jsonl")


def test_options_that_do_not_fit_are_refused(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a")
    for line in (["a", "b"], ["--prompt-file", tmp_path / "p.txt"]):
        result = run(folder, *line, "--image", pictures[0])
        assert (result.exit_code, "--image" in result.stderr) == (2, True)


def test_another_number_of_placeholders_is_refused(model: TextModel, pictures: list[Path]) -> None:
    with pytest.raises(InputRefused, match="placeholders `~` in the prompt: 2; images: 1"):
        generate(model, Prompt("~~", images=(pictures[0],)))


def test_a_text_model_takes_no_images(talking: Path, pictures: list[Path]) -> None:
    with pytest.raises(UsageProblem, match="takes no images"):
        generate(talking, Prompt("Once", images=(pictures[0],)))


def test_a_folder_without_processor_is_refused(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "processor_config.json").unlink()
    with pytest.raises(InputRefused, match="no processor"):
        generate(copy, Prompt("~", images=(pictures[0],)))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares a large image."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_files_that_are_not_images_are_refused(pictures: list[Path], tmp_path: Path) -> None:
    whole = pictures[0].read_bytes()
    bad = {
        "empty": b"",
        "text": b"hello",
        "cut": whole[: len(whole) // 2],
        "bomb": bomb(60_000, 60_000),
        "small bomb": bomb(8_000, 8_000),
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "large": bytes(LARGEST_FILE + 1),
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputRefused):
            open_image(tmp_path / name)
    for path in (tmp_path, tmp_path / "missing", tmp_path / "a\0b"):
        with pytest.raises(InputRefused):
            open_image(path)
    with pytest.raises(UsageProblem):
        open_image(3)


def saved(kind: str, file: Any) -> None:
    """An image of 20 x 13 random pixels in a file of another kind."""
    from PIL import Image  # noqa: PLC0415

    def pixels(*shape: int) -> Any:
        return Image.fromarray(np.random.default_rng(0).integers(0, 256, (13, 20, *shape), dtype=np.uint8))

    palette = pixels(3).quantize()
    sixteen = Image.fromarray(np.arange(0, 65_000, 250, dtype=np.uint16).reshape(13, 20))
    kinds: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "one pixel": (Image.new("RGB", (1, 1), (9, 99, 199)), "PNG", {}),
        "animation": (palette, "GIF", {"save_all": True, "append_images": [Image.new("P", (20, 13))]}),
        "CMYK": (Image.frombytes("CMYK", (20, 13), pixels(4).tobytes()), "JPEG", {}),
        "gray": (pixels(), "JPEG", {}),
        "16 bits": (sixteen, "PNG", {}),
        "alpha": (pixels(4), "PNG", {}),
        "gray and alpha": (Image.frombytes("LA", (20, 13), pixels(2).tobytes()), "PNG", {}),
        "transparent colors": (palette, "PNG", {"transparency": bytes(range(256))}),
        "one transparent color": (palette, "GIF", {"transparency": 3}),
        "alpha in WebP": (pixels(4), "WEBP", {}),
    }
    image, form, options = kinds[kind]
    image.save(file, form, **options)


def processor_of(folder: Path, **changes: Any) -> Any:
    """The folder's image processor, with other fields."""
    import transformers  # noqa: PLC0415

    return transformers.LlavaImageProcessorPil.from_pretrained(folder, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_a_pipeline_takes_images_and_the_processor_of_the_caller(
    folder: Path, pictures: list[Path], backend: str, tmp_path: Path
) -> None:
    given = processor_of(folder, image_mean=[0.9] * 3, image_std=[0.02] * 3)
    prompt = Prompt("Look:~", images=tuple(pictures[:1]))
    fields = {"return_tensors": True, "max_new_tokens": 8, "do_sample": False, "eos_token_id": ()}
    own, others = (
        llmconv.pipeline("text-generation", model=folder, backend=backend, image_processor=one)(prompt, **fields)
        for one in (None, given)
    )
    other_folder = tmp_path / "other"
    shutil.copytree(folder, other_folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.image_processor = given
    processor.save_pretrained(other_folder)
    assert own[0]["generated_token_ids"][-8:] == eager_tokens(folder, "Look:~", pictures[:1], 8)
    assert others[0]["generated_token_ids"][-8:] == eager_tokens(other_folder, "Look:~", pictures[:1], 8)
    assert own != others


@pytest.mark.slow
def test_prompts_of_a_pipeline_with_and_without_images_run_together(folder: Path, pictures: list[Path]) -> None:
    prompts = ["Once", *(Prompt("Look:~", images=(one,)) for one in pictures), [{"role": "user", "content": "hi"}]]
    pipe = llmconv.pipeline("text-generation", model=folder, do_sample=False, max_new_tokens=4)
    assert pipe(prompts) == [pipe(one) for one in prompts]


def test_what_is_no_image_processor_is_refused(folder: Path, talking: Path) -> None:
    with pytest.raises(UsageProblem, match="takes no images"):
        llmconv.pipeline("text-generation", model=talking, image_processor=processor_of(folder))
    with pytest.raises(UsageProblem, match="`image_processor` is a str"):
        llmconv.pipeline("text-generation", model=folder, image_processor="x")
    with pytest.raises(UsageProblem, match="not an image processor") as refused:
        llmconv.pipeline(
            "text-generation", model=folder, image_processor=transformers.AutoProcessor.from_pretrained(folder)
        )
    assert refused.value.hint == "give its `image_processor`"


def test_images_of_another_size_than_the_towers_are_refused(folder: Path, pictures: list[Path]) -> None:
    larger = processor_of(folder, size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    pipe = llmconv.pipeline("text-generation", model=folder, image_processor=larger)
    with pytest.raises(InputRefused):
        pipe(Prompt("Look:~", images=tuple(pictures[:1])))


KINDS = ("one pixel", "animation", "CMYK", "gray", "16 bits", "alpha", "gray and alpha", "transparent colors")


@pytest.mark.parametrize("kind", [*KINDS, "one transparent color", "alpha in WebP"])
def test_the_pixels_are_those_of_the_processor_on_the_file_that_pillow_opens(model: TextModel, kind: str) -> None:
    from PIL import Image  # noqa: PLC0415

    file = io.BytesIO()
    saved(kind, file)
    prepare = model.require_images().processor.image_processor
    expected = prepare(Image.open(file), return_tensors="np")["pixel_values"]
    found = prepare(open_image(file.getvalue()), return_tensors="np")["pixel_values"]
    assert np.array_equal(found, expected)


@pytest.mark.quick_rows("empty.jpg-is empty")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.jpg", "does not exist"),
        ("folder.jpg", "is not a file"),
        ("text.jpg", "is not an image of a known format"),
        ("empty.jpg", "is empty"),
    ],
)
def test_the_command_answers_a_bad_file_in_one_line(folder: Path, tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "empty.jpg").touch()
    done = CliRunner().invoke(main, ["generate", str(folder), "a~", "--image", str(tmp_path / name)])
    assert done.exit_code == 3 and f"{tmp_path / name}` {problem}\n\nhint: " in done.stderr


def test_a_rotated_photograph_is_turned_upright() -> None:
    from PIL import Image  # noqa: PLC0415

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 9)).save(file, "JPEG", exif=exif)
    assert open_image(file.getvalue()).size == (9, 4)


@pytest.mark.parametrize("size", [(1, 3_000), (20_000, 7)])
def test_a_thin_image_is_refused_before_a_processor_makes_it_large(size: tuple[int, int], tmp_path: Path) -> None:
    thin = save_picture(tmp_path / "thin.png", size=size)
    with pytest.raises(InputRefused, match="one side may be 200 times the other"):
        open_image(thin)


@pytest.mark.quick_rows("-1")
@pytest.mark.parametrize("token", [-1, 4_000, 1 << 40])
def test_a_placeholder_that_the_tokenizer_lacks_is_refused(
    folder: Path, pictures: list[Path], tmp_path: Path, token: int
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**fields, "image_token_index": token}))
    with pytest.raises(InputRefused, match=f"the token {token}, which the tokenizer does not have"):
        generate(copy, Prompt("Look", images=(pictures[0],)))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_an_image_of_too_many_pixels_is_refused_as_that(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    from PIL import Image  # noqa: PLC0415

    file = tmp_path / "large"
    Image.new("RGB", (60, 50)).save(file, kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # where Pillow itself refuses, at twice as many
    with pytest.raises(InputRefused, match="too many pixels"):
        open_image(file)
