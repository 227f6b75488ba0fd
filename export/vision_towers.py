"""VisionTower: how the vision tower of one family is traced; the default takes images of one size.

Pixtral's takes one image of any size, whose patches all attend to each other. Those of Qwen2-VL and later take patches
of one image; values that depend on the numbers of rows and columns of patches are inputs that the runtime computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from llmconv.errors import UnsupportedInput
from llmconv.export.input_map import Port
from llmconv.export.library_patches import ComplexPair, complex_as_pairs, replaced_attributes
from llmconv.runtime.extra_inputs import DEEPSTACK_FEATURES, DEEPSTACK_LAYERS, IMAGE_FEATURES, PIXEL_VALUES
from llmconv.runtime.images.families import NEWLINE, PLACES, unit_of
from llmconv.runtime.images.qwen_vl import CELL_WEIGHTS, CELLS, PATCH_POSITIONS, WINDOW_IDS

IMAGES = "num_images"  # the symbolic axis of graphs of images of one size


@dataclass(frozen=True)
class TowerInput:
    """One input of the graph, and its value in the trace, whose dynamic axes have sizes of 2 or more."""

    port: Port
    example: Tensor


def zeros_in(name: str, dtype: str, axes: tuple[str | int, ...], **sizes: int) -> TowerInput:
    """An input whose value in the trace is zeros; `sizes` are those of its symbolic axes."""
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
    return TowerInput(Port(name, dtype, axes), torch.zeros(shape, dtype=getattr(torch, dtype)))


class TowerFeatures(nn.Module):
    """What is traced: a module around the whole model, whose `forward` takes tensors in the order of the inputs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    forward: Callable[..., Any]


class ImageFeatures(TowerFeatures):
    """The model's features of images of one size, up to the output of its projector."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [images, tokens, hidden] of `pixel_values` [images, channels, height, width]."""
        features = projected(self.model, {"pixel_values": pixel_values})
        return features.reshape(pixel_values.shape[0], -1, features.shape[-1])


def pixels_of_one_size(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The input of a tower for images of the size in `vision_config`; `precision` is the dtype of the pixels."""
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    shape = (int(getattr(config.vision_config, "num_channels", 3)), int(height), int(width))
    return (zeros_in(PIXEL_VALUES, precision, (IMAGES, *shape), num_images=2),)


@dataclass(frozen=True)
class VisionTower:
    """A family's tower."""

    alike: bool = True  # all of its layers are alike, so a few are traced and the others replicated
    # a module around the whole model, whose attribute must be named `model`; it takes tensors in the order of `inputs`
    # and returns features, or a tuple of features and further outputs
    module: Callable[[PreTrainedModel], nn.Module] = ImageFeatures
    # returns those of the graph, given the whole model's config and the graph's precision
    inputs: Callable[[Any, str], Sequence[TowerInput]] = pixels_of_one_size
    # names of the graph's outputs, and the first axes of each: a symbol, a fixed size, or several symbols
    outputs: tuple[tuple[str, str | int | tuple[str, ...]], ...] = ((IMAGE_FEATURES, IMAGES),)


class _Reached(Exception):
    """Leaves the model's code after its projector."""


class _Captured:
    """Stands for the projector's output in the code that is left, which splits, reshapes or iterates it first."""

    def __getattr__(self, name: str) -> Any:
        raise _Reached

    def __iter__(self) -> Iterator[Any]:
        raise _Reached


def projected(model: PreTrainedModel, given: Mapping[str, Any]) -> Tensor:
    """The output of the projector of a whole model, for arguments of its `get_image_features`."""
    found: list[Tensor] = []

    def capture(module: nn.Module, arguments: Any, output: Tensor) -> _Captured:
        found.append(output)
        return _Captured()

    hook = model.model.get_submodule("multi_modal_projector").register_forward_hook(capture)
    try:
        with suppress(_Reached):
            model.model.get_image_features(**given)
    finally:
        hook.remove()
    return found[0]


PIXTRAL_TOKENS, ROWS, COLUMNS = "image_tokens", "rows", "columns"


@dataclass(frozen=True)
class _Pixels:
    """A size in pixels, which the model's code divides by that of a patch; the graph need not."""

    patches: Any

    def __floordiv__(self, patch: int) -> Any:
        return self.patches


class PixtralFeatures(TowerFeatures):
    """The model's features of one image."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [rows * columns, hidden] of `pixel_values` [1, channels, rows, unit, columns, unit]."""
        _, channels, rows, unit, columns, _ = pixel_values.shape
        pixels = pixel_values.reshape(1, channels, rows * unit, columns * unit)
        merge = self.model.config.spatial_merge_size
        size = _Pixels(rows * merge), _Pixels(columns * merge)

        def merged(grid: Tensor, kernel_size: int, stride: int) -> Tensor:
            """`unfold` of squares that fill the grid."""
            squares = grid.reshape(1, -1, rows, kernel_size, columns, kernel_size)
            return squares.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).flatten(2)

        code = sys.modules[type(self.model.model.vision_tower).__module__]
        # no mask between images: there is one
        attention = replaced_attributes(code, {"generate_block_attention_mask": lambda *_: None})
        with attention, replaced_attributes(nn.functional, {"unfold": merged}):
            return projected(self.model, {"pixel_values": pixels, "image_sizes": [size]})


def squares_of_one_image(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The input of the tower, with any number of rows and columns; `precision` is the dtype of the pixels."""
    unit, channels = unit_of(config), int(config.vision_config.num_channels)
    return (zeros_in(PIXEL_VALUES, precision, (1, channels, ROWS, unit, COLUMNS, unit), rows=3, columns=5),)


PATCHES, TOKENS = "num_patches", "num_tokens"
"""Symbolic axes: patches of the image, and features, of which each is made of several patches."""


class PatchFeatures(TowerFeatures):
    """The features of one image, whose patches all attend to each other."""

    def forward(self, pixel_values: Tensor, patch_positions: Tensor) -> Tensor:
        """Features `[tokens, hidden]` of `pixel_values` `[patches, values of a patch]`, patches of a feature adjacent.

        `patch_positions` are row and column of each patch, int64 `[patches, 2]`.
        """
        tower: Any = self.model.model.visual
        hidden = embedded(tower, pixel_values)
        *_, last = after_blocks(tower, hidden, tower.rotary_pos_emb(hidden, patch_positions))
        features: Tensor = tower.merger(last)
        return features


class WindowedFeatures(TowerFeatures):
    """The features of one image, whose patches attend to those of their window in most layers."""

    def forward(self, pixel_values: Tensor, patch_positions: Tensor, window_ids: Tensor) -> Tensor:
        """Features `[tokens, hidden]`, with inputs as for `PatchFeatures` and `window_ids` int64 `[patches]`."""
        tower: Any = self.model.model.visual
        hidden = embedded(tower, pixel_values)
        positions = tower.rotary_pos_emb(hidden, patch_positions)
        other = window_ids[:, None] != window_ids[None]
        windows = other.to(hidden.dtype) * torch.finfo(hidden.dtype).min
        *_, last = after_blocks(tower, hidden, positions, windows)
        features: Tensor = tower.merger(last)
        return features


class DeepstackedFeatures(TowerFeatures):
    """The features of one image, and those after some of the layers, for the first layers of the decoder."""

    def forward(
        self, pixel_values: Tensor, patch_positions: Tensor, cells: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Features `[tokens, hidden]`, and further ones `[tokens, layers * hidden]`; inputs as `PatchFeatures`.

        `cells` are places in the table of position embeddings, int64 `[patches, 4]`, `weights` theirs `[patches, 4]`.
        """
        tower: Any = self.model.model.visual
        hidden = embedded(tower, pixel_values) + (tower.pos_embed(cells) * weights[:, :, None]).sum(1)
        positions = tower.rotary_pos_emb(hidden, patch_positions)
        deep, chosen = [], list(tower.deepstack_visual_indexes)
        for number, after in enumerate(after_blocks(tower, hidden, positions)):
            if number in chosen:
                deep.append(tower.deepstack_merger_list[chosen.index(number)](after))
        return tower.merger(after), torch.cat(deep, dim=-1)


def embedded(tower: Any, pixel_values: Tensor) -> Tensor:
    """Embeddings `[patches, hidden]` of pixel values `[patches, values of a patch]`.

    The convolution's kernel is as large as a patch, so it is a product.
    """
    convolution = tower.patch_embed.proj
    return linear(pixel_values, convolution.weight.flatten(1), convolution.bias)


def after_blocks(tower: Any, hidden: Tensor, positions: Any, windows: Tensor | None = None) -> Iterator[Tensor]:
    """The hidden states after each block, whose attention takes a mask instead of lengths that it would loop over.

    `windows` `[patches, patches]` is added to the scores of blocks without full attention; None for full attention.
    """
    for block in tower.blocks:
        block.attn.forward = partial(_attention, block.attn)
    try:
        for number, block in enumerate(tower.blocks):
            mask = None if windows is None or number in tower.fullatt_block_indexes else windows[None, None]
            hidden = block(hidden, cu_seqlens=mask, position_embeddings=positions)
            yield hidden
    finally:
        for block in tower.blocks:
            del block.attn.forward


def _attention(
    module: Any, hidden_states: Tensor, cu_seqlens: Tensor | None, position_embeddings: Any, **_: Any
) -> Tensor:
    """Attention of one image; `cu_seqlens` is added to the scores."""
    code, count = sys.modules[type(module).__module__], hidden_states.shape[0]
    query, key, value = module.qkv(hidden_states).reshape(count, 3, module.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    query, key = code.apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    heads = [one.transpose(0, 1).unsqueeze(0) for one in (query, key, value)]
    found, _weights = code.eager_attention_forward(module, *heads, attention_mask=cu_seqlens, scaling=module.scaling)
    projected: Tensor = module.proj(found.reshape(count, -1))
    return projected


def patches(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """Patches and their positions; `precision` is the dtype of the pixels."""
    vision = config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = zeros_in(PIXEL_VALUES, precision, (PATCHES, size), **_example(config))
    return pixels, zeros_in(PATCH_POSITIONS, "int64", (PATCHES, 2), **_example(config))


def patches_in_windows(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """Patches, their positions and windows; arguments as for `patches`."""
    return (*patches(config, precision), zeros_in(WINDOW_IDS, "int64", (PATCHES,), **_example(config)))


def patches_with_cells(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """Patches, their positions and their places in the table; arguments as for `patches`.

    Raises UnsupportedInput: another number of layers of the decoder gets features than in any released model.
    """
    if len(config.vision_config.deepstack_visual_indexes) != DEEPSTACK_LAYERS:
        raise UnsupportedInput(
            f"`deepstack_visual_indexes` does not have {DEEPSTACK_LAYERS} layers", hint="correct `config.json`"
        )
    kinds = ((CELLS, "int64"), (CELL_WEIGHTS, precision))
    table = [zeros_in(name, dtype, (PATCHES, 4), **_example(config)) for name, dtype in kinds]
    return (*patches(config, precision), *table)


def _example(config: Any) -> dict[str, int]:
    """Number of patches in the trace, which is that of three features."""
    return {PATCHES: 3 * int(config.vision_config.spatial_merge_size) ** 2}


class AnyresFeatures(TowerFeatures):
    """The model's features of tiles, before it packs those of an image, and `image_newline`."""

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width], and [1, hidden]."""
        features = projected(self.model, {"pixel_values": pixel_values, "image_sizes": []})
        return features, self.model.model.image_newline[None]


class TileFeatures(TowerFeatures):
    """The model's features of tiles of one size without padding."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._positions = positions_of(model.model.vision_model.embeddings)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width]."""
        tower = self.model.model.vision_model
        patches = tower.embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        embedded = patches + tower.embeddings.position_embedding(self._positions)
        encoded = tower.encoder(inputs_embeds=embedded, attention_mask=None).last_hidden_state
        features: Tensor = self.model.model.connector(tower.post_layernorm(encoded))
        return features


def positions_of(embeddings: Any) -> Tensor:
    """Positions int64 [1, patches] of a tile without padding, as the model's code counts them; reads no parameters."""
    side, found = int(embeddings.num_patches_per_side), list[Tensor]()

    def record(positions: Tensor) -> Tensor:
        found.append(positions)
        return torch.zeros(1)

    without_weights = SimpleNamespace(
        **{name: value for name, value in vars(embeddings).items() if not name.startswith("_")},
        patch_embedding=lambda pixels: torch.zeros(1, 1, side, side),
        position_embedding=record,
    )
    size = side * int(embeddings.patch_size)
    pixels, mask = torch.zeros(1, 1, size, size), torch.ones(1, side, side, dtype=torch.bool)
    type(embeddings).forward(without_weights, pixel_values=pixels, patch_attention_mask=mask)
    return found[0]


class Llama4Features(TowerFeatures):
    """The model's features of tiles, up to the output of its projector."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        found = model.vision_model.rotary_embedding.freqs_ci
        self._rotations = ComplexPair(found.real.clone(), found.imag.clone())

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features [tiles, tokens, hidden] of `pixel_values` [tiles, channels, height, width]."""
        rotary = self.model.vision_model.rotary_embedding
        with complex_as_pairs(), replaced_attributes(rotary, {"forward": lambda pixels: self._rotations}):
            encoded = self.model.vision_model(pixel_values, return_dict=True).last_hidden_state
        features: Tensor = self.model.multi_modal_projector(encoded)
        return features


class Gemma4Features(TowerFeatures):
    """The model's features of images without padding, whose patches are sorted by the squares that become features.

    The encoder does not depend on the order of patches, so transformers' pooler, which looks for the patches of each
    square, is a mean over neighbors.
    """

    def forward(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        """Features [images, tokens, hidden] of pixels [images, patches, numbers of a patch].

        `image_position_ids` are columns and rows of the patches, int64 [images, patches, 2].
        """
        tower, config = self.model.model.vision_tower, self.model.config.vision_config
        padding = torch.zeros(pixel_values.shape[:2], dtype=torch.bool)
        embedded = tower.patch_embedder(pixel_values, image_position_ids, padding)
        encoded = tower.encoder(embedded, None, pixel_position_ids=image_position_ids).last_hidden_state
        squares = encoded.float().unflatten(1, (-1, config.pooling_kernel_size**2))
        pooled = squares.mean(dim=2).to(encoded.dtype).float() * config.hidden_size**0.5
        if config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        features: Tensor = self.model.model.embed_vision(pooled.to(embedded.dtype))
        return features


def patches_and_places(config: Any, precision: str) -> tuple[TowerInput, ...]:
    """The inputs of the tower; `precision` is the dtype of the pixels."""
    vision = config.vision_config
    size, side = 3 * vision.patch_size**2, vision.pooling_kernel_size
    pixels = zeros_in(PIXEL_VALUES, precision, (IMAGES, PATCHES, size), num_images=2, num_patches=2 * side**2)
    places = torch.cartesian_prod(torch.arange(2 * side), torch.arange(side))[None].repeat(2, 1, 1)
    return pixels, TowerInput(Port(PLACES, "int64", (IMAGES, PATCHES, 2)), places)


ANYRES = VisionTower(module=AnyresFeatures, outputs=((IMAGE_FEATURES, IMAGES), (NEWLINE, 1)))
OF_PATCHES = ((IMAGE_FEATURES, TOKENS),)
DEEP = (*OF_PATCHES, (DEEPSTACK_FEATURES, TOKENS))
QWEN3_VL = VisionTower(alike=False, module=DeepstackedFeatures, inputs=patches_with_cells, outputs=DEEP)

TOWERS: dict[str, VisionTower] = {
    **dict.fromkeys(("aya_vision", "gemma3", "internvl", "llava", "vipllava"), VisionTower()),
    **dict.fromkeys(("llava_next", "llava_onevision"), ANYRES),
    **dict.fromkeys(("idefics3", "smolvlm"), VisionTower(module=TileFeatures)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), QWEN3_VL),
    "gemma4": VisionTower(
        module=Gemma4Features, inputs=patches_and_places, outputs=((IMAGE_FEATURES, (IMAGES, TOKENS)),)
    ),
    "got_ocr2": VisionTower(alike=False),  # layers with windows between layers without
    "llama4": VisionTower(module=Llama4Features),
    "mistral3": VisionTower(
        module=PixtralFeatures, inputs=squares_of_one_image, outputs=((IMAGE_FEATURES, PIXTRAL_TOKENS),)
    ),
    "qwen2_5_vl": VisionTower(alike=False, module=WindowedFeatures, inputs=patches_in_windows, outputs=OF_PATCHES),
    "qwen2_vl": VisionTower(module=PatchFeatures, inputs=patches, outputs=OF_PATCHES),
}
VISION_TOWERS = dict(sorted(TOWERS.items()))
"""By `model_type`; `runtime.images.families.IMAGE_FAMILIES` has the same rows."""
