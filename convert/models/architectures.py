"""The model classes of each `model_type`, read from the installed transformers' source without importing it."""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path

TABLE = "MODEL_FOR_{}_MAPPING_NAMES"


def causal_lm_classes() -> dict[str, str]:
    """`model_type` to class name, such as `gpt2` to `GPT2LMHeadModel`; empty where transformers keeps it elsewhere."""
    return auto_classes("CAUSAL_LM")


@lru_cache(maxsize=8)
def auto_classes(task: str) -> dict[str, str]:
    """`model_type` to the class that transformers loads for a task; empty where it keeps the table elsewhere.

    Source: `TABLE` in transformers `models/auto/modeling_auto.py`, the tables behind AutoModelForCausalLM and others.
    Importing it would load torch, so the source is parsed. `task` is as in the name of the table, such as `CAUSAL_LM`.
    """
    for node in _auto_tables():
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[rows])) if name == TABLE.format(task):
                return {kind: name for kind, name in ast.literal_eval(rows) if isinstance(name, str)}
    return {}


@lru_cache(maxsize=1)
def _auto_tables() -> list[ast.stmt]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return []
    source = Path(spec.submodule_search_locations[0], "models", "auto", "modeling_auto.py")
    return ast.parse(source.read_bytes(), str(source)).body if source.is_file() else []
