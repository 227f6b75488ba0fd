"""The padding token of ONNX Runtime GenAI: the client masks it everywhere, so no prompt may contain it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.runtime.context_length import language_config
from llmconv.runtime.onnxruntime.genai_guard import CONFIG, read_genai_config
from llmconv.verify.results.report import Check

NAME = "padding token"
"""Name of the check in reports."""

FIELD = "pad_token_id"
DEFAULT = 0
"""The client's padding token where its configuration has none (0.18, `src/config.h`)."""


def padding_checks(folder: Path, model: Path) -> list[Check]:
    """One check; none if the folder has no `genai_config.json`, which the client reports itself.

    Args:
        folder: with the files of the client.
        model: the model's folder.

    Raises:
        MalformedInput: the configuration is refused.
    """
    if not (folder / CONFIG).is_file():
        return []
    given = read_genai_config(folder).get(FIELD, DEFAULT)
    allowed, size = allowed_tokens(model), int(language_config(model)["vocab_size"])
    if not allowed:
        detail = f"genai: only the model's own code defines its `{FIELD}`"
        return [Check(NAME, "genai", "", verdict="skip", detail=detail)]
    if given in allowed:
        return [Check(NAME, "genai", "", detail=f"genai: {given}")]
    if not isinstance(given, int) or not 0 <= given < size:
        detail = f"genai: {given}, which is not in the vocabulary; the export sets {allowed[0]}"
        return [Check(NAME, "genai", "", detail=detail)]
    origin = f"`{FIELD}` in `{CONFIG}` is {given}"
    if FIELD not in read_genai_config(folder):
        origin = f"`{CONFIG}` has no `{FIELD}`, and the client then pads with {given}"
    detail = (
        f"{origin}, while the export sets {allowed[0]}: the client ignores token {given} wherever a prompt of a batch "
        "contains it, and continues that prompt incorrectly"
    )
    return [Check(NAME, "genai", "", verdict="fail", detail=detail)]


def allowed_tokens(model: Path) -> list[int]:
    """The token that `export --layout genai` sets; of a model without a padding token, all of its end tokens.

    Empty where the config class is in the model's own code, which is not run here, and no file states the token.

    Args:
        model: the model's folder.
    """
    from llmconv.export.clients.genai import special_tokens  # noqa: PLC0415 - only for `--client`

    path = model / "generation_config.json"
    found, generation = decoder_config(model), read_json(path) if path.is_file() else {}
    config = found or SimpleNamespace(**language_config(model))
    has_own = generation.get(FIELD) is not None or getattr(config, FIELD, None) is not None
    if found is None and not has_own:
        return []
    tokens = special_tokens(config, generation)
    return [tokens[FIELD], *([] if has_own else tokens["eos_token_id"])]


def decoder_config(model: Path) -> Any | None:
    """The transformers config of the decoder; None where its class is in the folder's own code.

    Args:
        model: the model's folder.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception:  # a config class in the folder's own code, whose defaults are unknown
        return None
    return config.get_text_config(decoder=True)
