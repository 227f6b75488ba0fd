"""llama.cpp as a client: what it computes from a GGUF file, compared with the eager model of the values in the file.

llama.cpp rounds on purpose what it multiplies: a row of activations gets the type that the products of a matrix's type
need (ggml `ggml-cpu.c`, `vec_dot_type`), such as blocks of 8 bits for all quantized types; and GELU is its tanh form
out of a table of float16 (`ggml_vec_gelu_f32`). The eager model in float32 is run once more with the same roundings,
and its difference from float64 is the noise that a sigma of 1 stands for, as `verify.sigma` defines it for graphs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from llmconv.causal_lm import context_length
from llmconv.checkpoint import Checkpoint, transposed, write_small
from llmconv.convert.formats.gguf.format import in_float32, tensor_types, turned_names
from llmconv.convert.formats.gguf.names import TURNED
from llmconv.convert.from_hugging_face import open_model
from llmconv.convert.models.head_and_dtype import settled, with_tied_head
from llmconv.convert.opening import open_training
from llmconv.errors import InputRefused, listing
from llmconv.files.gguf_file import is_gguf, parts_of
from llmconv.files.sources import is_remote, local_path, reading_safely
from llmconv.memory import reporting_out_of_memory
from llmconv.output.plan import json_bytes
from llmconv.runtime.eager.runner import EagerRunner
from llmconv.runtime.runner import default_positions
from llmconv.runtime.tokenizer import TOKENIZER_FILES, load_tokenizer, random_prompts, usable_tokens
from llmconv.tensors import BY_NAME, Array, LazyTensor
from llmconv.verify.clients.comparison import (
    ENDS,
    LLAMA_CPP,
    NEW,
    Client,
    ClientError,
    PaddedBatch,
    end_tokens,
    judged,
)
from llmconv.verify.reference.cost_estimate import GB, CostEstimate, choose
from llmconv.verify.results import Check, Checks, Report, audited
from llmconv.verify.sigma import GATES, ULP_SHARE, ULPS, ExpectedOutput, NoiseFloor, measure, rms_rows
from llmconv.verify.verification import Session

NAME = LLAMA_CPP
SUFFIX = ".gguf"
LENGTHS = (1, 7, 100)  # tokens of the prompts
GATE = GATES["float32"]
TITLE = "the eager model"
TINY = 1e-300


# --- how llama.cpp rounds ---------------------------------------------------------------------------------------------

IN_BLOCKS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"), 32),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"), 256),
}
"""Elements of a block of 8-bit codes (Q8_0, Q8_1, Q8_K) that a row of activations becomes, by type of the matrix."""
IN_HALF = {"F16": torch.float16, "BF16": torch.bfloat16}
LEVELS = 127
Rounding = Callable[[torch.Tensor], torch.Tensor]  # of activations [..., columns]


def rounded_activations(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Activations [..., columns] as the products of a matrix of the type `kind` take them; those of F32 unchanged."""
    if kind in IN_HALF:
        return values.to(IN_HALF[kind]).to(values.dtype)
    if kind not in IN_BLOCKS or values.shape[-1] % IN_BLOCKS[kind]:
        return values
    blocks = values.float().reshape(-1, IN_BLOCKS[kind])
    scales = blocks.abs().amax(dim=1, keepdim=True) / LEVELS
    codes = torch.where(scales > 0, blocks / scales, 0).round()
    stored = scales.half().float() if IN_BLOCKS[kind] == 32 else scales
    return (codes * stored).reshape(values.shape).to(values.dtype)


class RoundedProducts(TorchFunctionMode):
    """Rounds the left side of products with matrices: how, by the address of a matrix's storage."""

    SIDES = {  # place of the activations, and of the matrix, among the arguments
        **dict.fromkeys((torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul), (0, 1)),
        **dict.fromkeys((torch.Tensor.__matmul__, torch.mm, torch.bmm), (0, 1)),
        torch.addmm: (1, 2),
    }

    def __init__(self, roundings: Mapping[int, Rounding]) -> None:
        super().__init__()
        self._roundings = roundings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = self.SIDES.get(func)
        if sides and len(args) > sides[1]:
            rounding = self._roundings.get(args[sides[1]].untyped_storage().data_ptr())
            args = list(args)
            args[sides[0]] = rounding(args[sides[0]]) if rounding else args[sides[0]]
        return func(*args, **(kwargs or {}))


def is_gelu(module: torch.nn.Module) -> bool:
    return "gelu" in type(module).__name__.lower()


def _gelu_of_table(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    values = args[0].half().float()
    table = torch.nn.functional.gelu(values, approximate="tanh").half().float()
    return torch.where(args[0].abs() >= 10, args[0].clamp(min=0), table).to(output.dtype)


# --- the model of a file ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileModel:
    """The model of a GGUF file, whose matrices are the values in the file, under Hugging Face names."""

    path: Path  # of the file, or of the first of its parts
    checkpoint: Checkpoint
    # configuration of the eager model: that of the reference, or of the file itself
    folder: Path
    home: Path  # has the tokenizer, and the tokens that end a text

    def modules(self) -> list[torch.nn.Module]:
        """The modules of the eager model; none before it was run."""
        return [*self._runners[0].model.modules()] if "_runners" in self.__dict__ else []

    @cached_property
    def types(self) -> dict[str, str]:
        """llama.cpp's type of each matrix by name."""
        return tensor_types(self.path)

    @cached_property
    def _tensors(self) -> dict[str, LazyTensor]:
        """The tensors by name, none of which a runner takes for a part of a safetensors file."""
        return {name: LazyTensor(one.dtype, one.shape, one.load) for name, one in self.checkpoint.tensors.items()}

    @cached_property
    def _runners(self) -> tuple[EagerRunner, EagerRunner, RoundedProducts, int]:
        exact = EagerRunner(self.folder, "float64", weights=self._tensors)
        rounded = EagerRunner(self.folder, "float32", weights=self._tensors)
        for module in rounded.model.modules():
            if is_gelu(module):
                module.register_forward_hook(_gelu_of_table)
        width = int(getattr(exact.config, "hidden_size", 0) or 0)
        types = labels_by_address(self.folder, self._tensors, self.types, rounded.model)
        roundings = {address: partial(rounded_activations, kind=kind) for address, kind in types.items()}
        return exact, rounded, RoundedProducts(roundings), width

    def logits(self, ids: Sequence[int], *, as_stored: bool) -> tuple[ExpectedOutput, Array]:
        """The logits of all tokens, [1, tokens, vocabulary], and the noise of llama.cpp's own roundings.

        `as_stored` rounds for the types of the file, else for values in float32. The second value is the usual noise of
        each row, [1, tokens]: that of half of the rows, by their size. Rounding may choose other experts for a token,
        whose noise is then far larger than that of others.
        """
        exact, rounded, products, width = self._runners
        tokens, mask = np.array([ids]), np.ones((1, len(ids)), np.int64)
        inputs = tokens, mask, default_positions(mask, len(ids))
        truth = exact.prefill(*inputs).logits
        with products if as_stored else nullcontext():
            found = rounded.prefill(*inputs).logits
        size = rms_rows(truth)
        share = float(np.median(rms_rows(found.astype(np.float64) - truth) / np.maximum(size, TINY)))
        usual = np.maximum(max(share, ULPS["float32"] * ULP_SHARE) * size, TINY)
        return NoiseFloor("float32", width).truth("logits", truth, found, mask == 1), usual


def labels_by_address(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    labels: Mapping[str, str],
    model: torch.nn.Module,
    dtype: str = "float32",
) -> dict[int, str]:
    """Labels of the loaded matrices of `model`, by the address of their storage; without those that have none.

    `labels` are by name in the files. A model of numbers of labels is loaded in the same way.
    """
    kinds = ["", *sorted({*labels.values()})]
    numbers = {
        name: _filled(one.shape, float(kinds.index(labels.get(name, "")))) if len(one.shape) > 1 else one
        for name, one in tensors.items()
    }
    marks = dict(EagerRunner(folder, dtype, weights=numbers).model.named_parameters())
    found = {
        parameter.untyped_storage().data_ptr(): kinds[int(marks[name].flatten()[0])]
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
    }
    return {address: label for address, label in found.items() if label}


def _filled(shape: tuple[int, ...], number: float) -> LazyTensor:
    return LazyTensor(
        BY_NAME["float32"], shape, lambda start, stop: np.full((stop - start, *shape[1:]), number, np.float32)
    )


def gguf_file(path: Path) -> Path:
    """The GGUF file at a path or in a folder, of several parts the first; InputRefused for none, or several models."""
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    files = [file for file in files if is_gguf(file)]
    if not files:
        raise InputRefused(
            f"`{path}` is not a GGUF file, and not a folder of one",
            hint="make one: `llmconv to-gguf MODEL -o FILE.gguf`",
        )
    parts = parts_of(files[0])
    if others := sorted(file.name for file in {*files} - {*parts}):
        raise InputRefused(
            f"`{path}` contains several GGUF models: {listing([files[0].name, *others])}", hint="give one of the files"
        )
    return parts[0]


@contextmanager
def opened(file: Path, reference: Path | None) -> Iterator[tuple[FileModel, Checkpoint | None]]:
    """The model of a file, and the reference; the configuration of the eager model is in a folder that is removed.

    Raises InputRefused, UnsupportedInput or MalformedInput for a file that `to-hf`, or a reference that `from-hf`,
    refuses.
    """
    checkpoint, given = settled(open_training(file, "gguf")), None
    config, files = checkpoint.config, dict(checkpoint.side_files)
    if reference is not None:
        with reading_safely(reference):
            given = open_model(reference)
        if not given.tensors.keys() & checkpoint.tensors.keys():
            raise InputRefused(
                f"`{reference}` is not a model that `{file.name}` could hold: no tensor has the same name",
                hint="give `--reference` the Hugging Face folder that the file was made from",
            )
        config, files = {**given.config, "tie_word_embeddings": config["tie_word_embeddings"]}, {}
    with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
        folder = Path(name)
        write_small(folder, {**files, "config.json": json_bytes(config)})
        yield FileModel(file, checkpoint, folder, reference or folder), given


# --- the values in a file against those of the reference --------------------------------------------------------------

STEPS = {"float32": (2**-23, 2**-23), "float16": (2**-11, 2**-25), "bfloat16": (2**-8, 2**-133)}
"""Largest difference of one rounding: a share of the value, and a least one; norms of Gemma have one added."""

BLOCK_SHARES = {
    "Q8_0": (32, 0.005),
    "Q6_K": (16, 0.04),
    "Q5_0": (32, 0.07),
    "Q5_1": (32, 0.06),
    "Q5_K": (32, 0.07),
    "Q4_0": (32, 0.13),
    "Q4_1": (32, 0.1),
    "Q4_K": (32, 0.13),
    "IQ4_NL": (32, 0.13),
    "IQ4_XS": (32, 0.15),
    "MXFP4": (32, 0.3),
    "Q3_K": (16, 0.3),
    "Q2_K": (16, 0.4),
    "TQ1_0": (256, 0.4),
    "TQ2_0": (256, 0.4),
}
"""Elements of a scale, and the largest RMS error of a row as a share of the RMS of its blocks' largest values.

About three times what llama.cpp's quantizers leave of normal values, where a search for scales may leave more.
"""
ROW_SHARE = 1.2
"""Largest RMS error as a share of the row's RMS: rounding to zero leaves 1, another row in its place leaves 1.4."""


COLUMNS, COLUMN_SHARE = "columns", 0.35
"""Of matrices whose blocks are along columns, or of parts of different types: the largest RMS error of a row."""


def weight_problems(file: FileModel, reference: Checkpoint) -> tuple[list[str], bool]:
    """What the values in a file have that no rounding of the reference's gives, a line per tensor.

    The second value says whether the tensors have the names and shapes of the reference; only then are values compared.
    """
    tensors, found = reference.tensors, file.checkpoint.tensors
    if found.keys() - tensors.keys():  # a head that the reference ties, and a file may store in another type
        tensors = with_tied_head(tensors, reference.config)
    missing = [f"`{name}` is missing in the file" for name in sorted(tensors.keys() - found.keys())]
    unexpected = [f"`{name}` is in the file alone" for name in sorted(found.keys() - tensors.keys())]
    pairs = {name: (found[name], tensors[name]) for name in sorted(found.keys() & tensors.keys())}
    shapes = [
        f"`{name}` has the shape {list(one.shape)} instead of {list(other.shape)}"
        for name, (one, other) in pairs.items()
        if one.shape != other.shape
    ]
    if odd := [*missing, *unexpected, *shapes]:
        return odd, False
    if file.checkpoint.config["model_type"] == "gpt2":  # blocks of a matrix that is stored turned lie in columns
        pairs = {n: (transposed(a), transposed(b)) if TURNED.search(n) else (a, b) for n, (a, b) in pairs.items()}
    turned = turned_names(file.path) - {name for name in pairs if TURNED.search(name)}
    kinds = {**file.types, **dict.fromkeys(turned, COLUMNS)}
    differences = ((name, _difference(*pair, kinds.get(name, ""))) for name, pair in pairs.items())
    return [f"`{name}` {problem}" for name, problem in differences if problem], True


def _difference(found: LazyTensor, expected: LazyTensor, kind: str) -> str:
    """The first row whose values are no rounding to the type `kind`, in words; empty if there is none."""
    for start, stop in expected.blocks():
        values, wanted = (one.rows(start, stop).astype(np.float64) for one in (found, expected))
        values, wanted = (one.reshape(stop - start, -1) for one in (values, wanted))
        error = np.abs(values - wanted)
        if kind in BLOCK_SHARES:
            size, share = BLOCK_SHARES[kind]
            largest = np.abs(wanted).reshape(stop - start, -1, size).max(axis=-1)
            wrong = ~(rms_rows(error) <= np.minimum(share * rms_rows(largest), ROW_SHARE * rms_rows(wanted)))
        elif kind == COLUMNS:
            wrong = ~(rms_rows(error) <= COLUMN_SHARE * rms_rows(wanted))
        else:
            share, least = STEPS.get(found.dtype.name, STEPS["float32"])
            wrong = np.asarray((~(error <= share * np.abs(wanted) + least)).any(axis=-1))
        if wrong.any():
            row = int(wrong.argmax())
            return (
                f"differs by {error[row].max():.3g} in row {start + row}, more than {kind or found.dtype.name} rounds"
            )
    return ""


# --- the checks -------------------------------------------------------------------------------------------------------

TEXTS = (
    "The quick brown fox doesn't jump over 12 lazy dogs, or 3.14159!",
    "  two  spaces\n\n\tand a tab, a line\r\nand an end ",
    "naïve café 漢字 русский العربية 🙂",
    "def f(x_1):\n    return {'a': [x_1 ** 2, \"b\"]}  # I'LL",
)


@dataclass
class LlamaCppChecks:
    """Runs a GGUF file in llama.cpp, and judges what it computes."""

    client: Client
    model: FileModel
    reference: Checkpoint | None

    def checks(self) -> Checks:
        """Raises InputRefused where the reference has a tokenizer that cannot be read."""
        if self.reference:
            problems, is_comparable = weight_problems(self.model, self.reference)
            count = len(self.model.checkpoint.tensors)
            yield [
                audited("weights", NAME, problems, f"{count} tensors, as the types of the file round the reference's")
            ]
            if not is_comparable:
                return
        yield from self._runs(self.model.path, as_stored=True)
        if {*self.model.types.values()} - {"F32"}:
            with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
                yield from self._runs(self._in_float32(Path(name)), as_stored=False)

    def _runs(self, file: Path, *, as_stored: bool) -> Checks:
        """Runs the file, or its values in float32, in which settings of the file show that rounding hides."""
        prompts, texts = self._prompts(), self._texts() if as_stored else []
        with tempfile.TemporaryDirectory(prefix="llmconv-") as name:
            request = {"folder": str(file.resolve()), "batches": prompts, "texts": texts, "output": name}
            try:
                answer = self.client.ask(**request, new=NEW)
            except ClientError as error:
                yield [Check("generation", NAME, "tokens", verdict="fail", detail=f"the client failed: {error}")]
                return
            if as_stored:
                yield [self._ends(answer), self._ids(texts, answer["ids"])]
            if not prompts:
                detail = f"the context has no room for {NEW} new tokens"
                yield [Check("generation", NAME, "", verdict="skip", detail=detail)]
            for number, (prompt, row) in enumerate(zip(prompts, answer["rows"], strict=True)):
                yield self._run(prompt, row, np.load(Path(name) / f"{number}.npy"), as_stored=as_stored)

    def _in_float32(self, folder: Path) -> Path:
        """A copy of the file with its values in float32; InputRefused without room for it."""
        needed = 4 * sum(prod(one.shape) for one in self.model.checkpoint.tensors.values())
        room = disk_usage(folder).free
        if needed > room:
            sizes = f"{needed / GB:.1f} GB, and `{folder.parent}` has {room / GB:.1f} GB"
            raise InputRefused(
                f"the values of `{self.model.path.name}` in float32 take {sizes}",
                hint="name a larger folder with the environment variable TMPDIR",
            )
        with open(folder / "float32.gguf", "wb") as file:
            file.writelines(in_float32(self.model.path))
        return folder / "float32.gguf"

    def _prompts(self) -> list[list[int]]:
        context, tokens = context_length(self.model.folder), usable_tokens(self.model.folder)
        lengths = [length for length in LENGTHS if context is None or length + NEW <= context]
        return [random_prompts(tokens, 1, length)[0] for length in lengths]

    def _texts(self) -> list[str]:
        """The texts, and one with names of special tokens; none without a tokenizer."""
        if not self._has_tokenizer:
            return []
        names = self._tokenizer.all_special_tokens[:2]
        return [*TEXTS, " and ".join([*names, *names])] if names else [*TEXTS]

    @property
    def _has_tokenizer(self) -> bool:
        return self._has_words and any((self.model.home / name).is_file() for name in TOKENIZER_FILES)

    @property
    def _has_words(self) -> bool:
        return bool(self.model.checkpoint.side_files.keys() & {*TOKENIZER_FILES})

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model.home)

    def _ends(self, answer: Mapping[str, Any]) -> Check:
        """Other tokens than those of the file and the model are no fault: llama.cpp knows some by their names."""
        known, found = end_tokens(self.model.home)[0], frozenset(answer["ends"])
        shown = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
        if not self._has_words:
            return Check(ENDS, NAME, "", verdict="skip", detail=f"{shown}; the file has no tokenizer")
        others, own = f"it ends at {sorted(found)}, the model at {sorted(known)}", self.model.checkpoint.config
        if not known <= found or (known and own.get("eos_token_id") not in {*known, None}):
            return Check(ENDS, NAME, "", verdict="fail", detail=others)
        return Check(ENDS, NAME, "", detail=shown if found == known else f"{shown}; {others}")

    def _ids(self, texts: Sequence[str], ids: Sequence[Sequence[list[int]]]) -> Check:
        if not self._has_tokenizer:
            return Check("tokens of texts", NAME, "", verdict="skip", detail="the file or the model has no tokenizer")
        problems = token_problems(self._tokenizer, texts, ids)
        return audited("tokens of texts", NAME, problems, f"{len(texts)} texts, with and without special tokens")

    def _run(self, prompt: list[int], row: list[int], logits: Array, *, as_stored: bool) -> list[Check]:
        """The logits of all tokens of a prompt and of what was generated after it, and the generated tokens."""
        name = f"1 prompt of {len(prompt)} token{'s' * (len(prompt) > 1)}"
        name += "" if as_stored else ", values in float32"
        outside = [token for token in row if not 0 <= token < self.model.checkpoint.config["vocab_size"]]
        if outside:
            detail = f"token {outside[0]} is outside the vocabulary"
            return [Check(f"generation, {name}", NAME, "tokens", verdict="fail", detail=detail)]
        truth, usual = self.model.logits([*prompt, *row[:-1]], as_stored=as_stored)
        found = measure(truth, logits[None], tokens=True)
        detail = found.problem or (f"{found.flips} other likeliest tokens" if found.flips else "")
        if not detail and np.median(rms_rows(logits[None] - truth.exact) / usual) > GATE.aggregate:
            detail = "half of the tokens differ by more than the usual noise explains"
        measured: dict[str, Any] = {"sigma": found.sigma, "row_sigma": found.row_sigma, "max_abs": found.max_abs}
        measured |= {"row": found.row, "divergence": found.divergence, "agreement": found.agreement}
        verdict = "fail" if detail or not found.passes(GATE) else "pass"
        compared = Check(f"logits, {name}", NAME, "logits", verdict=verdict, detail=detail, **measured)
        problem, detail = judged(truth.last(len(row)), PaddedBatch([prompt], [row], "left"), TITLE)
        verdict = "fail" if problem else "pass"
        return [compared, Check(f"generation, {name}", NAME, "tokens", verdict=verdict, detail=problem or detail)]

    def unseen(self) -> list[str]:
        """What these runs could not have found, in words."""
        rounds = any(map(is_gelu, self.model.modules()))
        return [
            *([] if self.reference else ["faults in the file itself (`--reference` compares it with its model)"]),
            *(["faults smaller than the rounding of llama.cpp's GELU"] if rounds else []),
            *([] if self._has_tokenizer else ["faults of a tokenizer"]),
            *(f"faults after the first {len(prompt) + NEW} tokens" for prompt in self._prompts()[-1:]),
        ]


def token_problems(tokenizer: Any, texts: Sequence[str], ids: Sequence[Sequence[list[int]]]) -> list[str]:
    """Where the ids of texts, [text][with and without special tokens], are not the tokenizer's, in words."""
    problems = []
    for text, found in zip(texts, ids, strict=True):
        for special, row in zip((True, False), found, strict=True):
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            if row != expected:
                at = next((at for at, pair in enumerate(zip(row, expected, strict=False)) if len({*pair}) > 1), -1)
                where = f"token {at} of {text[:20]!r} is {row[at]} instead of {expected[at]}"
                problems.append(where if at >= 0 else f"{len(row)} tokens instead of {len(expected)} of {text[:20]!r}")
    return problems


WHOLE_ONLY = "llama.cpp's roundings are computed in the whole model"


def checked_file(
    path: str | Path, reference: str | Path | None, client: Client, session: Session, low_memory: bool | None
) -> Report:
    """The report of a GGUF file, or of a folder of one, in llama.cpp.

    `reference` is the Hugging Face folder that the file was made from; None compares with what `to-hf` makes of the
    file. `low_memory` is False to begin without enough memory. Raises InputRefused: there is no such file or reference,
    memory or disk is too small, or llama.cpp is not installed; UnsupportedInput or MalformedInput: `to-hf` refuses the
    file.
    """
    versions = client.require()
    file = gguf_file(local_path(path) if is_remote(path) else Path(path))
    report = session.new_report(file.name)
    report.versions |= versions
    with (
        reporting_out_of_memory(f"while `{file.name}` was verified"),
        opened(file, None if reference is None else local_path(reference)) as (model, given),
    ):
        report.reference = (given.path if given else file).name
        choose(CostEstimate.of(model.checkpoint.tensors, 1), low_memory, WHOLE_ONLY)
        report.notes += model.checkpoint.warnings
        checks = LlamaCppChecks(client, model, given)
        session.collect(report, checks.checks())
        report.unseen += checks.unseen()
    return report
