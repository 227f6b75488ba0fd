"""MindFormers (MindSpore): `.ckpt` or MindSpore-flavoured safetensors, one file or the rank folders of a run.

Names and layouts: mindformers 1.0 to 1.7, `models/*/convert_reversed.py`; the run's YAML gives the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.configs import with_architecture
from llmconv.convert.formats import Format
from llmconv.convert.mindformers.families import family_of
from llmconv.convert.mindformers.files import is_mindspore, open_parameters
from llmconv.convert.mindformers.parts import merge_lora
from llmconv.convert.mindformers.run_config import OPTIONS, read_run_config
from llmconv.convert.mindformers.save import save
from llmconv.convert.tokenizers.source import read_tokenizer


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    found = open_parameters(path)
    family = family_of(found.tensors, path.name)
    run = read_run_config(path, config)
    tensors, merged = merge_lora(run, found.tensors)
    model = family.build(run, tensors)
    warnings = [*found.warnings, *merged, *model.warnings]
    if run.beside:
        warnings.append(f"the configuration is that of `{run.beside}`, which lies beside the checkpoint")
    side_files = read_tokenizer(tokenizer) if tokenizer else {}
    if not side_files:
        warnings.append("a MindSpore checkpoint holds no tokenizer; give one with `--tokenizer` if you need it")
    return Checkpoint(path, FORMAT.name, model.tensors, with_architecture(model.config), side_files, tuple(warnings))


FORMAT = Format(
    name="mindformers",
    title="MindFormers / MindSpore (.ckpt, safetensors with format ms, or a folder of rank_N)",
    detect=is_mindspore,
    open=_open,
    options=OPTIONS,
    peek=lambda path: open_parameters(path).tensors,
    covers="Llama 1 to 3, Qwen 1 to 3, InternLM 1 and 2, Baichuan 1 and 2 (7B), GPT-2, BLOOM, ChatGLM 2 and 3; "
    "with LoRA, over ranks with their strategy; `from-hf` writes Llama, Qwen 2 and 3, GPT-2, BLOOM and GLM",
    save=save,
)
