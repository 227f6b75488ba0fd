"""MindFormers (MindSpore): `.ckpt` or MindSpore-flavored safetensors, one file or the rank folders of a run.

Names and layouts: mindformers 1.0 to 1.7, `models/*/convert_reversed.py`; the run's YAML gives the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint, read_side_files
from llmconv.convert.formats import Format
from llmconv.convert.formats.mindformers.config import OPTIONS, read_run_config
from llmconv.convert.formats.mindformers.converted_model import merge_lora
from llmconv.convert.formats.mindformers.read import is_mindspore, open_parameters, peek
from llmconv.convert.formats.mindformers.write import family_of, save
from llmconv.convert.models.config_file import with_architecture
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import MalformedInput, listing
from llmconv.model_code import AUTO_MAP


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    strategy = config.get("strategy")
    found = open_parameters(path, strategy if isinstance(strategy, Path) else None)
    family = family_of(found.tensors, path.name)
    run = read_run_config(path, {name: value for name, value in config.items() if name != "strategy"})
    with _blaming(found.strategy):
        tensors, merged = merge_lora(run, found.tensors)
        model = family.build(run, tensors)
    warnings = [*found.warnings, *merged, *model.warnings]
    if run.file_name:
        warnings.append(f"the configuration is that of `{run.file_name}`, which lies next to the checkpoint")
    side_files, more = _side_files(path, tokenizer)
    warnings += more
    release = run.fields.get("mindformers_version")
    return Checkpoint(
        path,
        FORMAT.name,
        model.tensors,
        model.config if AUTO_MAP in model.config else with_architecture(model.config),
        side_files,
        tuple(warnings),
        version=f"mindformers {release}" if isinstance(release, str) else "",
        shards=found.files,
        dropped=found.dropped,
        source_type=run.arch,
    )


@contextmanager
def _blaming(strategy: Path | None) -> Iterator[None]:
    """Names the strategy where joined tensors have other shapes than the configuration says."""
    try:
        yield
    except MalformedInput as error:
        if strategy is None:
            raise
        raise MalformedInput(
            f"joined by the strategy `{strategy}`: {error}",
            hint="the strategy, or the configuration, belongs to another run",
        ) from error


def _side_files(path: Path, tokenizer: Path | None) -> tuple[dict[str, bytes], list[str]]:
    """Tokenizer and generation files: the given ones, else those next to the checkpoint, where `save` puts them."""
    folder = path if path.is_dir() else path.parent
    found = read_side_files(folder)
    if tokenizer:
        kept = {name: content for name, content in found.items() if name == GENERATION_CONFIG}
        return {**kept, **read_tokenizer(tokenizer)}, []
    if any(name in TOKENIZERS for name in found):
        return found, [f"the tokenizer is that of {listing(sorted(found))}, which lies next to the checkpoint"]
    return found, ["a MindSpore checkpoint contains no tokenizer; give one with `--tokenizer` if you need it"]


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
GENERATION_CONFIG = "generation_config.json"

FORMAT = Format(
    name="mindformers",
    title="MindFormers 1.0 to 1.7 on MindSpore: `.ckpt`, its safetensors, or a folder of `rank_N`",
    covers="llama, qwen, internlm, baichuan, gpt2, bloom, chatglm2/3; with their own code (`--code`) Baichuan 1 and 2 "
    "13B and ChatGLM-6B; ranks joined by their strategy (`--strategy` if it lies elsewhere), LoRA merged; the run's "
    "YAML gives the configuration",
    detect=is_mindspore,
    open=_open,
    options=OPTIONS,
    peek=peek,
    save=save,
)
