"""Graphs without a cache: what `--task` and `--no-cache` write instead of graphs that generate."""

from __future__ import annotations

from dataclasses import replace

from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused, UnsupportedInput
from llmconv.export.export_options import EMBED, GENERATE, RERANK, SCORING, ExportOptions
from llmconv.export.graph_spec import NO_CACHE, GraphSpec
from llmconv.export.language_model import LanguageModel
from llmconv.export.sentence_modules import MODULES, SentenceHead, SentenceModules, TokenScore, read_sentence_modules
from llmconv.progress import say


def with_task(
    checkpoint: Checkpoint, model: LanguageModel, given: ExportOptions
) -> tuple[Checkpoint, dict[str, GraphSpec]]:
    """The checkpoint with the modules after the model, and the spec of the graph by its role; none to generate.

    Raises:
        UnsupportedInput: a model or a module that graphs without a cache do not compute.
        InputRefused: the folder does not declare what the task needs.
    """
    task = given["task"]
    if task == GENERATE and not given["no_cache"]:
        _require_causal_attention(model)
        return checkpoint, {}
    if model.naming:
        raise UnsupportedInput(
            "graphs without a cache take tokens, and those of a multi-modal model take embeddings",
            hint="leave out `--task` and `--no-cache`",
        )
    if task != GENERATE:
        _require_decoder(model, task)
    if extras := model.input_map.extra_inputs(model.config):
        raise UnsupportedInput(
            f"graphs without a cache take tokens alone, and this family has the input `{next(iter(extras))}`",
            hint="leave out `--task` and `--no-cache`",
        )
    spec = GraphSpec(NO_CACHE, logits=given["logits_dtype"])
    if task == GENERATE:
        return checkpoint, {SCORING: spec}
    modules = read_sentence_modules(checkpoint.path)
    return _with_modules(checkpoint, modules), {task: replace(spec, task=task, head=_head(task, modules))}


def _head(task: str, modules: SentenceModules | None) -> SentenceHead | TokenScore | None:
    """What follows the model."""
    if task == RERANK:
        if modules is None or modules.score is None:
            raise InputRefused(
                f"`--task rerank` needs a `{MODULES}` with a LogitScore module, which names the tokens of yes and no",
                hint="docs/embeddings.md has an example for Qwen3-Reranker; a classifier has `--task classify`",
            )
        return modules.score
    if task == EMBED and (modules is None or modules.head is None):
        say(f"no pooling module in `{MODULES}`: the graph returns `last_hidden_state` alone")
    return modules.head if modules and task == EMBED else None


def _with_modules(checkpoint: Checkpoint, modules: SentenceModules | None) -> Checkpoint:
    if modules is None:
        return checkpoint
    places = {name: tensor.location for name, tensor in modules.tensors.items()}
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **modules.tensors},
        side_files={**checkpoint.side_files, **modules.side_files},
        files={**checkpoint.files, **places},
    )


def _require_causal_attention(model: LanguageModel) -> None:
    """Refuses to generate with a model whose tokens attend to later ones."""
    config = model.config
    if (
        getattr(config, "use_bidirectional_attention", None) in (True, "all")
        or getattr(config, "is_causal", True) is False
    ):
        raise UnsupportedInput(
            "tokens of this model attend to later tokens, so it cannot generate with a cache",
            hint="`--task embed` exports it as an embedding model",
        )


def _require_decoder(model: LanguageModel, task: str) -> None:
    """Refuses an encoder, whose positions and segments are not those of decoders."""
    if getattr(model.config, "is_decoder", True) is False:
        raise UnsupportedInput(
            f"a {model.config.model_type} without `is_decoder` is an encoder, and `--task {task}` exports decoders",
            hint="`optimum-cli export onnx` exports encoders",
        )
