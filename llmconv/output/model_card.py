"""The model card: README.md of a repository that has none, from the steps in the manifest and the report of `verify`.

Fields of the header: https://huggingface.co/docs/hub/model-cards. `base_model_relation` is one of adapter, finetune,
merge and quantized; a merged adapter is a finetune for the Hub, since the repository has all weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmconv.checkpoint import ADAPTER_CONFIG
from llmconv.errors import printable
from llmconv.output.manifest import Manifest

CARD = "README.md"

HUB_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@[0-9a-f]{40}(?:/.*)?", re.ASCII)
"""The name in a step of an input that came from the Hub."""

RELATIONS = {"merge-lora": "finetune", "delta-apply": "finetune", "to-hf": "finetune"}
"""Command to what it makes of a base model; others leave the function as it is."""

REPORT_BYTES = 64 << 20

MARK = b"\n<!-- Written by llmconv, which replaces it as long as it is unedited: sha256 %s -->\n"
"""The end of a card: the sha256 of what stands above it."""


def model_card(manifest: Manifest, config: Mapping[str, Any], repository: str, report: Path | None = None) -> bytes:
    """The content of README.md.

    `config` is the folder's `config.json`, empty if it has none; `repository` is `org/name` on the Hub; `report` is the
    `report.json` of `llmconv verify`.
    """
    import yaml  # noqa: PLC0415 - 20 ms that other commands do not pay

    header = yaml.safe_dump(_header(manifest, config), sort_keys=False, allow_unicode=True)
    title = repository.rpartition("/")[2]
    parts = [f"---\n{header}---\n", f"# {title}\n", _made(manifest), _verified(report), _usage(manifest, repository)]
    text = "\n".join(part for part in parts if part).encode()
    return text + MARK % hashlib.sha256(text).hexdigest().encode()


def is_unedited(card: bytes | None) -> bool:
    """Whether a card may be replaced: there is none, or `model_card` made it and nobody has changed it since."""
    if card is None:
        return True
    text, begin, end = card.rpartition(MARK.partition(b"%")[0])
    return begin + end == MARK % hashlib.sha256(text).hexdigest().encode()


def _header(manifest: Manifest, config: Mapping[str, Any]) -> dict[str, Any]:
    bases = base_models(manifest)
    relation = _relation(manifest)
    causal = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
    fields = {
        "base_model": bases[0] if len(bases) == 1 else bases,
        "base_model_relation": relation if bases else "",
        "library_name": "peft" if _is_adapter(manifest) else "transformers" if config else "",
        "pipeline_tag": "text-generation" if causal and not _is_adapter(manifest) else "",
        "tags": ["llmconv", *(["onnx"] if manifest.graphs else [])],
    }
    return {name: value for name, value in fields.items() if value}


def base_models(manifest: Manifest) -> list[str]:
    """The models on the Hub that the steps began with, without duplicates."""
    named = []
    for done in manifest.steps:
        options = done.get("options")
        base = options.get("base") if isinstance(options, dict) else None
        named += [HUB_SOURCE.fullmatch(str(name)) for name in (done.get("source"), base) if name]
    return list(dict.fromkeys(found["repository"] for found in named if found))


def _relation(manifest: Manifest) -> str:
    """What the model is to its base, by the last step that changed its function; empty if none did."""
    if _is_adapter(manifest):
        return "adapter"
    relation = ""
    for done in manifest.steps:
        options = done["options"] if isinstance(done.get("options"), dict) else {}
        command, adapters = done.get("command"), options.get("adapters")
        if command == "export" and options.get("quant"):
            relation = "quantized"
        elif command == "merge-lora" and isinstance(adapters, list) and len(adapters) > 1:
            relation = "merge"
        elif command != "to-hf" or options.get("base"):
            relation = RELATIONS.get(str(command), relation)
    return relation


def _is_adapter(manifest: Manifest) -> bool:
    return ADAPTER_CONFIG in manifest.files


def _made(manifest: Manifest) -> str:
    """The steps that made the model, in order."""
    lines = []
    for number, done in enumerate(manifest.steps, 1):
        options = done["options"] if isinstance(done.get("options"), dict) else {}
        given = ", ".join(f"{_code(name)} {_code(_short(value))}" for name, value in options.items())
        line = f"{number}. {_code('llmconv ' + str(done.get('command')))} of {_code(done.get('source'))}"
        lines.append(line + (f": {given}" if given else "") + f" (llmconv {_code(done.get('llmconv'))})")
    steps = "\n".join(lines)
    return f"## How it was made\n\n{steps}\n\nSizes and sha256 of all files are in `llmconv.json`.\n"


def _short(value: object) -> str:
    """An option's value: of inputs only the names."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(str(one["name"] if isinstance(one, dict) and "name" in one else one) for one in values)


def _code(value: object) -> str:
    """A name that may be anyone's, as code, which is neither Markdown nor HTML."""
    return f"`{printable(str(value)).replace('`', chr(39))}`"


def _verified(report: Path | None) -> str:
    """The verdict of `llmconv verify`."""
    if report is None or report.stat().st_size > REPORT_BYTES:
        return ""
    try:
        content = json.loads(report.read_bytes())
        verdict, checks = content["verdict"], [check["verdict"] for check in content["checks"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    if verdict not in ("pass", "fail", "inconclusive"):
        return ""
    counts = ", ".join(
        f"{checks.count(key)} {word}" for key, word in (("pass", "passed"), ("fail", "differ"), ("skip", "skipped"))
    )
    return (
        "## Verification\n\n"
        f"`llmconv verify` compared the graphs with the eager model: **{verdict.upper()}** ({counts}).\n"
    )


def _usage(manifest: Manifest, repository: str) -> str:
    """How to run it: with llmconv always, with transformers where it has weights for it."""
    if _is_adapter(manifest):
        return f"## How to use it\n\n```sh\nllmconv merge-lora BASE {repository} -o merged\n```\n"
    if "config.json" not in manifest.files:
        return ""
    lines = [f'## How to use it\n\n```sh\nllmconv generate {repository} --prompt "Once upon a time"\n```\n']
    trust = ", trust_remote_code=True" if any(name.endswith(".py") for name in manifest.files) else ""
    if any(name.endswith(".safetensors") for name in manifest.files):
        lines.append(
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repository}"{trust})\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{repository}"{trust})\n```\n'
        )
    return "\n".join(lines)
