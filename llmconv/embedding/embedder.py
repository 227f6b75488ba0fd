"""Embedder: a graph without a cache, its tokenizer, and what sentence-transformers does to texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.argument_checks import checked, require_least
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.files.sources import local_path
from llmconv.progress import warn
from llmconv.runtime.context_length import context_length, language_config
from llmconv.runtime.onnxruntime.graph import SinglePassGraph
from llmconv.runtime.onnxruntime.graph_entry import GraphEntry, single_pass_entries
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.tokenizer import TooManyTokens, encode_prompt, load_tokenizer
from llmconv.tensors import Array

OUTPUTS = {"embed": "sentence_embedding", "classify": "logits", "rerank": "scores"}
"""The output with one row per text, by role of the graph."""

RESULTS = {"embed": "embedding", "classify": "logits", "rerank": "score"}
"""The name of a result in JSON, by role of the graph."""


class Embedder:
    """A model that returns one vector, or one score, per text.

    Attributes:
        role: `embed`, `classify` or `rerank`.
        rules: prompts and the maximum length.

    Args:
        folder: a folder that `llmconv export --task` wrote.
        settings: of onnxruntime.

    Raises:
        InputRefused: the folder has no such graph, or no tokenizer.
    """

    @checked
    def __init__(self, folder: str | Path, settings: SessionSettings | None = None) -> None:
        home = local_path(folder)
        entry = _entry(home)
        self.role, self.rules = entry.role, TextRules.of(home)
        self._graph = SinglePassGraph(home / entry.files[0], settings)
        if OUTPUTS[self.role] not in self._graph.outputs:
            raise InputRefused(
                f"`{entry.name}` returns {', '.join(self._graph.outputs)} alone: the model has no pooling module",
                hint="copy modules.json and 1_Pooling of the original model into the folder, and export again",
            )
        self._tokenizer = load_tokenizer(home)
        limits = [self.rules.max_tokens or self._tokenizer.model_max_length, context_length(home)]
        self._most = int(min(limit for limit in limits if limit))
        self._padding = _padding(home, self._tokenizer)

    @checked
    def encode(self, texts: Sequence[str], prompt_name: str | None = None, batch_size: int = 8) -> Array:
        """The result of every text, in order.

        Texts of similar length share a batch. A text longer than the model takes is cut at its end, with a warning.

        Args:
            texts: the texts; for a reranker the whole prompts.
            prompt_name: name of the prompt in front of each; None for the model's default.
            batch_size: number of texts per run.

        Returns:
            float32 [texts, features] of embeddings, [texts, labels] of a classifier, or [texts] of a reranker.

        Raises:
            UsageProblem: the model has no such prompt.
            InputRefused: a text has no tokens, or is not valid text.
        """
        require_least(batch_size, 1, "batch_size")
        tokens = self._tokens([self.rules.text(text, prompt_name) for text in texts])
        order = sorted(range(len(tokens)), key=lambda at: len(tokens[at]))
        rows: dict[int, Array] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            found = self._graph.run(*self._padded([tokens[at] for at in batch]))[OUTPUTS[self.role]]
            rows.update(zip(batch, found, strict=True))
        return np.stack([rows[at] for at in range(len(tokens))]) if rows else np.zeros((0, 0), dtype=np.float32)

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of every text, cut to the maximum; the special tokens at the end are kept."""
        made, texts = [], list(texts)
        for at, text in enumerate(texts):
            try:
                made.append(encode_prompt(self._tokenizer, text, most=self._most))
            except TooManyTokens as error:
                made.append(error.ids)
                texts[at] = error.beginning
        long = [at for at, ids in enumerate(made) if len(ids) > self._most]
        if long:
            warn(f"{len(long)} of {len(texts)} texts are longer than {self._most} tokens and were cut at their end")
        for at in long:
            made[at] = self._tokenizer(texts[at], truncation=True, max_length=self._most)["input_ids"]
        return made

    def _padded(self, batch: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Ids and mask, int64 [batch, tokens], with padding on the right."""
        width = max(map(len, batch))
        ids = np.full((len(batch), width), self._padding, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        return ids, mask


class TextFeatures:
    """What `pipeline` returns for the tasks of graphs without a cache: called with texts, it returns a dict for each.

    Attributes:
        task: `embed`, `classify` or `rerank`.
        model: the open model.

    Args:
        task: that the graph must have been exported for.
        model: a folder that `llmconv export --task` wrote.
        settings: of onnxruntime.

    Raises:
        InputRefused: the folder has no such graph, or no tokenizer.
        UsageProblem: its graph is for another task.
    """

    def __init__(self, task: str, model: str | Path, settings: SessionSettings | None = None) -> None:
        self.task, self.model = task, Embedder(model, settings)
        if self.model.role != task:
            raise UsageProblem(
                f"`{model}` was exported with `--task {self.model.role}`", hint=f'`pipeline("{self.model.role}", …)`'
            )

    def __call__(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """A dict with `embedding`, `logits` or `score` for one text, and a list of them for several.

        Args:
            inputs: a text, or a list of texts.
            options: those of `Embedder.encode`.

        Raises:
            InputRefused: a text has no tokens.
            UsageProblem: an unknown option, or no text.
        """
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        found = [{RESULTS[self.task]: row.tolist()} for row in self.model.encode(texts, **options)]
        return found[0] if isinstance(inputs, str) else found


def _entry(folder: Path) -> GraphEntry:
    entries = [entry for entry in single_pass_entries(folder) if entry.role in OUTPUTS]
    if not entries:
        raise InputRefused(
            f"`{folder}` has no graph that returns embeddings, classes or scores",
            hint=f"make one with `llmconv export {folder} --task embed`",
        )
    return entries[0]


def _padding(folder: Path, tokenizer: Any) -> int:
    """The padding token: a classifier finds the end of a text by the one in its config."""
    own = language_config(folder).get("pad_token_id")
    return int(own if isinstance(own, int) else tokenizer.pad_token_id or 0)


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
        """Reads both files; raises MalformedInput if one is not what sentence-transformers writes."""
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
        """The text with the prompt of that name, None for the default; raises UsageProblem for an unknown name."""
        name = self.default if prompt_name is None else prompt_name
        if name is not None and name not in self.prompts:
            known = ", ".join(f"`{one}`" for one in self.prompts) or "none"
            raise UsageProblem(f"the model has no prompt `{name}`", hint=f"prompts of this model: {known}")
        whole = text if name is None else self.prompts[name] + text
        return whole.lower() if self.lower_case else whole


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
