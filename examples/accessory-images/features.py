"""The features of an image as LLaMA2-Accessory's plugins compute them, with towers of transformers.

    llama_qformerv2   BLIP-2's tower and Q-Former, `qformer_proj`: 32 rows between `start_img` and `end_img`
    llama             CLIP ViT-L/14 of OpenAI, `clip_proj`, `clip_proj_norm`: 257 rows

Sizes of the towers follow from their tensors; heads are those of the published towers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import layer_norm, linear
from transformers import (
    Blip2Config,
    Blip2QFormerModel,
    Blip2VisionModel,
    BlipImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

Tensors = Mapping[str, Tensor]
BLIP_HEAD, QFORMER_HEAD, CLIP_HEAD = 88, 64, 64
"""Sizes of one head in BLIP-2's tower, its Q-Former, and CLIP ViT-L/14."""

CLIP_NAMES = {
    "conv1.weight": "embeddings.patch_embedding.weight",
    "class_embedding": "embeddings.class_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre": "pre_layrnorm",
    "ln_post": "post_layernorm",
    "transformer.resblocks": "encoder.layers",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
"""Names of open_clip's tower to those of transformers."""


def read(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's first rank, which has all tensors for images.

    Args:
        checkpoint: folder with `consolidated.00-of-NN.model.pth`.

    Raises:
        SystemExit: the folder has no checkpoint of a first rank, or several.
    """
    files = list(checkpoint.glob("consolidated.00-of-*.model.pth"))
    if len(files) != 1:
        raise SystemExit(f"`{checkpoint}` has {len(files)} files `consolidated.00-of-NN.model.pth`, not one")
    stored = torch.load(files[0], weights_only=True, mmap=True, map_location="cpu")["model"]
    return {name.removeprefix("llma."): tensor for name, tensor in stored.items()}


def under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it, in float32."""
    return {name.removeprefix(prefix): one.float() for name, one in tensors.items() if name.startswith(prefix)}


def count(tensors: Tensors, prefix: str) -> int:
    """Number of layers below a prefix."""
    return len({name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)})


def side(positions: int, patch: int) -> int:
    """Height and width in pixels of the images, from the number of position embeddings, the class token included."""
    return int((positions - 1) ** 0.5) * patch


def of_qformer(tensors: Tensors, pixels: Tensor) -> Tensor:
    """Features [34, hidden] of `pixels` [1, 3, height, width]."""
    own, former = under(tensors, "qformer.vision_model."), under(tensors, "qformer.qformer.")
    patches, positions = own["embeddings.patch_embedding.weight"], own["embeddings.position_embedding"]
    hidden, width = patches.shape[0], former["layernorm.weight"].shape[0]
    config = Blip2Config(
        vision_config={
            "hidden_size": hidden,
            "intermediate_size": own["encoder.layers.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": count(own, "encoder.layers."),
            "num_attention_heads": hidden // BLIP_HEAD,
            "patch_size": patches.shape[-1],
            "image_size": side(positions.shape[1], patches.shape[-1]),
        },
        qformer_config={
            "hidden_size": width,
            "intermediate_size": former["encoder.layer.0.intermediate_query.dense.weight"].shape[0],
            "num_hidden_layers": count(former, "encoder.layer."),
            "num_attention_heads": width // QFORMER_HEAD,
            "encoder_hidden_size": hidden,
        },
    )
    tower = Blip2VisionModel(config.vision_config).eval()
    qformer = Blip2QFormerModel(config.qformer_config).eval()
    tower.load_state_dict(own)
    qformer.load_state_dict(former)
    queries = tensors["qformer.query_tokens"].float()
    found = qformer(query_embeds=queries, encoder_hidden_states=tower(pixels).last_hidden_state).last_hidden_state
    projector = under(tensors, "qformer_proj.")
    rows = linear(found, projector["0.weight"], projector["0.bias"])
    rows = layer_norm(rows, rows.shape[-1:], projector["1.weight"], projector["1.bias"])
    return torch.cat([tensors["start_img"].float(), rows, tensors["end_img"].float()], dim=1)[0]


def of_clip(tensors: Tensors, pixels: Tensor) -> Tensor:
    """Features [257, hidden] of `pixels` [1, 3, height, width]."""
    own = under(tensors, "clip.visual.")
    patches, positions, projection = own["conv1.weight"], own["positional_embedding"], own.pop("proj")
    hidden = patches.shape[0]
    config = CLIPVisionConfig(
        hidden_size=hidden,
        intermediate_size=own["transformer.resblocks.0.mlp.c_fc.weight"].shape[0],
        num_hidden_layers=count(own, "transformer.resblocks."),
        num_attention_heads=hidden // CLIP_HEAD,
        patch_size=patches.shape[-1],
        image_size=side(len(positions), patches.shape[-1]),
        projection_dim=projection.shape[1],
        hidden_act="quick_gelu",
    )
    model = CLIPVisionModelWithProjection(config).eval()
    named = {f"vision_model.{name}": tensor for name, tensor in clip_tensors(own).items()}
    model.load_state_dict({**named, "visual_projection.weight": projection.T})
    tower = model.vision_model
    rows = model.visual_projection(tower.post_layernorm(tower(pixels).last_hidden_state))
    rows = linear(rows, tensors["clip_proj.weight"].float(), tensors["clip_proj.bias"].float())
    norm = under(tensors, "clip_proj_norm.")
    return layer_norm(rows, rows.shape[-1:], norm["weight"], norm["bias"])[0]


def clip_tensors(own: Tensors) -> dict[str, Tensor]:
    """The tensors of open_clip's tower in transformers' names, queries, keys and values apart."""
    found = {}
    for name, tensor in own.items():
        for old, new in CLIP_NAMES.items():
            name = name.replace(old, new)
        if "attn.in_proj_" in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            found |= {name.replace("attn.in_proj_", f"self_attn.{one}_proj."): part for one, part in parts}
        else:
            found[name] = tensor
    return found


PLUGINS: dict[str, Callable[[Tensors, Tensor], Tensor]] = {"qformer.": of_qformer, "clip.": of_clip}
"""By a prefix that only this plugin's tensors have; SPHINX mixes several towers."""


def features(tensors: Tensors, image: Image.Image) -> np.ndarray:
    """The rows of an image, float32 [tokens, hidden].

    Args:
        tensors: of the checkpoint.
        image: in any size; resized to the tower's, without its proportions.

    Raises:
        SystemExit: the checkpoint has several towers, or none.
    """
    plugins = [of for prefix, of in PLUGINS.items() if any(name.startswith(prefix) for name in tensors)]
    others = [name for name in tensors if name.startswith(("openclip_convnext_xxl", "dinov2_vitg14", "visual_"))]
    if len(plugins) != 1 or others:
        raise SystemExit("the checkpoint is neither of `llama_qformerv2` nor of `llama` with images")
    pixels = size(tensors)
    processor = BlipImageProcessorPil(size={"height": pixels, "width": pixels})
    given = processor(images=[image.convert("RGB")], return_tensors="np")["pixel_values"]
    with torch.no_grad():
        return plugins[0](tensors, torch.from_numpy(np.asarray(given))).numpy()


def size(tensors: Tensors) -> int:
    """Height and width in pixels of the images that the tower takes."""
    names = (
        ("clip.visual.conv1.weight", "clip.visual.positional_embedding"),
        (
            "qformer.vision_model.embeddings.patch_embedding.weight",
            "qformer.vision_model.embeddings.position_embedding",
        ),
    )
    patches, positions = next((tensors[one], tensors[two]) for one, two in names if one in tensors)
    return side(positions.shape[-2], patches.shape[-1])


def main() -> None:
    """Writes the features of one image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of LLaMA2-Accessory")
    parser.add_argument("image", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help=".npy file")
    given = parser.parse_args()
    np.save(given.output, features(read(given.checkpoint), Image.open(given.image)))


if __name__ == "__main__":
    main()
