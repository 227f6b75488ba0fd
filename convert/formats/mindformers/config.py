"""The configuration of a MindFormers run: `model.model_config` of its YAML, or plain fields of the same names.

Source: mindformers `models/*/*_config.py` (names and defaults) and `configs/*/*.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.convert.models.config_file import read_config_file
from llmconv.convert.models.trusted_code import OPTION
from llmconv.errors import InputRefused, MalformedInput

OPTIONS = ("qkv_layout", "strategy", OPTION)
LAYER_LIMIT = 10_000
"""More layers than any model has; a loop over them must end."""


@dataclass(frozen=True)
class RunConfig:
    """The fields of a run's model configuration, type-checked when they are read (MalformedInput).

    Attributes:
        source: name of the checkpoint's file or folder, for error messages.
        fields: `model_config`, with the fields that the user adds.
        arch: class of the model, such as `LlamaForCausalLM`; empty where it is unknown.
        lora: `pet_config`, the LoRA settings of the run.
        file_name: of the YAML file next to the checkpoint; empty where the user gives the configuration.
    """

    source: str
    fields: Mapping[str, Any]
    arch: str
    lora: Mapping[str, Any]
    file_name: str = ""

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set, a positive integer; InputRefused if none is, and there is no default."""
        number = self.number(*names, default=default)
        limit = LAYER_LIMIT if names[0] == "num_layers" else 1 << 31
        if number != int(number) or not 0 < number < limit:
            raise self._invalid(names[0], number)
        return int(number)

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of `names` that is set, a finite number (YAML 1.1 reads `1e-5` as text); errors as in `integer`."""
        name = next((name for name in names if self.fields.get(name) is not None), None)
        if name is None:
            if default is None:
                raise InputRefused(
                    f"the configuration of `{self.source}` has no `{names[0]}`",
                    hint="give the run's YAML with `--config run.yaml`, and its `pretrained_model_dir` if it has one",
                )
            return default
        try:
            value = float(self.fields[name])
        except (TypeError, ValueError, OverflowError):
            raise self._invalid(name, self.fields[name]) from None
        if isinstance(self.fields[name], bool) or not math.isfinite(value):
            raise self._invalid(name, self.fields[name])
        return value

    def flag(self, name: str) -> bool:
        """Whether a field is set and true; MalformedInput if it is not a boolean."""
        value = self.fields.get(name)
        if value not in (None, True, False):
            raise self._invalid(name, value)
        return bool(value)

    def tokens(self, **defaults: int | None) -> dict[str, Any]:
        """The special token ids, such as `bos_token_id`, that are set or have a default."""
        found = {name: self.fields.get(name, default) for name, default in defaults.items()}
        return {name: value for name, value in found.items() if _is_token(value)}

    def _invalid(self, name: str, value: Any) -> MalformedInput:
        return MalformedInput(
            f"`{name}` in the configuration of `{self.source}` is invalid: {str(value)[:40]!r}",
            hint="the configuration belongs to another model; give the YAML file of the run with `--config`",
        )


WHOLE = {"model", "architectures", "num_layers", "num_hidden_layers"}
"""Any of these fields makes a configuration complete, rather than a few fields that the user adds."""


def read_run_config(path: Path, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of a checkpoint: the run's YAML next to it, if there is exactly one, and the user's fields.

    A complete configuration from the user (with `model`, or a `config.json`) replaces the YAML.
    """
    file_name, run = ("", given) if {*given} & WHOLE else _run_yaml(path)
    run = {**run, **given}
    model = _section(run, "model")
    # fields next to `model` are from elsewhere: added by the user, or from a `config.json`
    fields = {**_section(model, "model_config"), **{name: value for name, value in run.items() if name != "model"}}
    classes = run.get("architectures")
    arch = str(_section(model, "arch").get("type") or (classes[0] if isinstance(classes, list) and classes else ""))
    lora = {**_section(model, "pet_config"), **_section(fields, "pet_config")}
    lora |= {name: run[name] for name in ("lora_alpha", "lora_rank") if name in run}
    return RunConfig(path.name, fields, arch, lora, file_name)


def _is_token(value: Any) -> bool:
    """Whether it is a token id, or a list of them."""
    values = value if isinstance(value, list) and value else [value]
    return all(type(one) is int and one >= 0 for one in values)


def _section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping under `name`, or an empty one."""
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}


def _run_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and content of the run's YAML file, if exactly one lies in the folder (or next to the file)."""
    folder = path if path.is_dir() else path.parent
    runs = []
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")):
        try:
            content = read_config_file(file)
        except MalformedInput:  # a YAML file of something else: the user did not name it
            continue
        if _section(_section(content, "model"), "model_config"):
            runs.append((file.name, content))
    return runs[0] if len(runs) == 1 else ("", {})
