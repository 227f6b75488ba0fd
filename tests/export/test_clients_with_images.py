"""The clients themselves (`make clients`) on prompts with images: the greedy tokens of the eager multimodal model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import environments
from llmconv.export import export
from llmconv.export.clients.genai import IMAGE_MODELS
from llmconv.export.export_options import ExportOptions
from llmconv.generation import Prompt, generate
from tests.builders.seeing import IMAGE_ID, IMAGE_TOKEN, SIZE, TOWERS, save_picture, save_seeing, save_tower
from tests.export.test_clients import ROOT, genai, transformersjs, until_end
from tests.test_docs import blocks

pytestmark = pytest.mark.slow

NEW = 12
TEXT = "ab~cd"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA without graphs."""
    return save_seeing(tmp_path_factory.mktemp("clients_with_images") / "llava")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of the tower's size: libraries of images resize differently."""
    return save_picture(tmp_path_factory.mktemp("picture") / "picture.png", size=(SIZE, SIZE))


def eager(folder: Path, ids: list[int], pixels: Any) -> list[int]:
    """The tokens that the eager model adds, the end token left out."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    given = torch.tensor([ids])
    images = {} if pixels is None else {"pixel_values": torch.tensor(pixels)}
    tokens = model.generate(
        input_ids=given, attention_mask=torch.ones_like(given), **images, do_sample=False, max_new_tokens=NEW
    )
    return until_end(tokens[0, len(ids) :].tolist())


def prepared(folder: Path, picture: Path) -> tuple[list[int], Any]:
    """Tokens and pixels of `TEXT` with a picture, from the processor of transformers."""
    import transformers  # noqa: PLC0415

    given = transformers.AutoProcessor.from_pretrained(folder)(images=str(picture), text=TEXT, return_tensors="np")
    return given["input_ids"][0].tolist(), given["pixel_values"]


def generated(folder: Path, picture: Path) -> list[int]:
    """The tokens of `llmconv generate --image`, the end token left out."""
    (completion,) = generate(folder, Prompt(TEXT, images=(picture,)), max_new_tokens=NEW).completions
    return until_end(list(completion.tokens))


def js_job(folder: Path, picture: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "text": TEXT, "image": str(picture), "new": NEW, **more}


def test_transformersjs_sees_with_its_own_processor(llava: Path, picture: Path, tmp_path: Path) -> None:
    folder = export(llava, tmp_path / "new", layout="transformersjs").folder
    (tokens,) = transformersjs([js_job(folder, picture)])
    assert until_end(tokens) == eager(llava, *prepared(llava, picture))
    blank = save_picture(tmp_path / "other.png", seed=5, size=(SIZE, SIZE))
    assert until_end(tokens) != eager(llava, *prepared(llava, blank))  # the image matters


def test_transformersjs_and_generate_add_the_same_tokens(llava: Path, picture: Path, tmp_path: Path) -> None:
    folder = export(llava, tmp_path / "new", layout="transformersjs").folder
    (tokens,) = transformersjs([js_job(folder, picture)])
    assert until_end(tokens) == generated(folder, picture)


SIZES: dict[str, ExportOptions] = {
    "several weight files": {"layout": "transformersjs", "max_shard_size": "60KB"},
    "float16": {"layout": "transformersjs", "precision": "float16"},
    "int4": {"layout": "transformersjs", "quant": "int4"},
    "int8": {"layout": "transformersjs", "quant": "int8"},
}


@pytest.mark.one_row_in(2)
@pytest.mark.parametrize("options", SIZES.values(), ids=list(SIZES))
def test_transformersjs_runs_weights_of_every_kind(
    options: ExportOptions, llava: Path, picture: Path, tmp_path: Path
) -> None:
    folder = export(llava, tmp_path / "new", **options).folder
    (tokens,) = transformersjs([js_job(folder, picture)])
    assert until_end(tokens) == generated(folder, picture)


@pytest.mark.one_row_in(6)
@pytest.mark.parametrize("model_type", sorted(IMAGE_MODELS))
def test_genai_runs_every_tower(model_type: str, tmp_path: Path) -> None:
    folder = save_tower(model_type, tmp_path / model_type)
    export(folder, layout="genai")
    (answer,), expected = genai([genai_job(folder, images=1)]), eager(folder, *example(folder, images=1))
    assert until_end(answer) == expected


def test_genai_runs_several_images_in_a_prompt(llava: Path, tmp_path: Path) -> None:
    folder = export(llava, tmp_path / "new", layout="genai").folder
    (answer,) = genai([genai_job(folder, images=3)])
    assert until_end(answer) == eager(llava, *example(llava, images=3))


OTHERS: dict[str, ExportOptions] = {
    "shared buffer": {"layout": "genai", "cache": "shared-buffer"},
    "float16": {"layout": "genai", "precision": "float16"},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=list(OTHERS))
def test_genai_runs_other_caches_and_precisions(options: ExportOptions, llava: Path, tmp_path: Path) -> None:
    folder = export(llava, tmp_path / "new", **options).folder
    (answer,) = genai([genai_job(folder, images=1)])
    assert until_end(answer) == eager(llava, *example(llava, images=1))


def test_genai_runs_text_alone(llava: Path, tmp_path: Path) -> None:
    folder = export(llava, tmp_path / "new", layout="genai").folder
    prompt = [5, 9, 11, 23, 40, 7]
    (answer,) = genai([{"folder": str(folder), "turns": [prompt], "new": NEW}])
    assert until_end(answer[len(prompt) :]) == eager(llava, prompt, None)


def test_the_snippet_with_an_image_for_transformersjs_runs(llava: Path, picture: Path, tmp_path: Path) -> None:
    export(llava, tmp_path / "MODEL", layout="transformersjs")
    shutil.copy(picture, tmp_path / "photo.png")
    (snippet,) = [code for code in blocks(ROOT / "docs/clients.md", "js") if "RawImage" in code]
    home = environment("transformersjs")
    (tmp_path / "node_modules").symlink_to(home / "node_modules")
    (tmp_path / "run.mjs").write_text(snippet.replace("<image>", IMAGE_TOKEN))
    done = subprocess.run(["node", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    prompt = Prompt(f"{IMAGE_TOKEN} What is this?", images=(picture,))
    (completion,) = generate(tmp_path / "MODEL", prompt, max_new_tokens=20).completions
    assert json.loads(done.stdout) == [completion.text]


def test_the_snippet_with_an_image_for_genai_runs(llava: Path, picture: Path, tmp_path: Path) -> None:
    export(llava, tmp_path / "MODEL", layout="genai")
    shutil.copy(picture, tmp_path / "photo.png")
    python_blocks = blocks(ROOT / "docs/clients.md", "python")
    (prepare,) = [code.replace("<image>", IMAGE_TOKEN) for code in python_blocks if "np.savez" in code]
    (snippet,) = [code for code in python_blocks if "NamedTensors" in code]
    home = environment("genai")
    subprocess.run([sys.executable, "-c", prepare], cwd=tmp_path, capture_output=True, check=True)
    python = [str(home / "bin/python"), "-c", snippet]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    prompt = Prompt(f"{IMAGE_TOKEN} What is this?", images=(picture,))
    (completion,) = generate(tmp_path / "MODEL", prompt, max_new_tokens=20).completions
    assert until_end(json.loads(done.stdout)) == until_end(list(completion.tokens))


def environment(client: str) -> Path:
    """The folder of a client's environment; skips without it."""
    home = ROOT / environments.folder(client)
    if not (home / "complete").exists():
        pytest.skip(f"no build/{client}-env; `make clients` makes it")
    return home


def example(folder: Path, images: int) -> tuple[list[int], Any]:
    """A prompt with images of random pixels: tokens, with a placeholder for each feature, and pixels."""
    vision = TOWERS[json.loads((folder / "config.json").read_text())["model_type"]]["vision_config"]
    size = vision["image_size"] if isinstance(vision["image_size"], int) else vision["image_size"][0]
    pixels = np.random.default_rng(3).standard_normal((images, 3, size, size)).astype(np.float32)
    return [5, 9, *([*[IMAGE_ID] * features_of(folder), 11] * images), 23], pixels


def features_of(folder: Path) -> int:
    """Number of features of an image."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return 4 if kind in ("llava", "vipllava") else 1


def genai_job(folder: Path, images: int) -> dict[str, Any]:
    prompt, pixels = example(folder, images)
    features = features_of(folder) * images
    return {"folder": str(folder), "prompt": prompt, "pixels": pixels.tolist(), "features": features, "new": NEW}
