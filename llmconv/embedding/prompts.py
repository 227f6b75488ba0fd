"""What sentence-transformers does to a text before its tokens: a prompt in front, lower case, a maximum length."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput, UsageProblem

PROMPTS_FILE, LENGTH_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"


@dataclass(frozen=True)
class TextRules:
    """The rules of one folder; none without the files of sentence-transformers.

    Attributes:
        prompts: texts to put in front, by name.
        default: name of the prompt for texts without one; None for no prompt.
        max_tokens: maximum number of tokens of a text; None for that of the tokenizer.
        lower_case: texts are converted to lower case first.
    """

    prompts: dict[str, str] = field(default_factory=dict)
    default: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False

    @classmethod
    def of(cls, folder: Path) -> TextRules:
        """Reads both files.

        Raises:
            MalformedInput: one is not what sentence-transformers writes.
        """
        found, lengths = (_read(folder / name) for name in (PROMPTS_FILE, LENGTH_FILE))
        prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise MalformedInput(f"`prompts` in `{PROMPTS_FILE}` is not a map of texts", hint="copy the file again")
        if default is not None and (not isinstance(default, str) or default not in prompts):
            raise MalformedInput(
                f"`{PROMPTS_FILE}` has no prompt `{default}`, its own default", hint="copy the file again"
            )
        most = lengths.get("max_seq_length")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise MalformedInput(f"`max_seq_length` in `{LENGTH_FILE}` is not a length", hint="copy the file again")
        return cls(prompts, default, most, bool(lengths.get("do_lower_case")))

    def text(self, text: str, prompt_name: str | None) -> str:
        """A text with its prompt.

        Args:
            text: of the user.
            prompt_name: name of the prompt; None for the default.

        Raises:
            UsageProblem: an unknown prompt name.
        """
        name = self.default if prompt_name is None else prompt_name
        if name is not None and name not in self.prompts:
            known = ", ".join(f"`{one}`" for one in self.prompts) or "none"
            raise UsageProblem(f"the model has no prompt `{name}`", hint=f"prompts of this model: {known}")
        whole = text if name is None else self.prompts[name] + text
        return whole.lower() if self.lower_case else whole


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
