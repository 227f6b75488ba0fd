"""The eager model with a few layers and fake parameters, which have shapes and dtypes but no memory.

Computed buffers (rotary tables, ALiBi slopes) are real, because they become constants of the graph. Which layers are
alike is read from their modules and shapes: configs declare it in too many ways. Text models that transformers has
only as a part of a model with images get a head for tokens, and the names of other language models.

Mixture of experts: while tracing, the multiplication of tokens, sorted by expert, with the stacked experts is one
custom `GroupedMatMul`, so that the trace does not grow with the number of experts. When weights are bound, it becomes
Split, one Gemm per expert, Concat: an expert without tokens gets no rows and costs nothing, and every expert is mapped
as stored, stacked or separate.

Rotary frequencies that depend on the length are functions of the positions: transformers writes them into a buffer,
and `dynamic` remembers the longest sequence; a graph has no memory, and needs none (modeling_rope_utils.py):

    longrope   long factors beyond the original context, otherwise short ones, for all tokens of the call
    dynamic    base * (factor * length / original - (factor - 1)) ** (dim / (dim - 2)) beyond it
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmconv.causal_lm import is_dynamic
from llmconv.errors import LlmconvError, UnsupportedInput, first_line
from llmconv.export.export_options import CLASSIFY
from llmconv.export.input_map import decoder_config
from llmconv.export.library_patches import fake_parameters
from llmconv.export.weights import DOMAIN, GROUPED
from llmconv.output.manifest import MTP_ROLE
from llmconv.requirements import unusable_package
from llmconv.runtime.custom_code import custom_classes
from llmconv.runtime.eager.stored_tensors import kept_in_float32
from llmconv.runtime.extra_inputs import embeds_in_layers

CODE_FIELDS = ("auto_map", "_attn_implementation", "_attn_implementation_internal", "attn_implementation")
"""Config fields that refer to code or kernels; a checkpoint is data, so they are not passed on."""


def load_config(fields: dict[str, Any], code: Path | None = None) -> Any:
    """The transformers config of a `config.json`, without fields that would load code.

    `code` is the model folder, if the model's own code is trusted; `build` then uses it too. Raises UnsupportedInput:
    transformers does not know the `model_type`, or the weights are quantized.
    """
    if fields.get("quantization_config"):
        raise UnsupportedInput(
            "the weights are quantized (`quantization_config`)", hint="export the model that was quantized"
        )
    with refusing("read this config"):
        known = {name: value for name, value in _plain(fields).items() if name != "model_type"}
        config = (
            custom_classes(code, fields)[0](**known) if code else AutoConfig.for_model(fields["model_type"], **known)
        )
        if depth(config) < 1:
            raise ValueError(f"invalid number of layers: {depth(config)}")
        return config


def _plain(value: Any) -> Any:
    """Removes `CODE_FIELDS`; `{"__float__": "Infinity"}`, which stands for numbers that JSON lacks, becomes a float."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _plain(item) for name, item in value.items() if name not in CODE_FIELDS}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@contextmanager
def refusing(action: str) -> Iterator[None]:
    """Turns any exception of transformers or torch, which promise no class, into a one-line UnsupportedInput.

    The message contains `action`, such as `trace this model`.
    """
    try:
        yield
    except LlmconvError:
        raise
    except Exception as error:
        if isinstance(error, ImportError) and (broken := unusable_package(error)):
            raise broken from error
        reason = first_line(error, 200).split(". Should contain")[0]
        raise UnsupportedInput(
            f"transformers and torch cannot {action}: {type(error).__name__}: {reason}",
            hint="correct `config.json`; if eager transformers runs the model, its code cannot be traced",
        ) from error


def depth(config: Any) -> int:
    """Number of layers of the decoder; a config of an encoder and a decoder counts them separately."""
    config = decoder_config(config)
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


NUMBERED_OTHERWISE = {"ssm_multipliers", "mlp_multipliers"}
"""Lists with one entry per part of a layer (in Falcon-H1), which may be as long as the model has layers."""


def period(config: Any) -> int:
    """Length of the repeating pattern of layers (1 if all are alike), from every list with one entry per layer."""
    total = depth(config)
    decoder = decoder_config(config)
    own = [value for name, value in decoder.to_dict().items() if name not in NUMBERED_OTHERWISE]
    fields = [*own, getattr(decoder, "layer_types", None)]  # computed by some configs
    lists = [value for value in fields if isinstance(value, list) and len(value) == total]
    lists += [[value.get(str(layer)) for layer in range(total)] for value in fields if _is_by_layer(value)]
    kinds = list(zip(*lists, strict=True)) if lists else [()] * total
    return next(p for p in range(1, total + 1) if kinds[p:] == kinds[:-p])


def shortened(config: Any, num_layers: int) -> Any:
    """The config with the first `num_layers` layers; per-layer lists are cut to match."""
    decoder = decoder_config(config)
    if decoder is not config:
        whole = copy.deepcopy(config)
        whole.text_config = shortened(decoder, num_layers)
        return whole
    total = depth(config)
    fields = config.to_dict()
    fields[type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")] = num_layers
    if "decoder_layers" in fields:
        fields["decoder_layers"] = num_layers
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == total and name not in NUMBERED_OTHERWISE:
            fields[name] = value[:num_layers]
        elif _is_by_layer(value):
            fields[name] = {key: item for key, item in value.items() if int(key) < num_layers}
    if shared := fields.get("num_kv_shared_layers"):  # counts the last layers, which read caches of others
        fields["num_kv_shared_layers"] = max(shared - (total - num_layers), 0)
    kept = {name: value for name, value in fields.items() if not _is_computed(config, name)}
    kept.pop("model_type", None)
    return type(config)(**kept)  # not by `model_type`, which an inner text model may lack


def _is_by_layer(value: Any) -> bool:
    """Whether a field is a mapping from layer numbers, which are strings in `config.json`."""
    return isinstance(value, dict) and bool(value) and all(str(key).isdigit() for key in value)


def _is_computed(config: Any, name: str) -> bool:
    """Whether the config computes a field from others and does not accept it."""
    stated = getattr(type(config), type(config).attribute_map.get(name, name), None)
    return isinstance(stated, property) and stated.fset is None


def embedding_size(config: Any) -> int:
    """Size of the embeddings that the model takes instead of tokens; UnsupportedInput if it takes tokens only."""
    if embeds_in_layers(config):
        raise UnsupportedInput(
            "every layer of this model also embeds the tokens, so its graphs cannot take embeddings alone",
            hint="leave out `--embeds`",
        )
    with refusing("build this model"):
        model = build(shortened(config, period(config)))
        if "inputs_embeds" not in inspect.signature(model.forward).parameters:
            raise UnsupportedInput(
                "the model's code takes tokens only, and no `inputs_embeds`", hint="leave out `--embeds`"
            )
        return int(model.get_input_embeddings().weight.shape[1])


def build(config: Any, dtype: torch.dtype = torch.float32, task: str = "") -> PreTrainedModel:
    """The eager model of `config` in a dtype, in eval mode, with fake parameters, for the task of a graph spec.

    Parameters that transformers keeps in float32 when it loads a model in half precision are float32 here, too.
    """
    with fake_parameters() as mode:
        model = _initialized(config, dtype, task)
        if dtype != torch.float32:  # some classes compute tables in the default dtype: those of float32 are rounded
            computed = dict(_initialized(config, torch.float32, task).named_buffers())
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point() and not isinstance(buffer, FakeTensor) and name in computed:
                    buffer.data = computed[name].to(buffer.dtype)
    code = model.model if isinstance(model, TextWithHead) else model
    if code._can_set_experts_implementation():
        code.set_experts_implementation(EXPERTS)
    fake_buffers(model, mode)
    if pattern := kept_in_float32(model, dtype):  # which `from_pretrained` loads in float32
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if pattern.search(name) and isinstance(tensor, FakeTensor):
                tensor.data = tensor.data.to(torch.float32)
    frequencies_from_positions(model)
    return model.eval()


def _initialized(config: Any, dtype: torch.dtype, task: str) -> PreTrainedModel:
    auto = AutoModelForSequenceClassification if task == CLASSIFY else AutoModelForCausalLM
    is_alone = task != CLASSIFY and getattr(config, "model_type", "") in TEXT_MODELS
    make = TextWithHead._from_config if is_alone else auto.from_config
    model = make(config, attn_implementation="eager", dtype=dtype)
    if task != MTP_ROLE:
        return model
    from llmconv.export.tracing.mtp import MtpHead  # noqa: PLC0415 - few models have one

    return MtpHead(model)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yields computed buffers by name in a traced program, and restores them; CTRL assigns to one in its forward."""
    buffers = dict(model.named_buffers())
    try:
        yield {f"model.{name}": buffer for name, buffer in buffers.items()}
    finally:
        for name, buffer in buffers.items():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = buffer


def fake_buffers(model: nn.Module, mode: FakeTensorMode) -> None:
    """Makes the buffers that a checkpoint stores fake, in place."""
    for module, name in list(stored_buffers(model)):
        with mode:
            module._buffers[name] = torch.empty_like(module.get_buffer(name))


def stored_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Buffers that a checkpoint stores like weights, because training changes them."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            is_stored = name not in module._non_persistent_buffers_set
            if buffer is not None and is_stored and buffer.is_floating_point():
                yield module, name


EXPERTS = "llmconv"


def sorted_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Output `[tokens, hidden]` of a layer's stacked experts, called through transformers' `ExpertsInterface`.

    `hidden_states` are `[tokens, hidden]`; `top_k_index`, int64, and `top_k_weights` are `[tokens, k]`.
    """
    module: Any = self
    choices = top_k_index.shape[-1]
    experts, order = torch.sort(top_k_index.reshape(-1))
    counts = (experts[:, None] == torch.arange(module.num_experts)).to(torch.int64).sum(0)
    rows = hidden_states[order // choices]
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, name, rows, experts, counts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _linear(module, "down_proj", inner, experts, counts)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    weighted = outer * top_k_weights.reshape(-1)[order][:, None]
    by_token = weighted[torch.argsort(order)].reshape(-1, choices, hidden_states.shape[-1])
    return by_token.sum(dim=1).to(hidden_states.dtype)


def _linear(module: Any, name: str, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
    weight = getattr(module, name)
    features = weight.shape[-1] if module.is_transposed else weight.shape[-2]
    product: Tensor = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{GROUPED}",
        [rows, weight, counts],
        {"transB": 0 if module.is_transposed else 1},
        dtype=rows.dtype,
        shape=(rows.shape[0], features),
        version=1,
    )
    return product + getattr(module, f"{name}_bias")[experts] if module.has_bias else product


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, sorted_experts)


def frequencies_from_positions(model: nn.Module) -> None:
    """Replaces the forward of every rotary module with such frequencies by one without side effects, in place."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer: dict[str | None, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
        if any(_depends_on_length(kind) for kind in by_layer.values()):
            module.forward = _RotaryForward(module, by_layer)


def _depends_on_length(kind: Any) -> bool:
    return kind == "longrope" or is_dynamic(kind)


class _RotaryForward:
    """The forward of a rotary module without its decorators; `by_layer` are kinds of frequencies by type of layer."""

    def __init__(self, module: Any, by_layer: dict[str | None, Any]) -> None:
        self._module, self._by_layer = module, by_layer
        self._inner = inspect.unwrap(type(module).forward)
        for layer_type, kind in by_layer.items():
            if kind == "longrope":
                prefix = "" if layer_type is None else f"{layer_type}_"
                long = self._computed(layer_type, self._original(layer_type) + 1)
                module.register_buffer(f"{prefix}long_inv_freq", long, persistent=False)

    def _original(self, layer_type: str | None) -> Any:
        parameters = self._module.config.rope_parameters
        return (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]

    def _computed(self, layer_type: str | None, length: Any) -> Tensor:
        given = {} if layer_type is None else {"layer_type": layer_type}
        found: Tensor
        found, _ = ROPE_INIT_FUNCTIONS[self._by_layer[layer_type]](self._module.config, None, seq_len=length, **given)
        return found

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        module, kind = self._module, self._by_layer[layer_type]
        given, prefix = ({}, "") if layer_type is None else ({"layer_type": layer_type}, f"{layer_type}_")
        if _depends_on_length(kind):
            length = position_ids.max() + 1
            short = getattr(module, f"{prefix}original_inv_freq")
            if kind == "longrope":
                original, long = self._original(layer_type), getattr(module, f"{prefix}long_inv_freq")
            else:
                original, long = module.original_max_seq_len, self._computed(layer_type, length)
            module = _ModuleView(module, f"{prefix}inv_freq", torch.where(length > original, long, short))
        return self._inner(module, x, position_ids, **given)


class _ModuleView:
    """A module with one attribute replaced."""

    def __init__(self, module: nn.Module, name: str, value: Tensor) -> None:
        self._module, self._replaced = module, {name: value}

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)


class TextWithHead(PreTrainedModel):  # type: ignore[misc]
    """A text model and its head."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_attention_backend = True
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,  # int64 [batch, tokens]; or `inputs_embeds`
        attention_mask: Tensor | None = None,  # int64 [batch, past + tokens]
        position_ids: Tensor | None = None,  # int64 [3, batch, tokens]
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,  # [batch, tokens, hidden]
        use_cache: bool | None = None,
        # features of images, added to the outputs of the first layers, [batch, tokens, layers * hidden]
        deepstack_embeds: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of all tokens, and the cache."""
        from llmconv.runtime.eager.runner import added_after_layers  # noqa: PLC0415 - of models with images

        with added_after_layers(self.model.layers, deepstack_embeds):
            found = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
            )
        logits = self.lm_head(found.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


TEXT_MODELS = frozenset({"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"})
"""Types of text models, by `model_type` of their config, that transformers has without a head."""


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """How checkpoint tensors become parameters of a model; of a text model also what the whole one declares."""
    if isinstance(model, MtpModel):
        return list(model.conversions)
    own: list[Any] = get_model_conversion_mapping(model)
    whole = str(model.config.model_type).removesuffix("_text")
    declared = get_checkpoint_conversion_mapping(whole) if isinstance(model, TextWithHead) else None
    return own + [one for one in declared or () if isinstance(one, WeightConverter)]


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """A string for every layer, equal for layers that are alike except for numbers such as scales."""
    kinds = []
    for layer in model.get_submodule(layers_name(model)).children():
        parts = [(name, type(part).__name__) for name, part in layer.named_modules()]
        kinds.append(repr((parts, [(name, tuple(one.shape)) for name, one in layer.named_parameters()])))
    return kinds


def first_alike(kinds: Sequence[str], period: int) -> int:
    """The first layer from which every layer is like the layer one period later."""
    pairs = enumerate(zip(kinds, kinds[period:], strict=False))
    return max((layer + 1 for layer, (kind, later) in pairs if kind != later), default=0)


def factors(model: nn.Module) -> dict[str, float]:
    """All float attributes of modules by name; they may differ in a shortened model."""
    return {
        f"{name}.{setting}": value
        for name, module in model.named_modules()
        for setting, value in vars(module).items()
        if isinstance(value, float)
    }


def layers_name(model: PreTrainedModel) -> str:
    """Name of the list of the decoder's layers (`model.layers`), not of an image encoder with as many layers."""
    num_layers = depth(model.config)
    decoder = model.get_decoder() if decoder_config(model.config) is not model.config else model
    parts = set(decoder.modules())
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    lists = [(name, part) for name, part in named if isinstance(part, nn.ModuleList) and part in parts]
    return min((name for name, part in lists if len(part) == num_layers), key=len)
