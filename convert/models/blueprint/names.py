"""The model classes of each `model_type`, read from the installed transformers' source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmconv.convert.models.blueprint.transformers_source import assigned, source, transformers_folder

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


HEADS = ("lm_head.weight", "embed_out.weight")
FOLDER_NAME = re.compile(r"[A-Za-z0-9_.]{1,100}", re.ASCII)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


@dataclass(frozen=True)
class ModelNames:
    """Names of a causal language model's parts; empty if the source of transformers does not contain them."""

    base: str  # the attribute that holds the model without its head, such as `model` or `transformer`
    embedding: str = ""
    head: str = ""
    tied: bool | None = None  # default for whether the head is the embedding; None if unknown

    @property
    def roots(self) -> tuple[str, ...]:
        """What the names of a whole model begin with; heads had other names in older versions."""
        return tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in (self.base, self.head, *HEADS) if name))


@lru_cache(maxsize=8)
def model_names(model_type: str) -> ModelNames:
    """The names for `model_type`; `model` alone where the source of the installed transformers does not contain them.

    Source: `base_model_prefix` and `_tied_weights_keys` in transformers `models/*/modeling_*.py`, and the default of
    `tie_word_embeddings` in `configuration_*.py`.
    """
    folder = model_folder(model_type)
    modeling = source(folder / f"modeling_{folder.name}.py").classes if folder else {}
    causal = modeling.get(causal_lm_classes().get(model_type, ""))
    bases = [found for body in modeling.values() if isinstance(found := _value(body, "base_model_prefix"), str)]
    pairs = _value(causal, "_tied_weights_keys") if causal else None
    head, embedding = next(iter(pairs.items())) if isinstance(pairs, dict) and pairs else ("", "")
    base = next((name for name in bases if name and embedding.startswith(f"{name}.")), bases[0] if bases else "model")
    return ModelNames(base, embedding, head, _tied(folder, model_type) if folder else None)


def _tied(folder: Path, model_type: str) -> bool | None:
    for body in source(folder / f"configuration_{folder.name}.py").classes.values():
        if _value(body, "model_type") == model_type:
            found = _value(body, "tie_word_embeddings")
            return found if isinstance(found, bool) else None
    return None


def model_folder(model_type: str) -> Path | None:
    """Where transformers keeps the source of a model type."""
    root, name = transformers_folder(), model_type.replace("-", "_")
    if not FOLDER_NAME.fullmatch(name):
        return None
    folders = [root / "models" / one for one in (name, name.removesuffix("_text"))] if root else []
    return next((folder for folder in folders if folder.is_dir()), None)


def _value(body: list[ast.stmt], field: str) -> Any:
    """The literal that a class gives `field`, or None."""
    for value in assigned(body, field):
        try:
            return ast.literal_eval(value)
        except ValueError:
            return None
    return None
