"""vLLM as a client: what it computes from a Hugging Face folder, plain or quantized, compared with the eager model.

vLLM computes in the folder's dtype, and with schemes such as FP8 and W8A8 it rounds the activations of each token, too
(compressed-tensors, `input_activations`). The eager model is run once more with the same roundings; its difference from
float64 is the noise that a sigma of 1 stands for, as `verify.sigma` defines it for graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
import torch

from llmconv.causal_lm import context_length
from llmconv.checkpoint import Checkpoint, open_checkpoint
from llmconv.errors import InputRefused, UnsupportedInput, short
from llmconv.export.families import extra_inputs_of
from llmconv.files.safetensors_file import encode_header
from llmconv.files.sources import is_remote, local_path, source_name
from llmconv.memory import reporting_out_of_memory
from llmconv.output.plan import json_bytes
from llmconv.quantized_weights.quantized_checkpoint import FIELD, QuantizedCheckpoint, quantized_checkpoint
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.runner import default_positions
from llmconv.runtime.tokenizer import TOKENIZER_FILES, load_tokenizer, random_prompts, usable_tokens
from llmconv.tensors import BY_NAME, Array, LazyTensor, cast
from llmconv.verify.clients.comparison import (
    ENDS,
    NEW,
    VLLM,
    Client,
    ClientError,
    PaddedBatch,
    end_tokens,
    judged,
)
from llmconv.verify.clients.llamacpp import (
    GATE,
    LENGTHS,
    TEXTS,
    TITLE,
    RoundedProducts,
    Rounding,
    labels_by_address,
    token_problems,
)
from llmconv.verify.reference.cost_estimate import GB, CostEstimate, choose
from llmconv.verify.results import Check, Checks, Report, audited
from llmconv.verify.sigma import ExpectedOutput, Measure, NoiseFloor, log_probabilities, measure
from llmconv.verify.verification import Session

LARGEST = {"int": 127.0, "float": 448.0}  # of the 8-bit codes of an activation
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}  # fields of `config.json` of mixtures
SHARE = 0.1  # of the tokens that may have other experts by rounding
WHOLE_ONLY = "vLLM's roundings are computed in the whole model"


# --- how vLLM rounds activations --------------------------------------------------------------------------------------


def rounded_activations(values: torch.Tensor, kind: str, size: int) -> torch.Tensor:
    """Activations [..., columns] as 8-bit codes of `kind`, `int` or `float` (E4M3), with a scale per `size` columns."""
    parts = values.float().reshape(-1, size or values.shape[-1])
    scales = parts.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST[kind]
    codes = parts / scales
    codes = codes.round() if kind == "int" else codes.to(torch.float8_e4m3fn).float()
    return (codes * scales).reshape(values.shape).to(values.dtype)


def activation_rounding(settings: Mapping[str, Any]) -> Rounding | None:
    """How the activations of all quantized matrices are rounded; None for a scheme that rounds weights alone.

    UnsupportedInput for other roundings than to 8 bits, dynamic, by token or by groups of its columns.
    """
    groups = settings.get("config_groups") or {}
    found = [one.get("input_activations") for one in groups.values()]
    method = settings.get("quant_method")
    of_int8 = method == "bitsandbytes" and settings.get("load_in_8bit")
    if of_int8 or method == "fbgemm_fp8" or (method == "fp8" and settings.get("activation_scheme") == "static"):
        raise UnsupportedInput(
            f"activations are rounded in a way that is not computed here: that of `{method}`",
            hint="verify the values of its codes: `llmconv to-hf FOLDER -o OUT --quant dequantize`",
        )
    if method == "fp8":  # of DeepSeek
        size = settings.get("weight_block_size") or [0, 0]
        return partial(rounded_activations, kind="float", size=int(size[1]))
    if not any(found):
        return None
    one = found[0] or {}
    is_known = one.get("num_bits") == 8 and one.get("type") in LARGEST and one.get("dynamic") is True
    if len(found) > 1 or not is_known or one.get("strategy") not in {"token", "group"}:
        raise UnsupportedInput(
            f"activations are rounded in a way that is not computed here: {short(one, 120)}",
            hint="`verify FOLDER --reference MODEL` compares its codes and scales",
        )
    size = int(one.get("group_size") or 0) if one["strategy"] == "group" else 0
    return partial(rounded_activations, kind=str(one["type"]), size=size)


# --- the model of a folder --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FolderModel:
    """What a Hugging Face folder should compute: its own values, or those of a reference."""

    path: Path
    checkpoint: Checkpoint  # as stored
    quantized: QuantizedCheckpoint | None
    folder: Path  # configuration of the eager model
    reference: Path  # the model that has the tokenizer and the end tokens of the folder, or the folder itself
    adapter: Path | None
    weights: Mapping[str, LazyTensor] | None = None  # of the eager model of plain weights; None for those of `folder`

    @cached_property
    def values(self) -> dict[str, LazyTensor] | None:
        """The values of quantized weights, by name; None for a folder of plain weights."""
        if not self.quantized:
            return None
        tensors = self.quantized.plain.tensors
        return {name: LazyTensor(one.dtype, one.shape, one.load) for name, one in tensors.items()}

    def _runner(self, dtype: str) -> EagerRunner:
        extra = extra_inputs_of(self.folder)
        weights = self.weights if self.values is None else self.values
        return EagerRunner(self.folder, dtype, weights=weights, adapter=self.adapter, extra_inputs=extra)

    @cached_property
    def _exact(self) -> EagerRunner:
        return self._runner("float64")

    def require_adapter(self) -> None:
        """Raises InputRefused for an adapter that PEFT cannot apply to the model."""
        if self.adapter:
            _ = self._exact

    def rounded(self, dtype: str) -> RoundedModel:
        """The model with vLLM's roundings, computed in `dtype`."""
        runner, rounding = self._runner(dtype), None
        if self.quantized and dtype != "float32":
            rounding = activation_rounding(self.quantized.stored.config[FIELD])
        products = None
        if rounding and self.quantized:
            labels = dict.fromkeys(self.quantized.weights, "codes")
            found = labels_by_address(self.folder, self.values or {}, labels, runner.model, dtype)
            products = RoundedProducts(dict.fromkeys(found, rounding))
        width = int(getattr(self._exact.config, "hidden_size", 0) or 0)
        return RoundedModel(self._exact, runner, products, NoiseFloor(dtype, width))


@dataclass(frozen=True)
class RoundedModel:
    """The eager model in float64, and in vLLM's dtype with its roundings."""

    exact: EagerRunner
    runner: EagerRunner
    products: RoundedProducts | None
    floor: NoiseFloor

    def log_probabilities(self, ids: Sequence[int], chosen: Array) -> tuple[ExpectedOutput, ExpectedOutput]:
        """Of the tokens `chosen`, [tokens, count], after the last tokens of `ids`; and of all, [1, tokens, …]."""
        tokens, mask = np.array([ids]), np.ones((1, len(ids)), np.int64)
        inputs = tokens, mask, default_positions(mask, len(ids))
        exact = log_probabilities(self.exact.prefill(*inputs).logits.astype(np.float64))
        with self.products or nullcontext():
            found = log_probabilities(self.runner.prefill(*inputs).logits.astype(np.float64))
        exact, found, valid = exact[:, -len(chosen) :], found[:, -len(chosen) :], mask[:, -len(chosen) :] == 1
        at = partial(np.take_along_axis, indices=chosen[None], axis=-1)
        whole = NoiseFloor("float32").truth("all", exact, found, valid)
        return self.floor.truth("chosen", at(exact), at(found), valid), whole


@contextmanager
def opened(path: Path, reference: Path | None, adapter: Path | None) -> Iterator[FolderModel]:
    """The model of a folder; that of quantized weights has a configuration in a folder that is removed.

    Raises InputRefused, UnsupportedInput or MalformedInput for a folder or reference that cannot be read.
    """
    checkpoint = open_checkpoint(path)
    quantized = quantized_checkpoint(checkpoint)
    if quantized:
        activation_rounding(checkpoint.config[FIELD])
        with _plain_configuration(quantized) as folder:
            yield FolderModel(path, checkpoint, quantized, folder, reference or path, adapter)
        return
    if reference is None:
        yield FolderModel(path, checkpoint, None, path, path, adapter)
        return
    given = open_checkpoint(reference)
    coded = quantized_checkpoint(given)
    weights = _rounded_as(checkpoint, coded.plain if coded else given)
    with _plain_configuration(coded) if coded else nullcontext(reference) as folder:
        yield FolderModel(path, checkpoint, None, folder, reference, adapter, weights)


@contextmanager
def _plain_configuration(quantized: QuantizedCheckpoint) -> Iterator[Path]:
    """A folder with the configuration of the plain values alone, which is removed."""
    with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
        (Path(name) / "config.json").write_bytes(json_bytes(quantized.plain.config))
        yield Path(name)


def _rounded_as(checkpoint: Checkpoint, reference: Checkpoint) -> dict[str, LazyTensor]:
    """The weights of a reference, those that a checkpoint has under the same name rounded to the type that it has."""
    types = {name: tensor.dtype for name, tensor in checkpoint.items()}
    return {name: cast(tensor, types.get(name, tensor.dtype), name) for name, tensor in reference.items()}


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass
class VllmChecks:
    """Runs a folder in vLLM, and judges what it computes."""

    client: Client
    model: FolderModel

    def checks(self) -> Checks:
        """The folder as it is, then its values in float32, in which faults show that rounding hides."""
        dtypes: list[str] = []
        yield from self._runs(self.model.path, "auto", dtypes)
        if dtypes and dtypes != ["float32"]:
            with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
                yield from self._runs(self._in_float32(Path(name)), "float32", dtypes)

    def _runs(self, folder: Path, dtype: str, dtypes: list[str]) -> Checks:
        """Runs a folder; what vLLM computed in is added to `dtypes`."""
        prompts, is_first = self._prompts(), not dtypes
        texts = self._texts() if is_first else []
        if not prompts:
            detail = f"the context has no room for {NEW} new tokens"
            yield [Check("generation", VLLM, "", verdict="skip", detail=detail)]
            return
        with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
            request: dict[str, Any] = {"folder": str(folder.resolve()), "batches": prompts, "texts": texts}
            request |= {"new": NEW, "dtype": dtype, "output": name, "tokenizer": bool(texts)}
            request["adapter"] = str(self.model.adapter.resolve()) if self.model.adapter else None
            try:
                answer = self.client.ask(**request)
            except ClientError as error:
                detail = f"the client failed: {error}"
                yield [Check("generation", VLLM, "tokens", verdict="fail", detail=detail)]
                return
            dtypes.append(answer["dtype"])
            if is_first:
                yield [self._ends(answer), self._ids(texts, answer["ids"])]
            rounded = self.model.rounded(answer["dtype"])
            for number, (prompt, row) in enumerate(zip(prompts, answer["rows"], strict=True)):
                with np.load(Path(name) / f"{number}.npz") as found:
                    yield self._run(prompt, row, found["ids"], found["values"], rounded, "" if is_first else dtype)

    def _in_float32(self, folder: Path) -> Path:
        """The folder itself, or of quantized weights a copy of their values; InputRefused without room for it."""
        values = self.model.values
        if values is None:
            return self.model.path
        needed, room = 4 * sum(prod(one.shape) for one in values.values()), disk_usage(folder).free
        if needed > room:
            sizes = f"{needed / GB:.1f} GB, and `{folder.parent}` has {room / GB:.1f} GB"
            raise InputRefused(
                f"the values of `{self.model.path.name}` in float32 take {sizes}",
                hint="name a larger folder with the environment variable TMPDIR",
            )
        for file in self.model.folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        plain = {name: cast(one, BY_NAME["float32"], name) for name, one in values.items()}
        with open(folder / "model.safetensors", "wb") as weights:
            weights.write(encode_header({name: (one.dtype, one.shape) for name, one in plain.items()}))
            for one in plain.values():
                weights.writelines(one.rows(*block).tobytes() for block in one.blocks())
        return folder

    def _prompts(self) -> list[list[int]]:
        context, tokens = context_length(self.model.folder), usable_tokens(self.model.folder)
        lengths = [length for length in LENGTHS if context is None or length + NEW <= context]
        return [random_prompts(tokens, 1, length)[0] for length in lengths]

    def _texts(self) -> list[str]:
        return [*TEXTS] if _has_tokenizer(self.model.path) else []

    def _ends(self, answer: Mapping[str, Any]) -> Check:
        """vLLM ends at the tokens of generation_config.json, and at that of the tokenizer."""
        known, found = end_tokens(self.model.reference), frozenset(answer["ends"])
        shown = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
        shown += f", in {answer['dtype']}"
        others = f"it ends at {sorted(found)}, the model at {sorted(known[0])}"
        of_tokenizer = getattr(self._tokenizer, "eos_token_id", None)
        if not known[0] <= found <= frozenset().union(*known, {of_tokenizer}):
            return Check(ENDS, VLLM, "", verdict="fail", detail=others)
        return Check(ENDS, VLLM, "", detail=shown if found == known[0] else f"{shown}; {others}")

    def _ids(self, texts: Sequence[str], ids: Sequence[Sequence[list[int]]]) -> Check:
        if not texts:
            return Check("tokens of texts", VLLM, "", verdict="skip", detail="the folder has no tokenizer")
        problems = token_problems(self._tokenizer, texts, ids)
        return audited("tokens of texts", VLLM, problems, f"{len(texts)} texts, with and without special tokens")

    @cached_property
    def _tokenizer(self) -> Any:
        """That of the reference, or of the folder; None without any."""
        homes = [home for home in (self.model.reference, self.model.path) if _has_tokenizer(home)]
        return load_tokenizer(homes[0]) if homes else None

    def _run(
        self, prompt: list[int], row: list[int], ids: Array, values: Array, rounded: RoundedModel, dtype: str
    ) -> list[Check]:
        """The log-probabilities of all tokens of a prompt and of what was generated after it, and these tokens."""
        name = f"1 prompt of {len(prompt)} token{'s' * (len(prompt) > 1)}" + (f", in {dtype}" if dtype else "")
        truth, whole = rounded.log_probabilities([*prompt, *row[:-1]], ids)
        found = measure(truth, values[None])
        left = self._with_other_experts(found) if rounded.floor.dtype != "float32" else None
        if left is not None:
            truth, whole = (replace(one, valid=one.valid & ~left) for one in (truth, whole))
            found = replace(measure(truth, values[None]), problem=found.problem)
        measured: dict[str, Any] = {"sigma": found.sigma, "row_sigma": found.row_sigma, "max_abs": found.max_abs}
        measured["row"] = found.row
        verdict = "fail" if found.problem or not found.passes(GATE) else "pass"
        notes = [] if left is None else [f"{left.sum()} of {left.size} tokens with other experts are left to float32"]
        detail = "; ".join(filter(None, [found.problem, *notes]))
        compared = Check(f"logits, {name}", VLLM, "logits", verdict=verdict, detail=detail, **measured)
        problem, detail = judged(whole.last(len(row)), PaddedBatch([prompt], [row], "left"), TITLE)
        verdict = "fail" if problem else "pass"
        return [compared, Check(f"generation, {name}", VLLM, "tokens", verdict=verdict, detail=problem or detail)]

    def _with_other_experts(self, found: Measure) -> Array | None:
        """Tokens that may have got other experts, bool [1, tokens]; None if there are none.

        A router that rounds otherwise may choose others where two are nearly as likely, and the error is then that of
        another function. They are few, and in float32 there are none.
        """
        config = self.model.checkpoint.config
        if not EXPERTS & {*config, *(config.get("text_config") or {})} or found.problem:
            return None
        assert found.ratios is not None
        beyond: Array = found.ratios > GATE.row
        return beyond if 0 < beyond.sum() <= max(1, SHARE * beyond.size) else None

    def unseen(self) -> list[str]:
        """What these runs could not have found, in words."""
        return [
            *([] if self._texts() else ["faults of a tokenizer"]),
            *(f"faults after the first {len(prompt) + NEW} tokens" for prompt in self._prompts()[-1:]),
        ]


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def checked_by_vllm(
    path: str | Path,
    reference: str | Path | None,
    adapter: str | Path | None,
    client: Client,
    session: Session,
    low_memory: bool | None,
    before: Callable[[Path], Report] | None = None,
) -> Report:
    """The report of a Hugging Face folder in vLLM.

    `reference` is the model that a folder of plain weights should be; of quantized weights, `before` compares the codes
    with it first. `low_memory` is False to begin without enough memory. Raises InputRefused: the folder or the
    reference cannot be opened, memory or disk is too small, or vLLM is not installed; UnsupportedInput: weights are
    quantized in an unknown way.
    """
    versions = client.require()
    folder = local_path(path) if is_remote(path) else Path(path)
    given = None if reference is None else local_path(reference)
    with (
        reporting_out_of_memory(f"while `{folder.name}` was verified"),
        opened(folder, given, None if adapter is None else local_path(adapter)) as model,
    ):
        report = before(folder) if before and model.quantized and given else session.new_report(folder.name)
        report.versions |= versions
        report.reference = source_name(given or folder)
        choose(CostEstimate.of(model.values or model.checkpoint.tensors, 1), low_memory, WHOLE_ONLY)
        model.require_adapter()
        checks = VllmChecks(client, model)
        session.collect(report, checks.checks())
        report.unseen += checks.unseen()
    return report
