"""Consent to the code of a model in a conversion, and the configuration of a model that only its own code computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.checkpoint import own_file, read_json
from llmconv.errors import InputRefused, MalformedInput
from llmconv.model_code import AUTO_MAP, REPOSITORY, auto_map, holds, model_class

OPTION = "trust_remote_code"
"""The option of `to_hf` under which a format finds a `TrustedCode`; a JSON file can only give it a plain value."""


@dataclass(frozen=True)
class TrustedCode:
    """Consent to run a model's code in `given` (None: next to the config) or the first of `others` with all modules."""

    given: Path | None = None
    others: tuple[Path, ...] = ()

    def folder(self, names: Iterable[str]) -> Path:
        """The first folder with the modules of all classes, such as `modeling_x.XForCausalLM`, or the first of all."""
        folders = (self.given,) if self.given else self.others
        return next((folder for folder in folders if holds(folder, names)), folders[0])

    def declared(self) -> dict[str, Any]:
        """The `config.json` in the caller's folder; empty without one, MalformedInput if not JSON or a link out."""
        if not self.given or not (self.given / "config.json").is_file():
            return {}
        return read_json(own_file(self.given, "config.json"))


def trusted_code(options: Mapping[str, Any]) -> TrustedCode | None:
    """The consent among the options of a format; None without."""
    found = options.get(OPTION)
    return found if isinstance(found, TrustedCode) else None


def own_fields(stored: Mapping[str, Any], given: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """The config of a model with trusted code, else None; InputRefused: no class there, or another model's."""
    code = trusted_code(given)
    if code is None:
        return None
    fields = {**stored, **{name: value for name, value in given.items() if name != OPTION}}
    declared = code.declared()
    if "model_type" not in fields:  # the folder of the code describes the model, too
        fields = {**declared, **fields}
    kind, other = fields.get("model_type"), declared.get("model_type")
    if other is not None and kind != other:
        raise MalformedInput(
            f"the code in `{code.given}` is that of a `{str(other)[:60]}`, and `{source}` is a `{str(kind)[:60]}`",
            hint="give the folder of the model that was trained, or its configuration with `--config`",
        )
    found = declared if auto_map(declared) else fields
    if not model_class(found):
        if code.given:
            raise InputRefused(
                f"no `config.json` names a class of the code in `{code.given}`",
                hint="its `auto_map` needs an `AutoModelForCausalLM`, such as `modeling_x.XForCausalLM`",
            )
        return None
    return {**fields, AUTO_MAP: localized(found[AUTO_MAP]) if code.given else found[AUTO_MAP]}


def localized(found: Any) -> Any:
    """An `auto_map` whose classes are in the model's folder: `org/name--module.Class` becomes `module.Class`."""
    if isinstance(found, dict):
        return {name: localized(value) for name, value in found.items()}
    if isinstance(found, list):
        return [localized(value) for value in found]
    return found.rpartition(REPOSITORY)[2] if isinstance(found, str) else found


def class_name(fields: Mapping[str, Any]) -> str:
    """The name of the language model's class, without its module."""
    return model_class(fields).rpartition(".")[2]
