"""Compares the tokens of clients with the likeliest ones, each after the tokens that the client itself chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import read_json
from llmconv.errors import MalformedInput
from llmconv.runtime.context_length import context_length, language_config
from llmconv.runtime.onnxruntime.vision import VISION
from llmconv.runtime.random_prompts import random_prompts, usable_tokens
from llmconv.verify.clients.client import Client, ClientError, Generation
from llmconv.verify.clients.client_files import ClientFiles
from llmconv.verify.clients.expected_tokens import LogitsSource, PaddedBatch
from llmconv.verify.clients.genai_fields import padding_checks
from llmconv.verify.results.report import Check, Checks
from llmconv.verify.results.sigma import ExpectedOutput

LENGTHS = (1, 7, 40)
"""Tokens of the prompts."""

NEW = 16
"""New tokens after each prompt."""

ENDS = "end tokens"


@dataclass
class ClientChecks:
    """Runs clients on a folder with graphs and client files, and judges what they generate.

    `source` opens what the tokens are judged by, and is called once. `files` compares the files that a client opens
    with the verified ones; None to compare none.
    """

    clients: Sequence[Client]
    folder: Path
    model: Path
    source: Callable[[], LogitsSource]
    files: ClientFiles | None = None

    @cached_property
    def judge(self) -> LogitsSource:
        """What the tokens are judged by."""
        return self.source()

    @cached_property
    def batches(self) -> list[list[list[int]]]:
        """Each prompt alone, then all together."""
        context = context_length(self.model)
        lengths = [length for length in LENGTHS if context is None or length + NEW <= context]
        tokens = usable_tokens(self.model)[:-1]  # GenAI pads with the last token where a model has no padding token
        alone = [random_prompts(tokens, 1, length) for length in lengths]
        return [*alone, [row for rows in alone for row in rows]] if len(alone) > 1 else alone

    @property
    def _vocabulary(self) -> int:
        return int(language_config(self.model)["vocab_size"])

    def checks(self) -> Checks:
        """Checks of the files, of the special tokens and of each batch, for each client."""
        for client in self.clients:
            yield list(self._checks_of(client))

    def _checks_of(self, client: Client) -> Iterator[Check]:
        yield from self.files.checks(client.name) if self.files else []
        if detail := self._obstacle(client):
            yield Check("generation", client.name, "", verdict="skip", detail=detail)
            return
        try:
            found = client.generate(self.folder, self.batches, NEW)
        except ClientError as error:
            yield Check("generation", client.name, "tokens", verdict="fail", detail=f"the client failed: {error}")
            return
        yield self._ends(client, found)
        yield from padding_checks(self.folder, self.model) if client.name == "genai" else []
        for prompts, rows in zip(self.batches, found.rows, strict=True):
            yield self._batch(client, prompts, rows, found.ends)

    def _obstacle(self, client: Client) -> str:
        """Why a client cannot generate here; empty if it can."""
        if self.files and VISION in self.files.verified.models and client.program.is_node:
            return "models with images do not run in its text generation"
        return "" if self.batches else f"the context has no room for {NEW} new tokens"

    def _ends(self, client: Client, found: Generation) -> Check:
        known = end_tokens(self.model)
        packages = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        if client.name == "genai" and frozenset() in known:
            known.append(frozenset({self._vocabulary - 1}))  # it needs one: export takes the last token
        others = f"{client.name} ends at {sorted(found.ends)}, the model at {sorted(known[0])}"
        if found.ends not in known:
            return Check(ENDS, client.name, "", verdict="fail", detail=others)
        shown = f"{client.name}: {packages}"
        return Check(ENDS, client.name, "", detail=shown if found.ends == known[0] else f"{shown}; {others}")

    def _batch(self, client: Client, prompts: list[list[int]], rows: list[list[int]], ends: frozenset[int]) -> Check:
        one = f"1 prompt of {len(prompts[0])} token{'s' * (len(prompts[0]) > 1)}"
        name = f"generation, {f'{len(prompts)} prompts' if len(prompts) > 1 else one}"
        kept = [up_to_end(row, ends) for row in rows]
        problem = lengths_problem(prompts, rows, kept, ends) or self._outside(kept)
        detail = ""
        if not problem:
            batch = PaddedBatch(prompts, kept, client.program.padding)
            problem, detail = judged(self.judge.logits(batch), batch, self.judge.title)
        if problem:
            return Check(name, client.name, "tokens", verdict="fail", detail=problem)
        return Check(name, client.name, "tokens", detail=detail)

    def _outside(self, rows: Sequence[Sequence[int]]) -> str:
        """Names a token that is not in the vocabulary; empty if all are."""
        outside = [token for row in rows for token in row if not 0 <= token < self._vocabulary]
        return f"token {outside[0]} is outside the vocabulary" if outside else ""


def judged(expected: ExpectedOutput, batch: PaddedBatch, model: str) -> tuple[str, str]:
    """A description of wrong tokens in a batch (empty if there are none), and of right ones.

    A token is right if it is the likeliest, or if its logit is below the largest by no more than noise. `expected` has
    the logits before each new token, [prompts, new, vocabulary]; `model` describes what computed them.
    """
    tokens = batch.ids[:, batch.longest :]
    with np.errstate(invalid="ignore"):  # of infinite logits, which make no token right
        margins = expected.exact.max(axis=-1) - np.take_along_axis(expected.exact, tokens[..., None], -1)[..., 0]
    right = (margins <= expected.near_tie) & np.isfinite(expected.near_tie)
    if wrong := np.argwhere(~right & expected.valid).tolist():
        row, at = min(wrong, key=lambda place: place[::-1])
        best = int(expected.exact[row, at].argmax())
        text = (
            f"prompt {row}, new token {at}: {tokens[row, at]} instead of {best}, whose logit in {model} is larger by "
        )
        return f"{text}{margins[row, at]:.3g} (noise explains {expected.near_tie[row, at]:.1g})", ""
    count, ties = int(expected.valid.sum()), int(((margins > 0) & expected.valid).sum())
    return "", f"{count} tokens" + (f", {ties} of them by a near-tie" if ties else "")


def up_to_end(row: Sequence[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to the first end token, which is included."""
    stop = next((at for at, token in enumerate(row, 1) if token in ends), len(row))
    return list(row[:stop])


def lengths_problem(
    prompts: Sequence[object], rows: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], ends: frozenset[int]
) -> str:
    """A description of a wrong shape of a batch; empty if the shape is right.

    `rows` are the new tokens of each prompt, in a batch of several with padding after the end token; `kept` the same up
    to the end token.
    """
    if len(rows) != len(prompts):
        return f"{len(rows)} rows for {len(prompts)} prompts"
    for row, tokens in zip(rows, kept, strict=True):
        if len(row) > NEW:
            return f"{len(row)} new tokens where {NEW} were asked for"
        if len(tokens) < NEW and not ends.intersection(tokens):
            return f"it stopped after {len(tokens)} new token{'s' * (len(tokens) != 1)} without an end token"
        if len(prompts) == 1 and len(row) > len(tokens):
            return "it went on after an end token"
    return ""


def end_tokens(folder: Path) -> list[frozenset[int]]:
    """The sets of end tokens that a model folder may mean, the plainest first.

    `generation_config.json` decides. Without any there, transformers does not end; others use those of `config.json`.

    Raises:
        MalformedInput: they are not numbers.
    """
    path = folder / "generation_config.json"
    own = _ids(read_json(path)) if path.is_file() else None
    if own:
        return [own]
    return list(dict.fromkeys([*([] if own is None else [own]), _ids(language_config(folder))]))


def _ids(fields: Mapping[str, Any]) -> frozenset[int]:
    given = fields.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token) is int for token in listed):
        raise MalformedInput("`eos_token_id` is not a token id or a list of them", hint="fix the model's configuration")
    return frozenset(listed)
