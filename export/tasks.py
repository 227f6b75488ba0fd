"""Graphs without a cache: what `--task` and `--no-cache` write instead of graphs that generate."""

from __future__ import annotations

from dataclasses import replace

from llmconv.argument_checks import require_choice
from llmconv.checkpoint import Checkpoint
from llmconv.errors import InputRefused, UnsupportedInput, UsageProblem
from llmconv.export.export_options import DEFAULTS, ExportOptions
from llmconv.export.graph_spec import NO_CACHE, GraphSpec
from llmconv.export.language_model import LanguageModel
from llmconv.export.sentence_modules import MODULES, SentenceHead, SentenceModules, TokenScore, read_sentence_modules
from llmconv.export.tracing.fake_model import CLASSIFY
from llmconv.export.tracing.single_pass import EMBED, RERANK
from llmconv.progress import say

GENERATE, SCORING = "generate", "scoring"
TASKS = (GENERATE, EMBED, CLASSIFY, RERANK)
"""Values of the option `task`."""

FITTING = (
    "task",
    "no_cache",
    "opset",
    "strict_target",
    "dtype",
    "max_shard_size",
    "graphs_only",
    "overwrite",
    "resume",
    "dry_run",
    "logits_dtype",
    "trust_remote_code",
)
"""Options that graphs without a cache take; all others are about generating, or about weights that were changed."""


def require_fitting(given: ExportOptions) -> None:
    """Refuses options that graphs without a cache do not have.

    Raises:
        UsageProblem: an unknown task, both options, or an option of graphs that generate.
    """
    task = given["task"]
    require_choice(task, TASKS, "task")
    if task == GENERATE and not given["no_cache"]:
        return
    if task != GENERATE and given["no_cache"]:
        raise UsageProblem(f"graphs of `--task {task}` keep no cache anyway", hint="leave out `--no-cache`")
    option = "--no-cache" if given["no_cache"] else f"--task {task}"
    for name, value in given.items():
        if name not in FITTING and value != DEFAULTS[name]:  # type: ignore[literal-required]
            raise UsageProblem(
                f"`--{name.replace('_', '-')}` is not supported with `{option}`", hint="leave one of the two out"
            )
    if given["trust_remote_code"] and task != GENERATE:
        raise UsageProblem(
            f"`--task {task}` exports models of transformers only", hint="leave out `--trust-remote-code`"
        )


def with_task(
    checkpoint: Checkpoint, model: LanguageModel, given: ExportOptions
) -> tuple[Checkpoint, dict[str, GraphSpec]]:
    """The checkpoint with the modules after the model, and the spec of the graph by its role; none to generate.

    Args:
        checkpoint: the model.
        model: its language model.
        given: the options.

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
