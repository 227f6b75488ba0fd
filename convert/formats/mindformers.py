"""MindFormers (MindSpore): `.ckpt` or MindSpore-flavoured safetensors, one file or the rank folders of a run.

Names and layouts: mindformers 1.0 to 1.7, `models/*/convert_reversed.py`; the run's YAML gives the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import Checkpoint
from llmconv.convert.configs import with_architecture
from llmconv.convert.formats import Format
from llmconv.convert.mapping import listing
from llmconv.convert.mindformers.files import is_mindspore, open_parameters, peek
from llmconv.convert.mindformers.glm import build_glm
from llmconv.convert.mindformers.gpt import build_bloom, build_gpt2
from llmconv.convert.mindformers.llama import build_core, build_llama, build_qwen
from llmconv.convert.mindformers.parts import Family, merge_lora
from llmconv.convert.mindformers.run_config import OPTIONS, read_run_config
from llmconv.convert.tokenizers.source import read_tokenizer
from llmconv.errors import UnsupportedInput
from llmconv.tensors import LazyTensor

FAMILIES = (
    Family(re.compile(r"model\.(?:layers\.\d+\.attention|tok_embeddings)\."), build_llama),
    Family(re.compile(r"transformer\.(?:layers\.\d+\.attention\.w[qkvo_]|wte\.)"), build_qwen),
    Family(re.compile(r"^decoder\.layers\."), build_core),
    Family(re.compile(r"^backbone\."), build_gpt2),
    Family(re.compile(r"^(?:transformer\.)?blocks\.\d+\.attention\.dense1\."), build_bloom),
    Family(re.compile(r"^transformer\.encoder\."), build_glm),
)


def _open(path: Path, config: Mapping[str, Any], tokenizer: Path | None) -> Checkpoint:
    found = open_parameters(path)
    family = _family(path, found.tensors)
    run = read_run_config(path, config)
    tensors, merged = merge_lora(run, found.tensors)
    model = family.build(run, tensors)
    warnings = [*found.warnings, *merged, *model.warnings]
    if run.beside:
        warnings.append(f"the configuration is that of `{run.beside}`, which lies beside the checkpoint")
    side_files = read_tokenizer(tokenizer) if tokenizer else {}
    if not side_files:
        warnings.append("a MindSpore checkpoint holds no tokenizer; give one with `--tokenizer` if you need it")
    release = run.fields.get("mindformers_version")
    return Checkpoint(
        path,
        FORMAT.name,
        model.tensors,
        with_architecture(model.config),
        side_files,
        tuple(warnings),
        version=f"mindformers {release}" if isinstance(release, str) else "",
        shards=found.files,
        dropped=found.dropped,
    )


def _family(path: Path, tensors: Mapping[str, LazyTensor]) -> Family:
    """The family whose sign is among the names.

    Raises:
        UnsupportedInput: none.
    """
    for family in FAMILIES:
        if any(family.sign.search(name) for name in tensors):
            return family
    raise UnsupportedInput(
        f"`{path.name}` is a MindSpore checkpoint of no known model: it holds {listing(sorted(tensors)) or 'nothing'}",
        hint="known are llama, qwen, internlm, baichuan, gpt2, bloom and chatglm2/3 under MindFormers' names",
    )


FORMAT = Format(
    name="mindformers",
    title="MindFormers 1.0 to 1.7 on MindSpore: `.ckpt`, its safetensors, or a folder of `rank_N`",
    covers="llama, qwen, internlm, baichuan, gpt2, bloom, chatglm2/3; ranks joined by their strategy, LoRA merged; "
    "the run's YAML gives the configuration",
    detect=is_mindspore,
    open=_open,
    options=OPTIONS,
    peek=peek,
)
