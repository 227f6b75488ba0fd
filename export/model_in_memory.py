"""A model in memory as a checkpoint: what `save_pretrained` would write, its tensors read where they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from llmconv.checkpoint import Checkpoint, read_json, read_side_files
from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.files.paths import Placed
from llmconv.files.safe_folder import make_temporary_folder, remove_temporary_folder
from llmconv.runtime.eager.torch_runner import require_causal_model
from llmconv.tensors import BY_NAME, Array, DType, LazyTensor


@contextmanager
def opened_in_memory(model: Any, output: Placed | None, *, graphs_only: bool) -> Iterator[Checkpoint]:
    """The checkpoint that `save_pretrained` would write for a causal language model on any device.

    Its configuration is in a temporary folder, no weight is. Raises InputRefused: transformers does not save its
    configuration; UsageProblem: not a torch module, no output for its weights, or `graphs_only`; or its weights are not
    plain tensors in memory, or have an adapter around them.
    """
    if not isinstance(model, nn.Module):
        raise UsageProblem(
            f"`model` must be a path or a `Module`, and is a `{type(model).__name__}`",
            hint="give a folder, or a causal language model of transformers",
        )
    if output is None:
        raise UsageProblem(
            "a model in memory needs `output`, a new folder for its weights", hint="`export(model, OUT)`"
        )
    if graphs_only:
        raise UsageProblem(
            "`graphs_only` needs a model folder, not one in memory", hint="leave it out, or save the model first"
        )
    model = _require_plain(model)
    folder = make_temporary_folder()
    try:
        try:
            config = copy.deepcopy(model.config)
            config.architectures, config.dtype = [type(model).__name__], model.dtype
            config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
        except (ValueError, TypeError, OSError) as error:
            raise InputRefused(
                f"transformers cannot save the configuration: {first_line(error)}", hint="fix `generation_config`"
            ) from error
        # those that `save_pretrained` stores, by their names there; of tied ones the first alone
        whole = remove_tied_weights_from_state_dict(model.state_dict(), model)
        tensors = {name: _lazy(name, tensor) for name, tensor in revert_weight_conversion(model, whole).items()}
        yield Checkpoint(folder, "hf", tensors, read_json(folder / "config.json"), read_side_files(folder))
    finally:
        remove_temporary_folder(folder)


def _require_plain(model: Any) -> PreTrainedModel:
    """The model, if its weights are in memory, and are all of it."""
    if type(model).__module__.partition(".")[0] == "peft" or getattr(model, "_hf_peft_config_loaded", False):
        raise UsageProblem(
            "the model has an adapter that is not merged",
            hint="give `model.merge_and_unload()`, or save both and run `llmconv merge-lora BASE ADAPTER -o OUT`",
        )
    if getattr(getattr(model, "config", None), "auto_map", None):
        raise UsageProblem(
            "the model has code of its own, which is not in memory",
            hint="save it: `model.save_pretrained(FOLDER)`; then `export(FOLDER, OUT, trust_remote_code=True)`",
        )
    if isinstance(inner := getattr(model, "module", None), PreTrainedModel):
        raise UsageProblem(
            f"`model` is {type(model).__name__} around a {type(inner).__name__}", hint="give `model.module`"
        )
    model = require_causal_model(model)
    _require_known_class(model)
    _require_tied_head(model)
    if getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None):
        raise UsageProblem(
            "the weights of the model are quantized",
            hint="save it: `model.save_pretrained(FOLDER)`; then export FOLDER",
        )
    if odd := next((name for name, tensor in model.named_parameters() if type(tensor.data) is not torch.Tensor), None):
        raise UsageProblem(
            f"`{odd}` is divided between processes or has a layout of its own",
            hint="save it: `trainer.save_model(FOLDER)`; then export FOLDER",
        )
    return model


def _require_known_class(model: PreTrainedModel) -> None:
    """Refuses a class of the user's own, which may compute something else than the one that its config names."""
    kind, known = type(model), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    if kind.__module__.partition(".")[0] != "transformers" and kind not in (
        known if isinstance(known, tuple) else (known,)
    ):
        raise UsageProblem(
            f"the model's class `{kind.__name__}` is not of transformers, and its code is not in `config.json`",
            hint="register it: `AutoModelForCausalLM.register(ConfigClass, ModelClass)`; see docs/adding-a-family.md",
        )


def _require_tied_head(model: PreTrainedModel) -> None:
    """Refuses a head of its own where the config ties it to the embedding: graphs would read the embedding."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    own, shared = getattr(head, "weight", None), getattr(table, "weight", None)
    if own is None or shared is None or not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    if own is not shared and (own.shape != shared.shape or not torch.equal(own, shared.to(own))):
        raise UsageProblem(
            "`config.tie_word_embeddings` is true, and the output head differs from the embedding",
            hint="set `model.config.tie_word_embeddings = False`, or call `model.tie_weights()`",
        )


def _lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
    """A torch tensor of which only the rows that are asked for are copied; UsageProblem for an unsupported dtype."""
    dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise UsageProblem(f"`{name}` has the dtype {tensor.dtype}", hint="convert the model: `model.float()`")
    return LazyTensor(dtype, tuple(tensor.shape), partial(_rows, tensor.detach(), dtype))


def _rows(tensor: torch.Tensor, dtype: DType, start: int, stop: int) -> Array:
    rows = (tensor if tensor.ndim else tensor.reshape(1))[start:stop].cpu().contiguous()
    return rows.view(torch.uint8).numpy().view(dtype.numpy).reshape(rows.shape)
