"""The example of LLaMA2-Accessory's images: its features are those of the plugins' own formulas."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Blip2Config, Blip2Model, BlipImageProcessorPil

from tests.builders.seeing import save_picture
from tests.test_docs import ROOT

HIDDEN = 24


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("features", ROOT / "examples/accessory-images/features.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint of one rank."""
    folder.mkdir()
    stored = {"model": {f"llma.{name}": tensor for name, tensor in tensors.items()}}
    torch.save(stored, folder / "consolidated.00-of-01.model.pth")
    return folder


def pixels(path: Path, size: int) -> Tensor:
    """The image as the script prepares it."""
    processor = BlipImageProcessorPil(size={"height": size, "width": size})
    found: Any = processor(images=[Image.open(path).convert("RGB")], return_tensors="pt")
    return torch.as_tensor(np.asarray(found["pixel_values"]))


@pytest.mark.slow
def test_a_q_former_gives_the_rows_of_transformers_blip_2(example: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Blip2Config(
        vision_config={
            "hidden_size": 176,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 8,
            "initializer_range": 0.1,
        },
        qformer_config={
            "hidden_size": 128,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "encoder_hidden_size": 176,
        },
        text_config={"model_type": "opt", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
    )
    whole = Blip2Model(config).eval()
    nn.init.normal_(whole.query_tokens)
    projector = nn.Sequential(nn.Linear(128, HIDDEN), nn.LayerNorm(HIDDEN))
    own = {f"qformer.{n}": t for n, t in whole.state_dict().items() if not n.startswith("language")}
    tags = {name: torch.randn(1, 1, HIDDEN) for name in ("start_img", "end_img")}
    named = {f"qformer_proj.{name}": tensor for name, tensor in projector.state_dict().items()}
    picture = save_picture(tmp_path / "photo.png")
    folder = save(tmp_path / "run", {**own, **named, **tags})
    found = example.features(example.read(folder), Image.open(picture))
    with torch.no_grad():
        made: Any = whole.get_qformer_features(pixels(picture, 8))
        rows = projector(made if isinstance(made, Tensor) else made.last_hidden_state)[0]
    expected = torch.cat([tags["start_img"][0], rows, tags["end_img"][0]]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    """A block of open_clip's transformer, with the names of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 32), "c_proj": nn.Linear(32, width)})

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP with CLIP's own GELU."""
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False)[0]
        inner = self.mlp["c_fc"](self.ln_2(x))
        found: Tensor = x + self.mlp["c_proj"](inner * torch.sigmoid(1.702 * inner))
        return found


def test_clip_gives_the_rows_of_the_plugin_llama(example: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    width, out = 128, 20
    blocks = nn.ModuleList(Block(width) for _ in range(3))
    conv, norms = nn.Conv2d(3, width, 4, 4, bias=False), [nn.LayerNorm(width) for _ in range(2)]
    token, places, projection = torch.randn(width), torch.randn(5, width), torch.randn(width, out)
    last, norm = nn.Linear(out, HIDDEN), nn.LayerNorm(HIDDEN)
    for one in (*norms, norm):
        nn.init.normal_(one.weight)
    parts = {"transformer.resblocks.": blocks, "conv1.": conv, "ln_pre.": norms[0], "ln_post.": norms[1]}
    visual = {f"{prefix}{name}": one for prefix, part in parts.items() for name, one in part.state_dict().items()}
    visual |= {"class_embedding": token, "positional_embedding": places, "proj": projection}
    ends = {"clip_proj.": last, "clip_proj_norm.": norm}
    tensors = {f"{prefix}{name}": one for prefix, part in ends.items() for name, one in part.state_dict().items()}
    folder = save(tmp_path / "run", {**{f"clip.visual.{name}": one for name, one in visual.items()}, **tensors})
    picture = save_picture(tmp_path / "photo.png")
    found = example.features(example.read(folder), Image.open(picture))
    with torch.no_grad():
        x = torch.cat([token[None], conv(pixels(picture, 8)).flatten(2)[0].T])[None] + places
        x = norms[0](x)
        for block in blocks:
            x = block(x)
        expected = norm(last(norms[1](x) @ projection))[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_with_several_towers_is_refused(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="neither of"):
        example.features(
            {"clip.visual.proj": torch.ones(1), "dinov2_vitg14.a": torch.ones(1)}, Image.new("RGB", (4, 4))
        )


def test_a_folder_without_a_checkpoint_is_refused(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="0 files"):
        example.read(tmp_path)
