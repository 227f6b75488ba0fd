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
from llmconv.errors import InputRefused, MalformedInput

OPTIONS = ("qkv_layout",)
LAYER_LIMIT = 10_000
"""More layers than any model has; a loop over them must end."""


@dataclass(frozen=True)
class RunConfig:
    """The fields of a run's model configuration, each read with a check.

    Attributes:
        source: file or folder name for error messages.
        fields: `model_config`, with the fields that the user adds.
        arch: class of the model, such as `LlamaForCausalLM`; empty where it is not said.
        lora: `pet_config`, the LoRA settings of the run.
        beside: name of the file beside the checkpoint that it comes from; empty where the user gives one.
    """

    source: str
    fields: Mapping[str, Any]
    arch: str
    lora: Mapping[str, Any]
    beside: str = ""

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is set, a positive whole number.

        Raises:
            InputRefused: none is set, and there is no default.
            MalformedInput: it is something else.
        """
        number = self.number(*names, default=default)
        limit = LAYER_LIMIT if names[0] == "num_layers" else 1 << 31
        if number != int(number) or not 0 < number < limit:
            raise self._wrong(names[0], number)
        return int(number)

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of `names` that is set, a finite number (YAML 1.1 reads `1e-5` as text).

        Raises:
            InputRefused: none is set, and there is no default.
            MalformedInput: it is no number.
        """
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
            raise self._wrong(name, self.fields[name]) from None
        if isinstance(self.fields[name], bool) or not math.isfinite(value):
            raise self._wrong(name, self.fields[name])
        return value

    def flag(self, name: str) -> bool:
        """Whether a field is set and true.

        Raises:
            MalformedInput: it is neither true nor false.
        """
        value = self.fields.get(name)
        if value not in (None, True, False):
            raise self._wrong(name, value)
        return bool(value)

    def tokens(self, **defaults: int | None) -> dict[str, Any]:
        """The special token ids, such as `bos_token_id`, where they are set or have a default."""
        found = {name: self.fields.get(name, default) for name, default in defaults.items()}
        return {name: value for name, value in found.items() if _is_token(value)}

    def _wrong(self, name: str, value: Any) -> MalformedInput:
        return MalformedInput(
            f"`{name}` in the configuration of `{self.source}` is {str(value)[:40]!r}",
            hint="the configuration is of another model; give the YAML file of the run with `--config`",
        )


WHOLE = {"model", "architectures", "num_layers", "num_hidden_layers"}
"""Fields by which a configuration is more than a few fields that a user adds."""


def read_run_config(path: Path, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of the checkpoint at `path`: the only run configuration beside it, and what the user adds.

    A whole configuration that the user gives (with `model`, or a `config.json`) stands alone.

    Raises:
        MalformedInput: not of the form of a run configuration.
    """
    beside, run = ("", given) if {*given} & WHOLE else _beside(path)
    run = {**run, **given}
    model = _section(run, "model")
    # what stands beside `model` is from other files: fields that the user adds, or a `config.json`
    fields = {**_section(model, "model_config"), **{name: value for name, value in run.items() if name != "model"}}
    classes = run.get("architectures")
    arch = str(_section(model, "arch").get("type") or (classes[0] if isinstance(classes, list) and classes else ""))
    lora = {**_section(model, "pet_config"), **_section(fields, "pet_config")}
    lora |= {name: run[name] for name in ("lora_alpha", "lora_rank") if name in run}
    return RunConfig(path.name, fields, arch, lora, beside)


def _is_token(value: Any) -> bool:
    """Whether it is a token id, or a list of them."""
    values = value if isinstance(value, list) and value else [value]
    return all(type(one) is int and one >= 0 for one in values)


def _section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping under `name`, or an empty one."""
    value = parent.get(name)
    return value if isinstance(value, Mapping) else {}


def _beside(path: Path) -> tuple[str, dict[str, Any]]:
    """Name and content of the YAML file of the run, where exactly one lies in the folder (or beside the file)."""
    folder = path if path.is_dir() else path.parent
    runs = []
    for file in sorted(entry for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")):
        try:
            content = read_config_file(file)
        except MalformedInput:  # whoever put it there, it is not what the user named
            continue
        if _section(_section(content, "model"), "model_config"):
            runs.append((file.name, content))
    return runs[0] if len(runs) == 1 else ("", {})
