"""EagerRunner: the Hugging Face model in torch; in float64 it is the reference that graphs are compared with.

It shares no code with the exporter: transformers' eager attention and DynamicCache, unpatched. If layers keep a
recurrent state, several tokens after a past are computed by running all tokens again: some scans of transformers
(Mamba's) start from zeros whatever the cache contains.

transformers 5 builds every model on the meta device and then loads the weights. What is not among the weights (buffers
that are not persistent, plain tensors, such as rotary tables) is left without content, except in transformers' own
classes, which compute it again; `restore_computed_values` does so for a model's own code.

Skipped layers return their hidden state unchanged, and hold no weights: a model without most of its layers is small,
and its remaining layers, their numbers, masks and caches are those of the whole model.
"""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.utils import logging as transformers_logging

from llmconv.causal_lm import language_config, require_causal, require_one_attention, require_rotary
from llmconv.checkpoint import INDEX, SINGLE, has_weights, open_weights, read_json
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput, UsageProblem, first_line, word
from llmconv.memory import raise_if_out_of_memory, trim
from llmconv.not_a_model_folder import refuse_unexplained_codes, refused_model
from llmconv.quantized_weights.float4 import MX, has_small_exponents
from llmconv.quantized_weights.quantized_checkpoint import FIELD, UNKNOWN_TO_TRANSFORMERS, method_name
from llmconv.runtime.custom_code import custom_classes, custom_code_errors, uses_custom_code
from llmconv.runtime.eager.cache import EagerCache, fresh_cache, restore, to_numpy
from llmconv.runtime.eager.limit_margins import Float64Casts, LimitMargins
from llmconv.runtime.eager.stored_tensors import ScaleFactors, require_loaded, require_vocabulary, stored_tensors
from llmconv.runtime.extra_inputs import (
    DEEPSTACK,
    DEEPSTACK_LAYERS,
    PAST,
    ExtraInput,
    ExtraValues,
    ModelCall,
    embeds_in_layers,
    require_parameters,
    resolved_inputs,
    with_past,
)
from llmconv.runtime.images.families import IMAGE_FAMILIES
from llmconv.runtime.images.family import as_embedded
from llmconv.runtime.library_patches import (
    cache_parameter,
    continues_recurrent_state,
    masks_new_tokens,
    reset_dynamic_rope,
    silence_kernel_hints,
    use_eager_experts,
)
from llmconv.runtime.runner import Cache, Extras, PlacedEmbeddings, Runner, Step
from llmconv.tensors import Array, LazyTensor

PLAIN = "run `llmconv to-hf {} -o OUT --quant dequantize`, and give OUT"
SMALL_MODEL = 10_000_000  # maximum number of parameters at which one thread is faster than several


def _dtype_for(settings: Any, dtype: str, folder: Path) -> str:
    """The dtype in which transformers can load codes with these settings; UnsupportedInput, UsageProblem if none."""
    if not isinstance(settings, Mapping) or MX not in str(settings):
        return dtype
    if has_small_exponents(settings):
        found = f"MXFP4 of compressed-tensors {settings['version']}, whose exponents are 2 too small"
        raise UnsupportedInput(
            f"`{folder}` has {found}: transformers, which does not know it, would take a quarter of each weight",
            hint=PLAIN.format(word(folder)),
        )
    if dtype not in ("auto", "bfloat16"):
        problem = f"transformers runs MXFP4 of compressed-tensors in bfloat16, not in {dtype}"
        raise UsageProblem(problem, hint=f"leave out the dtype, or {PLAIN.format(word(folder))}")
    return "bfloat16"


class EagerRunner(Runner):
    """AutoModelForCausalLM with eager attention; nothing in `folder` is executed.

    In `float64` all operators compute so, from the float32 buffers, and `limit_margins` are observed. Custom `code` of
    a trusted folder may build the model; `weights` by name replace those of the folder; `factors` scale weights while
    they are read; those of `like`, the same model in float32, are copied instead; layers named in `skipped` are left
    out; PEFT applies `adapter` without merging.
    Raises InputRefused if transformers cannot load the folder, OutOfMemory, UnsupportedInput if `forward` has no
    parameter of one of the `extra_inputs`, UsageProblem for a device that torch does not have.
    """

    attention: str | None = "eager"  # transformers' `attn_implementation`; None for its default

    def __init__(  # noqa: PLR0913 - one parameter per property of the model
        self,
        folder: Path,
        dtype: str = "float32",
        *,
        code: Path | None = None,
        factors: ScaleFactors | None = None,
        like: EagerRunner | None = None,
        device: str = "cpu",
        skipped: Collection[str] = (),
        extra_inputs: Sequence[ExtraInput] = (),
        adapter: Path | None = None,
        weights: Mapping[str, LazyTensor] | None = None,
    ) -> None:
        self._adapter, self._given = adapter, weights
        # a device of this machine by torch's name; raises UsageProblem if torch does not have it
        try:  # a build without CUDA raises AssertionError, without MPS or XLA NotImplementedError
            probe = torch.zeros(1, device=device)
            probe.item()  # the device `meta` has no numbers
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            hint = "`cpu` is always there; for `cuda` install torch's build for your CUDA version"
            raise UsageProblem(f"torch cannot use the device `{device}`: {first_line(error)}", hint=hint) from error
        self._device, self._skipped = probe.device, frozenset(skipped)
        transformers_logging.disable_progress_bar()
        silence_kernel_hints()
        fields = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        require_causal(fields, folder)
        if weights is None and not has_weights(folder):
            raise refused_model(folder)
        self._code = code if uses_custom_code(fields, code is not None) else None
        self._factors, self.dtype, self.limit_margins = factors, dtype, LimitMargins()
        self._folder, self._fields = folder, fields
        self._model: Any = self._ready(copy.deepcopy(like.model)) if like else self._loaded()
        self._set_interface(without_adapter(self._model), extra_inputs)

    def _set_interface(self, model: Any, extra_inputs: Sequence[ExtraInput] = ()) -> None:
        """Sets what decides how the model is called."""
        arguments = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in arguments
        self._extra_inputs = resolved_inputs(extra_inputs, self.config)
        require_parameters(model.forward, self._extra_inputs)
        self._takes_embeddings = "inputs_embeds" in arguments and not embeds_in_layers(self.config)
        self._cache_name, self._masks_new = cache_parameter(model.forward), masks_new_tokens(model)
        self._continues = continues_recurrent_state(model)
        self._fixed: dict[str, Any] = {}  # passed to every call
        self._is_small = model.num_parameters() <= SMALL_MODEL

    def _loaded(self) -> Any:
        folder, fields = self._folder, self._fields
        load = "float32" if self.dtype == "float64" else self.dtype
        settings = fields.get(FIELD) if self._given is None else None
        load = _dtype_for(settings, load, folder)
        try:
            with custom_code_errors(self._code):
                model = self._load(folder, fields, getattr(torch, load, load))
                if self._code:
                    restore_computed_values(model)
        except LlmconvError:
            raise
        except Exception as error:  # an invalid config may raise anything in the model's code
            raise_if_out_of_memory(error, f"while `{folder.name}` was loaded")
            kind = method_name(fields) if self._given is None else None
            if kind in UNKNOWN_TO_TRANSFORMERS:  # which says something else
                problem = f"transformers does not read weights that are quantized with `{kind}`, as those of `{folder}`"
                raise UnsupportedInput(problem, hint=PLAIN.format(word(folder))) from error
            stored = open_weights(folder) if self._given is None else self._given
            refuse_unexplained_codes(stored, fields)
            require_vocabulary(stored, fields, folder)
            hint = "the folder needs config.json and safetensors weights of a causal language model"
            if kind and isinstance(error, ImportError):
                hint = f"its weights are quantized with `{kind}`; install what transformers needs to read them"
            raise InputRefused(f"transformers cannot load `{folder}`: {first_line(error)}", hint=hint) from error
        return self._ready(with_adapter(model, self._adapter) if self._adapter else model)

    def _ready(self, model: Any) -> Any:
        if self.attention == "eager":
            use_eager_experts(without_adapter(model))
        skip_layers(layer_modules(model), self._skipped)
        if self.dtype == "float64":
            for name, layer in layer_modules(model).items():
                begin = partial(lambda margins, name, *_: margins.begin(name), self.limit_margins, name)
                layer.register_forward_pre_hook(begin)
        return self._moved(model.double() if self.dtype == "float64" else model).eval()

    def _moved(self, model: Any) -> Any:
        """The model on its device; on the CPU its weights may still be without content."""
        if self._device.type == "cpu":
            return model
        try:
            return model.to(self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise_if_out_of_memory(error, f"while `{self._folder.name}` was moved to `{self._device}`")
            raise

    @property
    def model(self) -> Any:
        """The transformers model; loaded again after `release`."""
        if self._model is None:
            self._model = self._loaded()
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    def release(self) -> None:
        """Frees the model until it is used again; small models stay in memory."""
        if not self._is_small:
            self._model = None
            gc.collect()  # modules refer to each other
            trim()

    def _load(self, folder: Path, fields: dict[str, Any], dtype: torch.dtype | str) -> Any:
        """The model of a folder with the given fields of `config.json`."""
        stored = open_weights(folder) if self._given is None else self._given  # refuses shards of other folders
        is_plain = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
        if self._factors or self._given is not None or not is_plain:
            load = getattr(torch, str(dtype).removeprefix("torch."))
            return self._built(folder, fields, dtype, stored_tensors(stored, load, self._factors), stored)
        source = custom_classes(self._code, fields)[1] if self._code else _class_of(folder)
        how = {"trust_remote_code": False, "use_safetensors": True}
        return self._from_pretrained(source, folder, dtype, stored, folder, **how)

    def _built(
        self,
        folder: Path,
        fields: dict[str, Any],
        dtype: torch.dtype | str,
        tensors: Mapping[str, Any],
        stored: Mapping[str, LazyTensor],
    ) -> Any:
        """The model with a folder's config and the given tensors by their stored names; raises as `require_loaded`."""
        if self._code:
            config_class, source = custom_classes(self._code, fields)
            config = config_class.from_pretrained(folder)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
            if config.model_type in IMAGE_FAMILIES:  # the whole model, where the first is its language model alone
                mappings = mappings[::-1]
            source = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
            if source.config_class is config.sub_configs.get("text_config"):  # as `AutoModelForCausalLM` does
                config = config.get_text_config(decoder=True)
        return self._from_pretrained(source, None, dtype, stored, folder, config=config, state_dict=tensors)

    def _from_pretrained(
        self, source: Any, path: Path | None, dtype: Any, stored: Mapping[str, LazyTensor], folder: Path, **how: Any
    ) -> Any:
        how |= {"attn_implementation": self.attention, "local_files_only": True, "output_loading_info": True}
        model, report = source.from_pretrained(path, dtype=dtype, **how)
        require_loaded(model, report, stored, folder)
        if not self._code:
            require_rotary(language_config(folder), model.config)
        if self.attention == "eager":
            require_one_attention(model.config)
        return model

    @property
    def config(self) -> Any:
        """The transformers config of the language model."""
        return self.model.config.get_text_config(decoder=True)

    def embed(self, input_ids: Array) -> Array:
        """Embeddings [batch, tokens, hidden] of `input_ids` int64 [batch, tokens]."""
        tokens = torch.from_numpy(as_embedded(input_ids, self.model.config)).to(self._device)
        with torch.no_grad():
            return to_numpy(self.model.get_input_embeddings()(tokens))

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def extra_inputs(self) -> Mapping[str, ExtraInput]:
        return self._extra_inputs

    @property
    def embedding_size(self) -> int | None:
        """Number of columns of the embedding table; None if the model takes tokens only."""
        return int(self.model.get_input_embeddings().weight.shape[1]) if self._takes_embeddings else None

    def _run_prompt(
        self, call: ModelCall, past: Cache | None, extras: Extras | None, placed: PlacedEmbeddings | None = None
    ) -> Step:
        """Raises UnsupportedInput for a hook of another shape or dtype, UsageProblem for a wrong token or value."""
        if call.input_ids.size and (largest := int(call.input_ids.max())) >= self.vocab_size:
            problem = f"token {largest} is not in the vocabulary of {self.vocab_size} tokens"
            raise UsageProblem(problem, hint="the prompt was encoded by the tokenizer of another model")
        new_tokens, values = call.input_ids.shape[1], ExtraValues(self._extra_inputs, extras or {}).of(call)
        whole, all_values = call, values
        if isinstance(past, EagerCache):
            whole, all_values = past.continued(call, values, self._extra_inputs)
            if new_tokens > 1 and past.has_recurrent_state and not self._continues:
                if placed:
                    raise UsageProblem("this model cannot place embeddings after a past", hint="give the whole prompt")
                past, call, values = None, whole, all_values
        if past is None:
            reset_dynamic_rope(self.model)
        cache = self.cache_of(past)
        logits = self._forward(call, cache, values, placed)
        present = EagerCache(cache, whole.input_ids, whole.position_ids, all_values)
        return Step(to_numpy(logits)[:, -new_tokens:], present)

    def without_cache(self, call: ModelCall) -> Array:
        """Logits [batch, tokens, vocabulary] of whole texts, for which the model keeps no cache."""
        reset_dynamic_rope(self.model)
        return to_numpy(self._forward(call, None, ExtraValues(self._extra_inputs, {}).of(call)))

    def cache_of(self, past: Cache | None) -> Any:
        """A transformers cache with the content of `past`, which remains unchanged."""
        if isinstance(past, EagerCache):
            return copy.deepcopy(past.cache)
        cache = fresh_cache(self.config)
        for name, array in past.arrays().items() if past else ():
            restore(cache, name, torch.from_numpy(array).to(self._device, self.model.dtype))
        return cache

    def _forward(
        self, call: ModelCall, cache: Any, values: Extras, placed: PlacedEmbeddings | None = None
    ) -> torch.Tensor:
        """Logits of the new tokens; extends `cache`, if there is one."""
        input_ids, attention_mask = call.input_ids, call.attention_mask
        if self._masks_new:
            attention_mask = attention_mask[:, -input_ids.shape[1] :]
        tokens = {"inputs_embeds": placed.into(self.embed(input_ids))} if placed else {"input_ids": input_ids}
        inputs = {**tokens, "attention_mask": attention_mask}
        inputs |= with_past(self._extra_inputs, values, call.sizes[PAST])
        if self.takes_positions:
            inputs.setdefault("position_ids", call.position_ids)  # some families have several for each token
        return self.call(inputs, cache)

    def run_embedded(self, inputs_embeds: Array) -> Cache:
        """The cache of virtual tokens at positions 0, 1, …, from their embeddings [batch, tokens, hidden]."""
        batch, length, _ = inputs_embeds.shape
        inputs = {"inputs_embeds": inputs_embeds, "attention_mask": np.ones((batch, length), dtype=np.int64)}
        if self.takes_positions:
            inputs["position_ids"] = np.arange(length)[None].repeat(batch, axis=0)
        cache = self.cache_of(None)
        self.call(inputs, cache)
        no_ids = np.zeros((batch, 0), dtype=np.int64)
        return EagerCache(cache, no_ids, no_ids)

    def tensors(self, inputs: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        found = {name: torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for name, array in inputs.items()}
        return {name: t.to(self.model.dtype) if t.is_floating_point() else t for name, t in found.items()}

    def call(self, inputs: Mapping[str, Array], cache: Any) -> torch.Tensor:
        """The logits; extends a transformers cache, if given; floats of `inputs` get the model's precision."""
        tensors = self.tensors(inputs)
        added = self.deepstacked(tensors.pop(DEEPSTACK.name, None))
        with single_torch_thread() if self._is_small else nullcontext(), self.compute_mode(), added:
            cached = {"use_cache": False} if cache is None else {self._cache_name: cache, "use_cache": True}
            self.limit_margins.begin()
            logits: torch.Tensor = self.model(**tensors, **cached, **self._fixed).logits
        return logits

    def deepstacked(self, features: torch.Tensor | None) -> AbstractContextManager[None]:
        """Context in which `features` reach the first layers as `added_after_layers`: transformers takes none there."""
        if features is None:
            return nullcontext()
        return added_after_layers(without_adapter(self.model).model.language_model.layers, features)

    @contextmanager
    def compute_mode(self) -> Iterator[None]:
        """Context in which the model runs: no gradients, and float64 throughout if that is the dtype."""
        float64: Any = Float64Casts(self.limit_margins) if self.dtype == "float64" else nullcontext()
        with torch.no_grad(), float64, custom_code_errors(self._code):
            yield


def _class_of(folder: Path) -> Any:
    """The auto class of a folder: of a language model, or of a model with image input."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in IMAGE_FAMILIES
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText


@contextmanager
def single_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def restore_computed_values(model: Any) -> None:
    """Gives a loaded model of custom code the values that its class computes, in place; builds it without weights."""
    with _weights_on_meta():
        built = type(model)(copy.deepcopy(model.config))
    loaded = dict(model.named_modules())
    for name, module in built.named_modules():
        if name in loaded:
            _copy_values(module, loaded[name])


def _copy_values(built: nn.Module, loaded: nn.Module) -> None:
    """Copies the buffers that are not persistent, and plain tensors where the loaded module has none with content."""
    for key in built._non_persistent_buffers_set & loaded._buffers.keys():
        value, found = built._buffers[key], loaded._buffers[key]
        if value is not None and found is not None:
            loaded._buffers[key] = value.to(found.dtype)
    for key, value in vars(built).items():
        if isinstance(value, torch.Tensor) and getattr(vars(loaded).get(key), "is_meta", False):
            setattr(loaded, key, value)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Parameters of new modules have no memory; everything else is on the CPU."""
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    module_class.register_parameter = on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def with_adapter(model: Any, adapter: Path) -> Any:
    """The model with a PEFT adapter around its layers."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        hint = "`pip install peft`, or merge it: `llmconv merge-lora BASE ADAPTER -o OUT`"
        raise UsageProblem("an adapter that is not merged needs the library peft", hint=hint) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's own use of transformers
            tuned = peft.PeftModel.from_pretrained(model, adapter).eval()
    except Exception as error:  # each kind of adapter raises its own exceptions
        problem = f"PEFT cannot apply `{adapter}` to the model: {first_line(error)}"
        raise InputRefused(problem, hint="is it an adapter of this model?") from error
    if tuned.active_peft_config.is_prompt_learning:
        problem = f"`{adapter}` is a tuned prefix, which belongs to no layer"
        raise InputRefused(problem, hint="give it with `--prefix-tuning`")
    return tuned


def without_adapter(model: Any) -> Any:
    """transformers' own model inside of a model with an adapter; any other as it is."""
    return getattr(model, "get_base_model", lambda: model)()


def layer_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The elements of all outermost `ModuleList`s by name."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{layer}.") for layer in found):
            found |= {f"{name}.{index}": layer for index, layer in module.named_children()}
    return found


@contextmanager
def added_after_layers(layers: Sequence[nn.Module], features: Tensor | None) -> Iterator[None]:
    """Context in which the first layers add `features` [batch, tokens, count * hidden] to their outputs, if any."""
    with ExitStack() as hooks:
        if features is not None:
            parts = torch.split(features, features.shape[-1] // DEEPSTACK_LAYERS, dim=-1)
            for layer, part in zip(layers, parts, strict=False):
                hooks.enter_context(layer.register_forward_hook(lambda layer, given, output, part=part: output + part))
        yield


def skip_layers(layers: Mapping[str, torch.nn.Module], skipped: Collection[str]) -> None:
    """Replaces layers `skipped`, never the first; running raises UnsupportedInput if one returns no hidden state."""
    results: list[Any] = [None]  # what the last layer that is not skipped has returned
    for name, layer in layers.items():
        if name in skipped:
            layer.forward = partial(_forward_skipped, name, results)
            layer.to("meta")
        else:
            results = [None]
            layer.register_forward_hook(partial(_keep, results))


def _keep(results: list[Any], layer: nn.Module, args: Any, result: Any) -> None:
    results[0] = result


def _forward_skipped(name: str, results: list[Any], *args: Any, **kwargs: Any) -> Any:
    """The hidden state that a skipped layer gets, in the form of the `results` of the layer before."""
    hidden, last = args[0] if args else kwargs.get("hidden_states"), results[0]
    if isinstance(hidden, torch.Tensor) and isinstance(last, torch.Tensor):
        return hidden
    if isinstance(hidden, torch.Tensor) and isinstance(last, tuple):
        return (hidden, *last[1:])
    raise UnsupportedInput(
        f"`{name}` returns no hidden state, and cannot be skipped", hint="run `llmconv verify --method whole`"
    )
