"""Embedder: a graph without a cache, its tokenizer, and what sentence-transformers does to texts."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from llmconv.argument_checks import checked, require_least
from llmconv.causal_lm import context_length, language_config
from llmconv.checkpoint import is_model_folder, read_json
from llmconv.errors import InputRefused, MalformedInput, OutputFailed, UsageProblem, short
from llmconv.files.paths import Written
from llmconv.files.safe_folder import replace_file, require_parents
from llmconv.files.sources import export_command, local_path
from llmconv.not_a_model_folder import refused_model
from llmconv.output.manifest import graph_entries, single_pass_entries
from llmconv.progress import warn
from llmconv.runtime.onnxruntime.graph import SinglePassGraph
from llmconv.runtime.onnxruntime.session_file import SessionOptions, session_settings
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.tokenizer import TooManyTokens, encode_prompt, load_tokenizer, require_text, token_ids
from llmconv.tensors import Array

__all__ = ["Embedded", "Embedder", "TextFeatures", "embed"]
# the output with one row per text, by role of the graph
OUTPUTS = {"embed": "sentence_embedding", "classify": "logits", "rerank": "scores"}
# the name of a result in JSON, by role of the graph
RESULTS = {"embed": "embedding", "classify": "logits", "rerank": "score"}


def embeds(folder: str | Path) -> bool:
    """Whether the graphs in a folder return something about a text, and none continues it."""
    home = Path(folder)
    if not home.is_dir() or graph_entries(home):
        return False
    return any(entry.role in OUTPUTS for entry in single_pass_entries(home))


class Embedder:
    """A model that returns one vector, or one score, per text; `role` is `embed`, `classify` or `rerank`.

    `folder` is one that `llmconv export --task` wrote; `settings` are those of onnxruntime; `rules` are the prompts and
    the maximum length, of which `most` is the one in force. Raises InputRefused if the folder has no such graph, or no
    tokenizer.
    """

    @checked
    def __init__(self, folder: str | Path, settings: SessionSettings | None = None) -> None:
        self.folder = home = local_path(folder)
        entries = [entry for entry in single_pass_entries(home) if entry.role in OUTPUTS]
        if not entries:
            if not is_model_folder(home):
                raise refused_model(home)
            problem = f"`{home}` has no graph that returns embeddings, classes or scores"
            raise InputRefused(problem, hint=f"make one with `{export_command(home, ' --task embed')}`")
        entry = entries[0]
        self.role, self.rules = entry.role, TextRules.of(home)
        self._graph = SinglePassGraph(home / entry.files[0], settings)
        if OUTPUTS[self.role] not in self._graph.outputs:
            raise InputRefused(
                f"`{entry.name}` returns {', '.join(self._graph.outputs)} alone: the model has no pooling module",
                hint="copy modules.json and 1_Pooling of the original model into the folder, and export again",
            )
        self._tokenizer = load_tokenizer(home)
        self._cuts_starts = self._tokenizer.truncation_side == "left"
        self._are_chats = self.role == "embed" and self.rules.in_chat is not None
        limits = [self.rules.max_tokens or self._tokenizer.model_max_length, context_length(home)]
        self.most = int(min(limit for limit in limits if limit))
        self._padding = _padding(home, self._tokenizer)

    @checked
    def encode(self, texts: Sequence[str], prompt_name: str | None = None, batch_size: int = 8) -> Array:
        """The result of every text, float32 [texts, features], of a classifier [texts, labels], of a reranker [texts].

        `texts` are in order, for a reranker the whole prompts; `prompt_name` is the prompt in front of each, None for
        the model's default. Texts of similar length share a batch of `batch_size`; one longer than the model takes is
        cut at its end, with a warning. Raises UsageProblem for no such prompt, InputRefused for a text without tokens,
        and for one of a reranker that is too long.
        """
        require_least(batch_size, 1, "batch_size")
        tokens = self.tokens(texts, prompt_name)
        order = sorted(range(len(tokens)), key=lambda at: len(tokens[at]))
        rows: dict[int, Array] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows.update(zip(batch, self.run([tokens[at] for at in batch]), strict=True))
        return np.stack([rows[at] for at in range(len(tokens))]) if rows else np.zeros((0, 0), dtype=np.float32)

    def run(self, tokens: Sequence[Sequence[int]]) -> Array:
        """The results of token ids, at least one row, in one run of the graph: float32 [rows, features] or [rows].

        Raises:
            MalformedInput: one is NaN or infinite.
        """
        # int64 [batch, tokens], with padding on the right
        ids = np.full((len(tokens), max(map(len, tokens))), self._padding, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, one in enumerate(tokens):
            ids[row, : len(one)], mask[row, : len(one)] = one, 1
        found = self._graph.run(ids, mask)[OUTPUTS[self.role]]
        if not np.isfinite(found).all():
            raise MalformedInput(
                f"the {RESULTS[self.role]} of a text is NaN or infinite", hint="run `llmconv verify` on the folder"
            )
        return found[:, : self.rules.dimensions] if self.role == "embed" else found

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the tokenizer."""
        return len(self._tokenizer)

    @cached_property
    def around(self) -> frozenset[int]:
        """The special tokens that the tokenizer puts around every text."""
        return frozenset(self._tokenizer("")["input_ids"]) & frozenset(self._tokenizer.all_special_ids)

    def names(self, ids: Sequence[int]) -> list[str]:
        """The tokens with these ids."""
        return [str(one) for one in self._tokenizer.convert_ids_to_tokens(ids)]

    def tokens(self, texts: Sequence[str], prompt_name: str | None = None, *, cuts: bool = True) -> list[list[int]]:
        """Token ids of every text after its prompt; special tokens at the end are kept where a text is cut.

        Without `cuts` a text that is longer than the maximum has more ids than it. Raises UsageProblem for no such
        prompt, InputRefused for a text without tokens.
        """
        if self._are_chats:
            return self._chats(texts, prompt_name, cuts=cuts)
        made, texts = [], [self.rules.text(text, prompt_name) for text in texts]
        for at, text in enumerate(texts):
            try:
                made.append(encode_prompt(self._tokenizer, text, most=self.most))
            except TooManyTokens as error:
                made.append(error.ids)
                texts[at] = text if self._cuts_starts else error.beginning
        for at in self._long(made) if cuts else ():
            made[at] = self._tokenizer(texts[at], truncation=True, max_length=self.most)["input_ids"]
        return made

    def _long(self, made: Sequence[Sequence[int]]) -> list[int]:
        """The texts that are cut, after a warning about them; of a reranker none may be, as the end has the score."""
        if long := [at for at, ids in enumerate(made) if len(ids) > self.most]:
            if self.role == "rerank":
                raise InputRefused(
                    f"text {long[0] + 1} is longer than {self.most} tokens, and its score is read at its end",
                    hint="shorten the document in it; what the template writes after that has to stay",
                )
            side = "beginning" if self._cuts_starts and not self._are_chats else "end"
            warn(f"{len(long)} of {len(made)} texts are longer than {self.most} tokens and were cut at their {side}")
        return long

    def _chats(self, texts: Sequence[str], prompt_name: str | None, *, cuts: bool) -> list[list[int]]:
        """As `tokens`, of texts that are user messages; what the template writes after them is kept in cut ones."""
        prompt = self.rules.prompt(prompt_name)
        made = [self._chat(text, prompt) for text in texts]
        for at in self._long(made) if cuts else ():
            made[at] = self.cut(made[at])
        return made

    def cut(self, ids: Sequence[int]) -> list[int]:
        """At most `most` of the ids of a text: those that the tokenizer, or the template, puts around it are kept."""
        if len(ids) <= self.most:
            return [*ids]
        begin, end = self._ends
        if self._cuts_starts and not self._are_chats:
            return [*begin, *ids[len(ids) - self.most + len(begin) :]]
        return [*ids[: self.most - len(end)], *end]

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The ids that begin, and that end, those of every text: what two short texts have in common there.

        In texts that are not chats, only special tokens count.
        """
        one, two = (
            self._chat(text, "") if self._are_chats else token_ids(self._tokenizer, text) for text in ("0", "1 2 3 4")
        )
        special = {*self._tokenizer.all_special_ids}

        def same(pairs: Iterable[tuple[int, int]]) -> list[int]:
            alike = takewhile(lambda pair: pair[0] == pair[1] and (self._are_chats or pair[0] in special), pairs)
            return [token for token, _ in alike][: self.most]

        return same(zip(one, two, strict=False)), same(zip(reversed(one), reversed(two), strict=False))[::-1]

    def _chat(self, text: str, prompt: str) -> list[int]:
        """The tokens of a chat with this message; a prompt is a system message."""
        from llmconv.runtime.chat_templates import render_chat  # noqa: PLC0415 - most models have none

        require_text(prompt + text)
        system = [{"role": "system", "content": prompt}] if prompt else []
        variables = {"add_generation_prompt": False, **(self.rules.in_chat or {})}
        chat = render_chat(self._tokenizer, [*system, {"role": "user", "content": text}], variables=variables)
        try:
            return token_ids(self._tokenizer, chat, self.most, add_special_tokens=False)
        except TooManyTokens as error:
            return error.ids


class TextFeatures:
    """What `pipeline` returns for tasks without a cache: called with texts, it returns a dict for each.

    `task` is `embed`, `classify` or `rerank`, for which the graph in `model` must have been exported (UsageProblem);
    the open model is `model`. Raises InputRefused if the folder has no such graph, or no tokenizer.
    """

    def __init__(self, task: str, model: str | Path, settings: SessionSettings | None = None) -> None:
        self.task, self.model = task, Embedder(model, settings)
        if self.model.role != task:
            problem = f"`{model}` was exported with `--task {self.model.role}`"
            raise UsageProblem(problem, hint=f'`pipeline("{self.model.role}", …)`')

    def __call__(self, inputs: str | Sequence[str], **options: Any) -> Any:
        """A dict with `embedding`, `logits` or `score` for one text, and a list of them for several.

        `options` are those of `Embedder.encode`. Raises InputRefused if a text has no tokens, UsageProblem for an
        unknown option, or no text.
        """
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        found = [{RESULTS[self.task]: row.tolist()} for row in self.model.encode(texts, **options)]
        return found[0] if isinstance(inputs, str) else found


def _padding(folder: Path, tokenizer: Any) -> int:
    """The padding token: a classifier finds the end of a text by the one in its config."""
    own = language_config(folder).get("pad_token_id")
    return int(own if isinstance(own, int) else tokenizer.pad_token_id or 0)


PROMPTS_FILE, LENGTH_FILE = "config_sentence_transformers.json", "sentence_bert_config.json"


@dataclass(frozen=True)
class TextRules:
    """The rules of one folder; none without the files of sentence-transformers."""

    prompts: dict[str, str] = field(default_factory=dict)  # texts to put in front, by name
    default: str | None = None  # name of the prompt for texts without one; None for no prompt
    max_tokens: int | None = None  # maximum number of tokens of a text; None for that of the tokenizer
    lower_case: bool = False  # texts are converted to lower case first
    # variables of the chat template in which each text is a user message, as sentence-transformers 6 has it for
    # tokenizers with a template; None for plain texts
    in_chat: Mapping[str, Any] | None = None
    dimensions: int | None = None  # the first numbers of each embedding that are used; None for all

    @classmethod
    def of(cls, folder: Path) -> TextRules:
        """Reads both files; raises MalformedInput if one is not what sentence-transformers writes."""
        paths = (folder / PROMPTS_FILE, folder / LENGTH_FILE)
        found, lengths = (read_json(path) if path.is_file() else {} for path in paths)
        prompts, default = found.get("prompts") or {}, found.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise MalformedInput(f"`prompts` in `{PROMPTS_FILE}` is not a map of texts", hint="copy the file again")
        if default is not None and (not isinstance(default, str) or default not in prompts):
            problem = f"`{PROMPTS_FILE}` has no prompt `{default}`, its own default"
            raise MalformedInput(problem, hint="copy the file again")
        own = _tokenizer_options(lengths)
        most = own.get("model_max_length") or lengths.get("max_seq_length")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise MalformedInput(f"`max_seq_length` in `{LENGTH_FILE}` is not a length", hint="copy the file again")
        size = found.get("truncate_dim")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise MalformedInput(f"`truncate_dim` in `{PROMPTS_FILE}` is not a size", hint="copy the file again")
        return cls(prompts, default, most, bool(lengths.get("do_lower_case")), _chat_variables(lengths), size)

    def prompt(self, prompt_name: str | None) -> str:
        """The prompt of that name, None for the default; raises UsageProblem for an unknown name."""
        name = self.default if prompt_name is None else prompt_name
        if name is not None and name not in self.prompts:
            known = ", ".join(f"`{one}`" for one in self.prompts) or "none"
            raise UsageProblem(f"the model has no prompt `{name}`", hint=f"prompts of this model: {known}")
        return "" if name is None else self.prompts[name]

    def text(self, text: str, prompt_name: str | None) -> str:
        """The text with the prompt of that name, None for the default; raises UsageProblem for an unknown name."""
        whole = self.prompt(prompt_name) + text
        return whole.lower() if self.lower_case else whole


PLAIN = ("model_max_length", "padding_side", "use_fast", "clean_up_tokenization_spaces", "legacy", "revision", "token")
"""Options of a tokenizer that change no token here, but for the first, which limits them."""


def _tokenizer_options(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what sentence-transformers opens the tokenizer; raises InputRefused for what would change the tokens."""
    names = [name for name in ("processor_kwargs", "tokenizer_args") if config.get(name)]
    given = config[names[0]] if names else {}
    if not isinstance(given, dict) or not given.keys() <= {*PLAIN}:
        problem = f"`{names[0]}` in `{LENGTH_FILE}` is not supported: {short(given, 80)}"
        raise InputRefused(problem, hint="take it out, and save the tokenizer as it has to be")
    return given


def _chat_variables(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`TextRules.in_chat` of a `sentence_bert_config.json`; raises InputRefused for what would change the tokens."""
    given = config.get("processing_kwargs") or {}
    if not isinstance(given, dict) or any(options for name, options in given.items() if name != "chat_template"):
        problem = f"`processing_kwargs` in `{LENGTH_FILE}` is not supported: {short(given, 80)}"
        raise InputRefused(problem, hint="take it out; `max_seq_length` limits the tokens of a text")
    kinds, variables = config.get("modality_config"), given.get("chat_template") or {}
    return variables if isinstance(kinds, dict) and "message" in kinds and isinstance(variables, dict) else None


@dataclass(frozen=True)
class Embedded:
    """The results of several texts.

    Attributes:
        role: `embed`, `classify` or `rerank`.
        texts: the texts, in order.
        values: float32 [texts, features] of embeddings, [texts, labels] of a classifier, or [texts] of a reranker.
    """

    role: str
    texts: list[str]
    values: Array

    def rows(self) -> list[dict[str, Any]]:
        """A JSON object for each text: `text`, and `embedding`, `logits` or `score`."""
        name = RESULTS[self.role]
        return [{"text": text, name: row.tolist()} for text, row in zip(self.texts, self.values, strict=True)]

    def lines(self) -> str:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows())

    def content(self, path: Path) -> bytes:
        """The content of a file at `path`: an array in `.npy`, otherwise JSON lines."""
        if path.suffix != ".npy":
            return self.lines().encode()
        stream = io.BytesIO()
        np.save(stream, self.values, allow_pickle=False)
        return stream.getvalue()


@checked
def embed(
    model: str | Path,
    texts: Sequence[str] = (),
    *,
    text_file: str | Path | None = None,
    prompt_name: str | None = None,
    batch_size: int = 8,
    output_file: Written | None = None,
    overwrite: bool = False,
    **options: Unpack[SessionOptions],
) -> Embedded:
    """Embeds texts; of a classifier the logits, of a reranker the scores.

    Args:
        model: a folder that `llmconv export --task` wrote.
        texts: the texts, or a single one; for a reranker the whole prompts.
        text_file: a file with one text per line, in place of `texts`; `-` for standard input.
        prompt_name: name of the model's own prompt in front of each text; None for its default.
        batch_size: number of texts per run.
        output_file: a `.npy` file, or one of JSON lines, to write the results into.
        overwrite: replace that file.
        options: how onnxruntime runs the graph.

    Raises:
        InputRefused: the folder has no such graph, a text has no tokens, a file cannot be read, or the output exists.
        OutputFailed: the output cannot be written.
        UsageProblem: no text, texts twice, or the model has no such prompt.
    """
    output, file = (None if one is None else str(one) for one in (output_file, text_file))
    path = Path(output) if output else None
    _require_free(path, file, overwrite=overwrite)
    given = _texts([texts] if isinstance(texts, str) else texts, file)
    embedder = Embedder(model, session_settings(options))
    found = Embedded(embedder.role, given, embedder.encode(given, prompt_name, batch_size))
    if path:
        content = found.content(path)
        try:
            replace_file(path, content)
        except OSError as error:
            problem = f"`{path}` cannot be written: {error.strerror or error}"
            raise OutputFailed(problem, hint="check the folder and the free disk space") from error
    return found


def _require_free(output: Path | None, text_file: str | None, *, overwrite: bool) -> None:
    """Refuses an output file that exists, or whose texts would be lost; raises InputRefused or UsageProblem."""
    if output is None:
        if overwrite:
            raise UsageProblem("`--overwrite` needs `--output-file`", hint="leave it out")
        return
    if text_file and text_file != "-" and Path(text_file).resolve() == output.resolve():
        raise UsageProblem("`--output-file` is the same file as `--text-file`", hint="give another one")
    if output.exists() and not overwrite:
        raise InputRefused(f"`{output}` exists", hint="give another file, or `--overwrite`")
    require_parents(output)


def _texts(texts: Sequence[str], file: str | None) -> list[str]:
    """Texts of the command line, or of a file without its empty lines; raises UsageProblem for none, or both."""
    if texts and file:
        raise UsageProblem("texts are given both as arguments and in a file", hint="give only one of them")
    if texts:
        return list(texts)
    if not file:
        raise UsageProblem("no text is given", hint="give one after the folder, or `--text-file`")
    try:
        content = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise InputRefused(f"the texts in `{file}` cannot be read: {reason}", hint="give a text file") from error
    lines = [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    if not lines:
        raise InputRefused(f"`{file}` has no text", hint="write one text per line")
    return lines
