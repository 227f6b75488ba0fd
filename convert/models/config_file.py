"""Reading and cleaning configurations: the files of the user, the fields of a model, consent to its own code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmconv.causal_lm import architecture, is_encoder
from llmconv.checkpoint import own_file, read_json, require_shallow
from llmconv.convert.models.completeness import VISION
from llmconv.convert.models.transformers_source import auto_classes, causal_lm_classes
from llmconv.errors import InputRefused, MalformedInput, UnsupportedInput, listing, short
from llmconv.model_code import AUTO_MAP, REPOSITORY, auto_map, holds, model_class

MPT_TYPES = ("mpt", "mosaic_gpt")
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
    if (code := trusted_code(given)) is None:
        return None
    fields = {**stored, **{name: value for name, value in given.items() if name != OPTION}}
    declared = code.declared()
    if "model_type" not in fields:  # the folder of the code describes the model, too
        fields = {**declared, **fields}
    kind, other = fields.get("model_type"), declared.get("model_type")
    if other is not None and kind != other:
        raise MalformedInput(
            f"the code in `{code.given}` is that of a `{short(other, 60)}`, and `{source}` is a `{short(kind, 60)}`",
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


# Fields that make a loader run code or fetch a repository that the file names
CODE_FIELDS = (AUTO_MAP, "trust_remote_code", "custom_pipelines", "_attn_implementation_internal")
# Traces of the training machine
TRACE_FIELDS = ("_name_or_path", "_commit_hash", "_attn_implementation_autoset", "_attn_implementation")
YAML_LIMIT = 128 << 10
YAML_NODES = 100_000
# A run's configuration has 20 kB, a thousand nodes and six levels; a parser in Python takes 7 s for a megabyte
YAML_DEPTH = 100
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def config_file(path: Path) -> Path:
    """The file of a `--config`, which may be a folder."""
    return path / "config.json" if path.is_dir() else path


def merged_configs(paths: tuple[Path, ...]) -> dict[str, Any]:
    """The JSON or YAML objects of `paths`, merged; later ones take precedence. InputRefused if one is missing."""
    merged: dict[str, Any] = {}
    for path in paths:
        file = config_file(path)
        if not file.is_file():
            raise InputRefused(f"there is no configuration at `{path}`", hint="give a JSON file, or a folder with one")
        merged |= read_config_file(file)
    return merged


def read_config_file(path: Path) -> dict[str, Any]:
    """The object in a JSON or YAML file, plain values only; MalformedInput for anything else, or one far too large."""
    if path.suffix not in (".yaml", ".yml"):
        return read_json(path)
    if path.stat().st_size > YAML_LIMIT:
        raise MalformedInput(f"`{path.name}` is too large for a configuration", hint="give the YAML file of the run")
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = str(getattr(error, "problem", None) or error or type(error).__name__).partition("\n")[0]
        mark = getattr(error, "problem_mark", None)
        problem += f" (line {mark.line + 1})" if mark else ""
        raise MalformedInput(
            f"`{path.name}` is not valid YAML: {problem}", hint="repair or replace the file; plain values only"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise MalformedInput(f"`{path.name}` is not a YAML mapping of names", hint="give the YAML file of the run")
    require_shallow(content, path.name)
    return content


def _parse_yaml(text: str) -> Any:
    """The value of a YAML document, counted before it is built; ValueError or YAMLError: invalid or too large."""
    depth = 0
    for event in yaml.parse(text, YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > YAML_DEPTH:
            raise ValueError(f"it is nested deeper than {YAML_DEPTH}")
    loader = YAML_LOADER(text)
    try:
        node = loader.get_single_node()
        _spend(node, [YAML_NODES])
        return loader.construct_document(node) if node else None
    finally:
        loader.dispose()


def _spend(node: Any, left: list[int]) -> None:
    """Counts the nodes of a YAML document with every alias expanded, before anything is built from it."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("aliases that expand without end")
    for item in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in item if isinstance(item, tuple) else (item,):
            _spend(part, left)


def without_code(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config without code-execution fields and traces (at any depth), and the names of the former."""
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in config.items():
        if name in CODE_FIELDS:
            dropped += [name] if value else []
        elif isinstance(value, Mapping):
            kept[name], inner = without_code(value)
            dropped += [f"{name}.{field}" for field in inner]
        elif name not in TRACE_FIELDS:
            kept[name] = value
    return kept, tuple(dropped)


def plain_fields(config: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The config without code-execution fields, which are warnings, and traces."""
    kept, dropped = without_code(config)
    if dropped:
        warnings.append(f"dropped {listing(dropped)} from the configuration: no code comes from a checkpoint")
    return kept


def updated(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The stored fields with the user's, whose rotary settings of either kind replace stored ones of the other.

    `rope_theta` and `rope_scaling` are transformers 4's. Of a file with both kinds, transformers 5 takes the base in
    `rope_parameters`, or with a `rope_scaling` that alone and the base of the class, so a user's field would have no
    effect, or take another one away. Fields of a part's configuration replace those alone, and `vocab_size` counts
    where the language model's is.
    """
    given = _in_parts(stored, given)
    rope, config = stored.get("rope_parameters"), {**stored, **given}
    old = given.keys() & {"rope_theta", "rope_scaling"}
    if not old and isinstance(own := given.get("rope_parameters"), Mapping):
        kinds = [one for one in own.values() if isinstance(one, Mapping)] or [own]
        replaced = {"rope_scaling", *(["rope_theta"] if all("rope_theta" in one for one in kinds) else [])}
        return {name: value for name, value in config.items() if name not in replaced}
    if not old or "rope_parameters" in given or not isinstance(rope, Mapping):
        return config
    if any(isinstance(one, Mapping) for one in rope.values()):  # a base for each kind of layers
        return config
    scaling = given.get("rope_scaling") if "rope_scaling" in given else rope
    scaling = dict(scaling) if isinstance(scaling, Mapping) else {}
    kind = scaling.pop("type", None)
    base = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    base |= {"rope_theta": given["rope_theta"]} if given.get("rope_theta") is not None else {}
    config["rope_parameters"] = {"rope_type": kind or "default", **scaling, **base}
    return {name: value for name, value in config.items() if name not in old}


LANGUAGE = ("text_config", "llm_config", "language_config")
"""Where the configuration of a model with images has that of its language model."""


def _in_parts(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields; an inner configuration without a `model_type` keeps the stored fields that it does not set."""
    parts = {name: one for name, one in stored.items() if name.endswith("_config") and isinstance(one, Mapping)}
    fields, language = dict(given), next((name for name in LANGUAGE if name in parts), None)
    if language and language not in given and "vocab_size" in given:
        fields[language] = {"vocab_size": given["vocab_size"]}
        if "vocab_size" not in stored:
            del fields["vocab_size"]
    for name in parts.keys() & fields.keys():
        if isinstance(own := fields[name], Mapping) and "model_type" not in own:
            fields[name] = updated(parts[name], own)
    return fields


def causal_lm_config(
    stored: Mapping[str, Any], given: Mapping[str, Any], source: str, warnings: list[str]
) -> dict[str, Any]:
    """The `config.json` of a causal language model: the checkpoint's fields, updated with the user's (`given`).

    With consent to the model's own code, its `auto_map` is kept; fields that are left out are warnings. Raises
    InputRefused without `model_type`, UnsupportedInput if transformers lacks it, or cannot express this MPT.
    """
    if own := _own_config(stored, given, source):
        return own
    config = plain_fields(updated(stored, given), warnings if trusted_code(given) is None else [])
    if "model_type" not in config:
        raise InputRefused(
            f"`{source}` does not contain a model configuration", hint="give the model's `config.json` with `--config`"
        )
    if config["model_type"] in MPT_TYPES:
        from llmconv.convert.models import mpt_config  # noqa: PLC0415 - of no other model

        config = mpt_config.native_config(config, source, warnings)
    config = with_architecture(config)
    if is_encoder(config):
        warnings.append(
            f"`{source}` contains an encoder, {architecture(config)}: its configuration lacks `is_decoder`, so it "
            "is not exported to generate"
        )
    return config


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")  # reward and value models, too


def is_other_class(config: Mapping[str, Any]) -> bool:
    """Whether the class that a `config.json` names is a classifier, or one with images, and not the causal one."""
    named, kind = architecture(config), str(config.get("model_type"))
    images = named == auto_classes("IMAGE_TEXT_TO_TEXT").get(kind) != causal_lm_classes().get(kind)
    return named.endswith(CLASSIFIERS) or (bool(named) and images)


def other_class_config(
    stored: Mapping[str, Any],
    given: Mapping[str, Any],
    names: Iterable[Any],
    warnings: list[str],
    *,
    drop: bool = False,
) -> dict[str, Any] | None:
    """The configuration with the user's fields (`given`), as it is, of a model of another class (`is_other_class`).

    Its parts have names and shapes of their own, which transformers knows (`completeness.check_folder`). None for a
    causal language model, one that the user lets run its own code, and of one with images for its language model: if
    none of the `names` is of a part for images, or if these are left out (`drop`).
    """
    fields = updated(stored, given)
    own_code = trusted_code(given) is not None and AUTO_MAP in fields
    if own_code or not is_other_class(fields):
        return None
    if not architecture(fields).endswith(CLASSIFIERS) and (drop or not any(VISION.search(str(name)) for name in names)):
        return None
    return plain_fields(fields, warnings)


def _own_config(stored: Mapping[str, Any], given: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """The configuration for the model's own code; None where transformers has the model, or nobody trusts its code."""
    fields, code = own_fields(stored, given, source), trusted_code(given)
    if fields is None or "model_type" not in fields:
        return None
    config, _ = without_code(fields)
    if config["model_type"] in MPT_TYPES:
        from llmconv.convert.models import mpt_config  # noqa: PLC0415 - as above

        if not (code and code.given) and mpt_config.is_native(config, source):
            return None
        config = mpt_config.portable(config)
    return {"architectures": [model_class(fields).rpartition(".")[2]], **config, AUTO_MAP: fields[AUTO_MAP]}


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """With `architectures` that fit the type (an encoder: masked tokens); UnsupportedInput: transformers has none."""
    kind, known = str(config.get("model_type")), causal_lm_classes()
    if known and kind not in known:
        raise UnsupportedInput(
            f"unsupported model_type `{kind[:80]}`: not a causal language model of the installed transformers",
            hint="models with an encoder and a decoder are not read; convert it with the program that trained it"
            if config.get("is_encoder_decoder")
            else "if it has code of its own that you trust, give `--trust-remote-code`, and `--code FOLDER` where the "
            "code is elsewhere; or give the right type with `--config`",
        )
    name = auto_classes("MASKED_LM").get(kind) if is_encoder(config) else None
    return {**config, **({"architectures": [name or known[kind]]} if known else {})}
