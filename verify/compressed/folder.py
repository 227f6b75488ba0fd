"""Verifies a folder of `llmconv quantize`: its configuration, what it keeps, every scale, every code, and the cost.

With `--method awq` norms and rows of gated matrices are divided by powers of two, and the columns of the matrices
behind them, and of a router, are multiplied with the same. Which factors a folder has is read off its norms and the
sizes of its rows; each matrix must have those of its layer, and the model with all factors, before it is rounded, must
be the same function: its logits on the text are the model's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.causal_lm import length_of
from llmconv.checkpoint import Checkpoint, is_model_folder, open_checkpoint, read_json
from llmconv.compressed.folder import COMMAND, opened, plan_quantized
from llmconv.compressed.rounding import SharedPeak
from llmconv.compressed.schemes import (
    BASE_FORMATS,
    HEAD,
    RELEASED,
    SCHEMES,
    IntegerOptions,
    Scheme,
    Weight,
    kept_modules,
    released,
    scheme_of,
)
from llmconv.compressed.selection import LAYER, is_matrix, one_by_one, peak_of
from llmconv.convert.models.head_and_dtype import check_dtype, with_cast
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput, UsageProblem, short
from llmconv.export.quantization.quantized_tensor import multiplied
from llmconv.output.manifest import read_manifest
from llmconv.quantized_weights.packed_weight import peaks_of
from llmconv.quantized_weights.quantized_checkpoint import FIELD, QuantizedCheckpoint, quantized_checkpoint
from llmconv.runtime.runner import Runner
from llmconv.tensors import Array, LazyTensor, lists_by_key
from llmconv.verify.audit.weights import audit_files
from llmconv.verify.compressed.codes import Rounding, audit_weight, global_problem
from llmconv.verify.other_exporters.quantized.accuracy import (
    RELATIVE,
    AccuracyLimits,
    check_gate,
    check_limits,
    difference,
    measure_costs,
    token_sample,
)
from llmconv.verify.results import Check, Checks, Quantization, Report, audited, problem_of
from llmconv.verify.scenarios.calls import ModelFacts
from llmconv.verify.verification import Session

METHOD = "codes"
DTYPES = ("torch_dtype", "dtype")  # names of one field of `config.json`
FREE = (*DTYPES, "transformers_version", FIELD)  # fields of `config.json` that may differ
PLAIN, FOLDED = "plain rounding", "factors"
SAME = 1e-6
"""Largest divergence in nats of a model with factors: they are powers of two, so its logits have the same bits."""


def is_compressed(folder: Path) -> bool:
    """Whether the weights of a folder are those of compressed-tensors or of `quantize`."""
    field = read_json(folder / "config.json").get(FIELD)
    method = field.get("quant_method") if isinstance(field, Mapping) else None
    return method == "compressed-tensors" or (method in (*BASE_FORMATS, RELEASED) and bool(_recorded(folder)))


@dataclass(frozen=True)
class CompressedFolder:
    """A folder of codes, and the model that it was made of."""

    path: Path
    stored: QuantizedCheckpoint
    reference: Checkpoint  # in the dtype that was quantized, experts one by one
    scheme: Scheme
    rounding: Rounding
    has_factors: bool  # norms may be divided by factors
    report: Report
    session: Session

    @classmethod
    def open(
        cls, path: Path, reference: str | Path | None, adapters: Sequence[Path], session: Session
    ) -> CompressedFolder:
        """Raises UsageProblem: no reference; UnsupportedInput: another program's codes; else as `quantize`."""
        if reference is None:
            raise UsageProblem(
                f"the weights in `{path}` are quantized, so they are compared with the model they were made from",
                hint="give `--reference MODEL`, the folder that was quantized",
            )
        stored = quantized_checkpoint(open_checkpoint(path))
        assert stored
        options = _recorded(path)
        scheme = _scheme(path, stored.stored.config[FIELD], options.get("scheme"))
        model, _ = opened(reference, adapters)
        dtype = str(options.get("dtype", "keep"))
        check_dtype(dtype)
        model = with_cast(model, dtype) if dtype != "keep" else model
        model = replace(model, tensors=dict(one_by_one(model.tensors, model.config)))
        report = session.new_report(path.name)
        report.reference, report.quantization = Path(reference).name, Quantization(preset=scheme.name)
        method = options.get("method")
        rounding = Rounding(
            method == "rtn",
            bool(options.get("calibrate")),
            method == "gptq",
            bool(scheme.integers and scheme.integers.symmetric),
        )
        return cls(path, stored, model, scheme, rounding, method == "awq", report, session)

    def checked(self, text: Path | None, limits: AccuracyLimits) -> Report:
        """The report, with all checks as they are made."""
        self.session.collect(self.report, self._checks(text, limits))
        return self.report

    def _checks(self, text: Path | None, limits: AccuracyLimits) -> Checks:
        yield audit_files(self.path)
        yield [audited("configuration", "config.json", list(self._configuration()), "as `quantize` writes it")]
        yield [audited("names", "config.json", list(self._names()), f"{len(self.stored.stored)} tensors")]
        kept = [name for name in self.reference if name in self.stored.stored and name not in self.stored.weights]
        same = [name for name in kept if name not in self._divided and name not in self._routers]
        passed = f"{len(same)} are the model's, bit for bit"
        passed += f", and {len(self._divided)} are divided by powers of two" if self._divided else ""
        passed += f", {len(self._routers)} multiplied with the same" if self._routers else ""
        yield [audited("kept tensors", "*.safetensors", list(self._kept(same)), passed)]
        yield [self._codes()]
        if not any(check.verdict == "fail" for check in self.report.checks):
            yield from self._cost(text, limits)

    def _configuration(self) -> Iterator[str]:
        found, wanted = self.stored.stored.config, self.reference.config
        for field in sorted({*found, *wanted} - {*FREE}):
            if json.dumps(found.get(field), sort_keys=True) != json.dumps(wanted.get(field), sort_keys=True):
                yield f"`{field}` is {short(found.get(field), 60)}, in the model {short(wanted.get(field), 60)}"
        stated = {str(one.get(name)) for one in (wanted,) for name in DTYPES if name in one}
        dtypes = {self.reference[name].dtype.name for name in self.stored.weights if name in self.reference}
        for name in DTYPES:
            if name in found and str(found[name]).removeprefix("torch.") not in {*stated, *dtypes}:
                yield f"`{name}` is {short(found[name], 60)}, which is not the dtype of the model"
        yield from self._settings(found[FIELD])

    def _settings(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """What is odd about the `quantization_config`, and the modules that it says are kept."""
        if self.scheme.format == RELEASED:
            if json.dumps(settings, sort_keys=True) != json.dumps(self.scheme.settings(()), sort_keys=True):
                yield f"`{FIELD}` is not that of gpt-oss as it is released"
            return
        ignore = kept_modules(settings)
        names = ignore is not None and all(isinstance(name, str) for name in ignore)
        expected = self.scheme.settings(ignore if ignore and names else ())
        if self.scheme.format not in BASE_FORMATS and isinstance(settings.get("version"), str):
            expected["version"] = settings["version"]
        same = json.dumps(settings, sort_keys=True) == json.dumps(expected, sort_keys=True)
        if ignore is None or not names or not same:
            yield f"`{FIELD}` is not that of `{self.scheme.name}`"
            return
        plain = {name: one for name, one in self.stored.stored.items() if name not in self.stored.weights}
        modules = {name.removesuffix(".weight") for name, one in plain.items() if is_matrix(name, one)}
        modules |= {HEAD} if not any(name.endswith(HEAD) for name in modules) else set()
        if missing := sorted(modules - {*ignore}):
            yield f"`ignore` lacks `{missing[0]}`, which is not quantized ({len(missing)} of such)"
        coded = {name.removesuffix(".weight") for name in self.stored.weights}
        if wrong := sorted(coded & {*ignore}):
            yield f"`ignore` has `{wrong[0]}`, which is quantized ({len(wrong)} of such)"
        elif others := sorted({*ignore} - modules):
            yield f"`ignore` has `{others[0]}`, a module that is not kept ({len(others)} of such)"
        elif len(ignore) != len({*ignore}):
            yield "`ignore` has a module twice"

    def _names(self) -> Iterator[str]:
        """Tensors that the scheme does not make of the model, or makes with another dtype or shape."""
        expected: dict[str, LazyTensor] = {}
        for name, tensor in self.reference.items():
            coded = self.stored.weights.get(name)
            is_coded = coded is not None and len(coded.shape) == len(tensor.shape)
            weight = Weight(name, tensor, SharedPeak([(name, tensor)]))
            expected |= self.scheme.parts(weight) if is_coded else {name: tensor}
        stored = self.stored.stored
        for name in sorted({*stored} ^ expected.keys()):
            yield f"`{name}` is not of the model" if name in stored else f"`{name}` of the model is missing"
        for name in sorted(expected.keys() & {*stored} - {*self.reference}):
            found, wanted = stored[name], expected[name]
            if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
                kinds = [f"{one.dtype.name} {list(one.shape)}" for one in (found, wanted)]
                yield f"`{name}` is {kinds[0]}, not {kinds[1]}"

    def _kept(self, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            found, wanted = self.stored.stored[name], self.reference[name]
            if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
                kinds = [f"{one.dtype.name} {list(one.shape)}" for one in (found, wanted)]
                yield f"`{name}` is {kinds[0]}, not {kinds[1]}"
                continue
            for start, stop in wanted.blocks():
                rows, others = (one.rows(start, stop).view(np.uint8) for one in (found, wanted))
                if not np.array_equal(rows, others):
                    odd = np.argwhere((rows != others).reshape(stop - start, -1))[0]
                    column = int(odd[1]) // wanted.dtype.itemsize
                    yield f"`{name}` differs from the model's at row {start + int(odd[0])}, column {column}"
                    break

    def _codes(self) -> Check:
        problems: list[str] = []
        assert self.report.quantization
        groups = lists_by_key((peak_of(name), name) for name in self.stored.weights if name in self.reference)
        for names in groups.values():
            problems += self._global_problems(names)
            for name in names:
                weight, original = self.stored.weights[name], self._with_factors(name)
                dtype = self.reference[name].dtype
                found = audit_weight(weight, original, dtype, self.scheme.weights, self.rounding)
                problems += found.problems
                row = {"graph": "*.safetensors", "tensor": name, "stored": self.scheme.format}
                self.report.quantization.weights.append({**row, "relative_error": found.relative_error})
        how = "every code with the errors of feedback" if self.rounding.feedback else "every code the nearest"
        passed = f"{len(self.stored.weights)} weights: every scale that of {self.scheme.name}, {how}"
        return replace(audited("codes", "*.safetensors", problems, passed), output=self.scheme.name)

    def _global_problems(self, names: Sequence[str]) -> list[str]:
        if self.scheme.weights["strategy"] != "tensor_group":
            return []
        originals = [self.reference[name] for name in names]
        peak = max(np.float32(peaks_of(one, *rows).max(initial=0)) for one in originals for rows in one.blocks())
        dtype = originals[0].dtype.numpy
        return [problem for name in names if (problem := global_problem(self.stored.weights[name], peak, dtype))]

    def _cost(self, text: Path | None, limits: AccuracyLimits) -> Checks:
        """Divergence, likeliest tokens and perplexity of the values of the codes; without rounding of activations."""
        section, config = self.report.quantization, self.reference.config
        assert section
        section.max_divergence, section.min_agreement = limits.divergence, limits.agreement
        if not is_model_folder(self.reference.path):
            self.report.notes.append("the cost was not measured: the reference is not a Hugging Face folder")
            return
        vocabulary = (config.get("text_config") or config).get("vocab_size")
        if not isinstance(vocabulary, int):
            return
        try:
            facts = ModelFacts(vocabulary, max_positions=length_of(config))
            sample = token_sample(text, self.reference.path, facts, self.session.selection.suite)
            graphs = [(self.scheme.name, self._runner(self.stored.plain.tensors))]
            if self.scheme.integers and not self.rounding.plain:
                graphs.append((PLAIN, self._runner(self._plainly_rounded)))
            if self.has_factors:
                graphs.append((FOLDED, self._runner(self._folded)))
            costs = measure_costs(graphs, self._runner(self.reference.tensors), sample)
        except LlmconvError as error:
            if limits.given or self.has_factors:
                yield [Check("cost", self.scheme.name, "", verdict="fail", detail=problem_of(error))]
            self.report.notes.append(f"the cost was not measured: {error.message}")
            return
        if self.has_factors:
            largest = costs.pop().summary(is_text=False).divergence["max"]
            wrong = (
                [] if largest <= SAME else [f"with its factors the model is another function, by {largest:.2g} nats"]
            )
            gated = sum((rows != 1).any() for _, rows in self._factors.values())
            passed = f"{len(self._divided)} norms, {gated} gated matrices and those behind them are the same function"
            yield [audited(FOLDED, "*.safetensors", wrong, passed)]
        section.cost, *others = [one.summary(is_text=sample.is_text) for one in costs]
        section.rounding = others[0] if others else None
        section.excess = difference(*costs) if others else None
        if self.scheme.activations:
            self.report.notes.append("the cost is that of the weights alone: activations are rounded by the engine")
        if limits.given or not sample.is_text:
            yield check_limits(section.cost, limits)
        else:
            yield check_gate(self.scheme.name, RELATIVE, section.cost, section.excess)

    @cached_property
    def _divided(self) -> Mapping[str, Array]:
        """Factors float32 by name of the vectors that are divided by them; powers of two, of which not all are 1."""
        found: dict[str, Array] = {}
        for name, wanted in self.reference.items() if self.has_factors else ():
            stored = self.stored.stored.get(name)
            if stored is None or len(wanted.shape) != 1 or (stored.dtype, stored.shape) != (wanted.dtype, wanted.shape):
                continue
            before, after = wanted.read().astype(np.float32), stored.read().astype(np.float32)
            with np.errstate(all="ignore"):
                factors = np.where(before == after, np.float32(1), before / after)
                is_power = np.isfinite(factors) & (np.frexp(factors)[0] == 0.5) & (after * factors == before)
            if is_power.all() and (factors != 1).any():
                found[name] = factors
        return found

    @cached_property
    def _routers(self) -> frozenset[str]:
        """The kept matrices whose columns are multiplied with the factors of a norm of their layer, exactly."""
        found = set()
        for name, wanted in self.reference.items() if self._divided else ():
            stored, layer = self.stored.stored.get(name), LAYER.search(name)
            plain = stored is not None and name not in self.stored.weights and len(wanted.shape) == MATRIX
            if not plain or not layer or stored is None or stored.shape != wanted.shape or stored.dtype != wanted.dtype:
                continue
            prefix, before = name[: layer.end()], wanted.read().astype(np.float32)
            after = stored.read().astype(np.float32)
            candidates = [one for norm, one in self._divided.items() if norm.startswith(prefix)]
            fitting = [one for one in candidates if len(one) == wanted.shape[1]]
            if not np.array_equal(before, after) and any(np.array_equal(before * one, after) for one in fitting):
                found.add(name)
        return frozenset(found)

    def _with_factors(self, name: str) -> LazyTensor:
        """The model's weight, its columns and rows multiplied with the factors that fit the codes best."""
        weight = self.reference[name]
        for factors in self._factors.get(name, ()):
            weight = multiplied(weight, factors) if (factors != 1).any() else weight
        return weight

    @cached_property
    def _factors(self) -> Mapping[str, tuple[Array, Array]]:
        """Factors of columns [K] and of rows [N, 1] by name of the weight, float32 powers of two.

        Those of columns are those of a norm of the layer, or the reciprocals of rows of a matrix of the same module.
        """
        if not self.has_factors:
            return {}
        layers = {name: found[0] for name in self.stored.weights if (found := LAYER.search(name))}
        prefixes = {name: name[: name.index(layer) + len(layer)] for name, layer in layers.items()}
        norms = lists_by_key(
            (prefix, norm) for norm in self._divided for prefix in {*prefixes.values()} if norm.startswith(prefix)
        )
        rows = {
            name: self._best(name, [self._divided[norm] for norm in norms.get(prefix, ())])[1]
            for name, prefix in prefixes.items()
        }
        modules = lists_by_key((_module(name), name) for name in rows)
        factors: dict[str, tuple[Array, Array]] = {}
        for name, prefix in prefixes.items():
            columns = [self._divided[norm] for norm in norms.get(prefix, ())]
            for other in modules[_module(name)]:
                whole = 1 / rows[other][:, 0] if other != name else np.ones(0, np.float32)
                half = len(whole) // 2  # of gate and up in one matrix
                columns += [whole, whole[:half], whole[half:]]
            factors[name] = self._best(name, columns)
        return factors

    def _best(self, name: str, candidates: Sequence[Array]) -> tuple[Array, Array]:
        """Of factors [K] of columns those with which a weight fits its codes best, and those of its rows [N, 1]."""
        weight, stored = self.reference[name], self.stored.weights[name]
        count, columns = weight.shape
        fitting = {one.tobytes(): one for one in candidates if one.shape == (columns,)}
        sample = slice(0, min(count, SAMPLE))
        rows, values = (
            weight.rows(sample.start, sample.stop).astype(np.float32),
            stored.values(sample.start, sample.stop),
        )

        def error(factors: Array) -> float:
            exact = rows * factors
            exact *= _row_factors(values, exact)
            return float(((values - exact) ** 2).sum() / max((exact**2).sum(), 1e-30))

        best = min([np.ones(columns, np.float32), *fitting.values()], key=error)
        made = np.ones((count, 1), np.float32)
        for start, stop in weight.blocks():
            exact = weight.rows(start, stop).astype(np.float32) * best
            made[start:stop] = _row_factors(stored.values(start, stop), exact)
        return best, made

    @cached_property
    def _folded(self) -> Mapping[str, LazyTensor]:
        """The model with its factors, before it is rounded."""
        coded = {name: self._with_factors(name) for name in self.stored.weights}
        return {
            **self.reference.tensors,
            **{name: self.stored.stored[name] for name in (*self._divided, *self._routers)},
            **{name: one for name, one in coded.items() if name in self.reference.tensors},
        }

    @cached_property
    def _plainly_rounded(self) -> Mapping[str, LazyTensor]:
        """The values of the same weights with codes of the extreme values."""
        plain = scheme_of(self.scheme.name, IntegerOptions(self.scheme.weights["group_size"], "rtn"))
        kept = ["^" + re.escape(name) + "$" for name in self.reference if name not in self.stored.weights]
        found = quantized_checkpoint(plan_quantized(self.reference, plain, kept)[1])
        assert found
        return found.plain.tensors

    def _runner(self, weights: Mapping[str, LazyTensor]) -> Runner:
        """The model in float32 with these weights, layer by layer where it can be loaded so."""
        from llmconv.export.families import extra_inputs_of  # noqa: PLC0415 - the table alone
        from llmconv.runtime.eager.runner import EagerRunner  # noqa: PLC0415 - torch
        from llmconv.runtime.low_memory.runner import StreamedRunner  # noqa: PLC0415

        folder = self.reference.path
        options: dict[str, Any] = {"weights": weights, "extra_inputs": extra_inputs_of(folder)}
        with suppress(UnsupportedInput):
            return StreamedRunner(folder, **options)
        return EagerRunner(folder, **options)


SAMPLE = 64  # rows by which the factors of a matrix are told
MATRIX = 2


def _module(name: str) -> str:
    """The module that has a matrix: `…mlp` of `…mlp.up_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _row_factors(values: Array, exact: Array) -> Array:
    """The powers of two [N, 1] that are nearest to values / exact, row by row; 1 where that is nothing."""
    both, squares = (values * exact).sum(axis=1, keepdims=True), (exact * exact).sum(axis=1, keepdims=True)
    share = np.divide(both, squares, out=np.ones_like(squares), where=(squares > 0) & (both > 0))
    found: Array = np.exp2(np.rint(np.log2(share))).astype(np.float32)
    return found


def _recorded(folder: Path) -> dict[str, Any]:
    """The options of the last `quantize` in the manifest; empty without one."""
    steps = [done for done in read_manifest(folder).steps if done.get("command") == COMMAND]
    options = steps[-1].get("options") if steps else None
    return options if isinstance(options, dict) else {}


def _scheme(folder: Path, settings: Mapping[str, Any], recorded: object) -> Scheme:
    """The scheme of a `quantization_config`; InputRefused for one that `quantize` does not write.

    AutoAWQ's says nothing of zero points, so that of the `recorded` name comes first.
    """
    form = settings.get("quant_method")
    if form == RELEASED:
        return released(SCHEMES["mxfp4a16" if recorded == "mxfp4a16" else "mxfp4"])
    groups = settings.get("config_groups")
    group = groups.get("group_0") if isinstance(groups, Mapping) else None
    fields = group.get("weights") if isinstance(group, Mapping) else None
    size = (
        settings.get("group_size")
        if form in BASE_FORMATS
        else fields.get("group_size")
        if isinstance(fields, Mapping)
        else None
    )
    for scheme in sorted(SCHEMES.values(), key=lambda one: one.name != recorded):
        older = str(form) if form in BASE_FORMATS else None
        options = IntegerOptions(size, base_format=older) if scheme.integers else IntegerOptions()
        if older and not scheme.integers:
            continue
        with suppress(UsageProblem):
            found = scheme_of(scheme.name, options)
            if older and settings.get("group_size") == found.weights["group_size"]:
                return found
            if not isinstance(group, Mapping) or len(groups or ()) != 1:
                continue
            same = fields == found.weights and (group.get("input_activations") or None) == found.activations
            if same and settings.get("format") == found.format:
                return found
    raise InputRefused(
        f"the weights in `{folder}` are quantized in a way that `llmconv quantize` does not write",
        hint="its schemes are " + ", ".join(SCHEMES) + "; export the folder, and verify its graphs",
    )
