"""The model class of each `model_type`, read from the installed transformers' source without importing it."""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path

TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@lru_cache(maxsize=1)
def causal_lm_classes() -> dict[str, str]:
    """`model_type` to class name, such as `gpt2` to `GPT2LMHeadModel`; empty where transformers keeps it elsewhere.

    Source: `TABLE` in transformers `models/auto/modeling_auto.py`, the table behind AutoModelForCausalLM. Importing it
    would load torch, so the source is parsed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0], "models", "auto", "modeling_auto.py")
    if not source.is_file():
        return {}
    for node in ast.parse(source.read_bytes(), str(source)).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[rows])) if name == TABLE:
                return {kind: name for kind, name in ast.literal_eval(rows) if isinstance(name, str)}
    return {}
