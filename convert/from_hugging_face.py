"""from_hf: a Hugging Face folder becomes a training checkpoint, by the tables of `to_hf` read backwards.

write_gguf: the same for one GGUF file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked
from llmconv.causal_lm import SPECIAL_TOKENS, architecture, generation_fields, mtp_tensors, require_model_type
from llmconv.checkpoint import TEMPLATES, Checkpoint, open_checkpoint
from llmconv.convert.assembly import map_names
from llmconv.convert.formats import formats
from llmconv.convert.models.blueprint import released
from llmconv.convert.models.completeness import as_loaded, check_complete
from llmconv.convert.models.config_file import with_architecture
from llmconv.convert.models.head_and_dtype import check_dtype, lacks_head, plain_tensors, settle_head, with_cast
from llmconv.convert.models.model_config import SHARD_LIMIT
from llmconv.convert.models.transformers_source import causal_lm_classes, model_names
from llmconv.convert.tokenizers import special_ids
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, UsageProblem, listing, word
from llmconv.files.paths import Placed, output_path, output_place
from llmconv.files.safe_folder import require_parents
from llmconv.files.sources import fetches, local_path, reading_safely, source_name
from llmconv.model_code import model_class
from llmconv.output.local_folder import require_space
from llmconv.output.manifest import step, steps_of_weights
from llmconv.output.plan import Plan, json_bytes
from llmconv.output.work import Work, done_by, repeatable, require_possible
from llmconv.output.writer import check_output, write_checkpoint, write_file
from llmconv.progress import warn_all
from llmconv.tensors import LazyTensor


@repeatable("model", "output")
@fetches
@checked
def from_hf(  # noqa: PLR0913 - the options of the command, by the same names
    model: str | Path,
    output: Placed,
    *,
    to: str,
    shards: int = 1,
    dtype: str = "keep",
    imatrix: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    work: Work | None = None,
) -> Plan:
    """Converts the Hugging Face folder `model` into the training checkpoint `output`; returns what was written.

    Args:
        model: a folder, or its URI or hub id.
        output: the folder to make.
        to: name of a training format that has a way back.
        shards: number of tensor-parallel (model-parallel) parts.
        dtype: `keep` or the float type of the weights; for `gguf` also a mixture of llama.cpp, such as `q4_k_m`.
        imatrix: an importance matrix of llama.cpp, for such a mixture.
        overwrite: replace an existing model folder.
        resume: continue an interrupted run.
        dry_run: return the plan, and write nothing.
        work: `Part(3, 16)` of the shards, `Finish()` after all parts, `Workers(8)` or `Ray()`; None: all here.

    Raises:
        InputRefused: the folder is malformed, or the format cannot hold such a model; or `output` exists.
        UsageProblem, OutputFailed: an option has an impossible value; writing failed.
    """
    require_possible(work, overwrite=overwrite)
    matrix = local_path(imatrix) if imatrix is not None else None
    checkpoint, plan = _planned(model, to, shards, dtype, matrix)
    place = output_place(output)
    check_output(plan, place, overwrite, [checkpoint.path], resume=resume)
    if not dry_run:
        given = source_name(matrix) if matrix else None
        made = step("from-hf", checkpoint.path, to=to, shards=shards, dtype=dtype, imatrix=given)
        steps = [*steps_of_weights(checkpoint.path), made]
        sources = _sources(checkpoint.path)
        sources += [matrix] if matrix else []
        asked: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "work": work}
        done = write_checkpoint(plan, place, steps=steps, sources=sources, **asked)
        plan = done_by(work, plan, done.found)
    return plan


def _sources(folder: Path) -> list[Path]:
    """The files that decide the output: also modules after the model, and further chat templates."""
    patterns = ("*", "*/config.json", f"{TEMPLATES}/*.jinja")
    return sorted(entry for pattern in patterns for entry in folder.glob(pattern) if entry.is_file())


def _planned(model: str | Path, to: str, shards: int, dtype: str, matrix: Path | None) -> tuple[Checkpoint, Plan]:
    """The model, and what is written of it; warns of what the format has no place for."""
    known = {found.name: found for found in formats().values() if found.save}
    if to not in known:
        problem = f"the format `{to}` cannot be written" if to in formats() else f"unknown format `{to}`"
        raise UsageProblem(problem, hint=f"`--to` is one of: {', '.join(known)}")
    own = known[to].dtypes.get(dtype)
    if own is None and known[to].dtypes and dtype != "keep":
        raise UsageProblem(f"unknown dtype `{dtype}`", hint=f"one of: keep, {', '.join(known[to].dtypes)}")
    if own is None:
        check_dtype(dtype)
        if matrix is not None:
            raise UsageProblem(
                "`--imatrix` is for types of GGUF that have blocks", hint="give `--to gguf --dtype q4_k_m` with it"
            )
    if not 1 <= shards <= SHARD_LIMIT:
        raise UsageProblem(f"{shards} shards are not possible", hint=f"`--shards` is 1 to {SHARD_LIMIT}")
    with reading_safely(model):
        checkpoint = open_model(local_path(model, in_parts=True))
    if settings := settings_in_config(checkpoint):
        checkpoint = replace(checkpoint, side_files={**checkpoint.side_files, GENERATION: json_bytes(settings)})
    save = known[to].save
    assert save
    plan = own(checkpoint, shards, matrix) if own else save(with_cast(checkpoint, dtype), shards)
    lost = [name for name in plan.checkpoint.side_files if name not in plan.small_files]
    left = [one for name in lost for one in (settings if name == GENERATION and settings else [name])]
    notes = [f"a checkpoint of the format `{to}` has no place for {listing(left)}"] if left else []
    warn_all((*checkpoint.warnings, *plan.warnings, *notes))
    return checkpoint, plan


GENERATION = "generation_config.json"


def settings_in_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of generation that only `config.json` has, which a training format replaces by its own; else {}.

    End tokens are among them where there are several, or another one than the tokenizer's, which such formats state.
    """
    if GENERATION in checkpoint.side_files:
        return {}
    fields, own = generation_fields(checkpoint.config), None
    ends = fields.get("eos_token_id")
    with suppress(MalformedInput):  # the format says whether it needs the tokenizer
        _, own = special_ids(checkpoint.side_files)
    is_other = isinstance(ends, list) or (ends is not None and own is not None and ends != own)
    return fields if is_other or fields.keys() - {*SPECIAL_TOKENS} else {}


MIXTURES = (*("q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0"), *("q4_k_m", "q4_k_s", "q4_1", "q4_0"))
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", **{name: name for name in MIXTURES}}
"""Types of the matrices of a GGUF file, and the values of `dtype` that stand for them."""
NAME, SUFFIX = "model.gguf", ".gguf"


def gguf_path(output: Any) -> Path:
    """The file that an output names: `model.gguf` in an existing folder, or in one whose name ends with `/`.

    Raises UsageProblem for a name without `.gguf`, and as `output_path`.
    """
    path = output_path(output)
    if path.is_dir() or os.fspath(output).endswith("/"):
        return path / NAME
    if path.suffix.lower() != SUFFIX:
        raise UsageProblem(
            f"`{path.name}` does not end with `{SUFFIX}`",
            hint=f"give `-o {word(f'{path}{SUFFIX}')}`, or `-o {word(f'{path}/')}` for a folder",
        )
    return path


def require_new_file(path: Path, *, overwrite: bool) -> None:
    """Raises InputRefused for a path that exists, unless it is a file to replace, or has no folder to be in."""
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        raise InputRefused(f"`{path}` exists", hint="give another name, or `--overwrite` to replace a file")
    require_parents(path)


def write_gguf(
    model: str | Path,
    output: Path | str,
    *,
    type: str | None = None,
    imatrix: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Plan:
    """Writes one GGUF file; see `llmconv.compressed.to_gguf`."""
    if type is not None and type not in TYPES:
        raise UsageProblem(f"unknown type `{type}`", hint=f"one of: {', '.join(TYPES)}")
    path = gguf_path(output)
    require_new_file(path, overwrite=overwrite)
    matrix = local_path(imatrix) if imatrix is not None else None
    checkpoint, plan = _planned(model, "gguf", 1, TYPES[type] if type else "keep", matrix)
    if path.exists() and any(
        path.samefile(file) for file in {getattr(one, "path", path.parent) for one in checkpoint.values()}
    ):
        raise InputRefused(f"`{path}` has the weights of the model itself", hint="give another name")
    if matrix is not None and path.exists() and path.samefile(matrix):
        raise InputRefused(f"`{path}` is the importance matrix itself", hint="give another name")
    require_space(path, plan.nbytes)
    if not dry_run:
        sources = _sources(checkpoint.path)
        write_file(plan, path, sources=sources, overwrite=overwrite)
    return plan


def open_model(path: Path) -> Checkpoint:
    """A Hugging Face folder, without buffers and a tied head; InputRefused if missing, incomplete, or quantized."""
    checkpoint = open_checkpoint(path)
    require_model_type(checkpoint.config, path.name)
    tensors = dict(released(plain_tensors(checkpoint), checkpoint.config))
    if named := model_class(checkpoint.config):
        raise UnsupportedInput(
            f"`{path.name}` has code of its own (`{named[:80]}`), which no training format holds",
            hint="if transformers' own class computes the same, remove `auto_map` from its `config.json`",
        )
    tensors, named_config = _of_base_class(tensors, checkpoint.config, path.name)
    config = as_loaded(tensors, named_config)
    heads = {name: tensors.pop(name) for name in mtp_tensors(tensors, config)}
    left = (
        [f"{len(heads)} tensors of the MTP head are left out: training formats have no names for them"] if heads else []
    )
    warnings = [*checkpoint.warnings, *left, *check_complete(tensors, config, path.name)]
    config = settle_head(tensors, config, warnings)
    return replace(checkpoint, tensors=tensors, config=config, warnings=tuple(warnings))


def _of_base_class(
    tensors: dict[str, LazyTensor], config: Mapping[str, Any], source: str
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """The tensors and config of a model that `AutoModel` saved (Qwen3-Embedding), with the names of the causal class.

    Others are returned as they are. UnsupportedInput if the causal class has a head of its own, which is not there.
    """
    kind = str(config.get("model_type"))
    model = model_names(kind)
    short = model.embedding.removeprefix(f"{model.base}.")
    if not model.base or kind not in causal_lm_classes() or model.embedding in tensors or short not in tensors:
        return tensors, dict(config)
    names, outside, added = map_names(list(tensors), model, source)
    if outside or not added:
        return tensors, dict(config)
    renamed = {names[name]: tensor for name, tensor in tensors.items()}
    if lacks_head(renamed, config):
        raise UnsupportedInput(
            f"`{source}` was saved without its output head, which is not tied to the embedding "
            f"(`architectures` is {architecture(config)[:80] or 'missing'})",
            hint="give the model as `AutoModelForCausalLM` saves it",
        )
    return renamed, with_architecture(config)
