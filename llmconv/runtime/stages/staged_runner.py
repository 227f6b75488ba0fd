"""StagedRunner: runs a model over stages, of which some or all are in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.progress import warn
from llmconv.runtime.array_cache import CacheEdit, RemoteCache
from llmconv.runtime.extra_inputs import ModelCall
from llmconv.runtime.extra_values import ExtraValues
from llmconv.runtime.onnxruntime.extra_feeds import extra_names
from llmconv.runtime.onnxruntime.graph import step_of
from llmconv.runtime.onnxruntime.runner import after_prefix
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.placed_embeddings import PlacedEmbeddings
from llmconv.runtime.runner import Cache, Extras, Runner, Step, refuse_placed
from llmconv.runtime.stages.connection import Address
from llmconv.runtime.stages.local_stage import LocalStage, is_cuttable
from llmconv.runtime.stages.ray_stages import ON_RAY, RayStages
from llmconv.runtime.stages.remote_stage import SILENCE, RemoteStage
from llmconv.runtime.stages.staged_export import StagedExport
from llmconv.tensors import Array

OPTION = "--stage-at"


@dataclass(frozen=True)
class StageAddresses:
    """Where the stages of a model run that do not run in this process.

    Attributes:
        addresses: HOST:PORT or N=HOST:PORT of each, see `llmconv serve-stage`; with `ray`, all others run in actors
            of a Ray cluster.
        timeout: seconds without a heartbeat after which a stage is lost.
    """

    addresses: Sequence[str]
    timeout: float = SILENCE


@dataclass(frozen=True)
class StagedCache:
    """The cache of a model in stages, see `RemoteCache`: each part is where its stage is.

    Attributes:
        parts: those of the stages, in order.
        length: number of tokens, padding included.
    """

    parts: Sequence[Cache]
    length: int

    @property
    def is_lost(self) -> bool:
        """Whether a stage no longer has its part."""
        return any(isinstance(part, RemoteCache) and part.is_lost for part in self.parts)

    @property
    def is_cuttable(self) -> bool:
        """See `can_be_cut`."""
        return all(part.is_cuttable if isinstance(part, RemoteCache) else is_cuttable(part) for part in self.parts)

    def edited(self, edit: CacheEdit) -> StagedCache:
        """The cache with every part changed."""
        length = edit.numbers[0] if edit.kind == "cut" else self.length
        return StagedCache([edit.applied(part) for part in self.parts], length)

    def arrays(self) -> Mapping[str, Array]:
        """The arrays of all parts.

        Raises:
            StageFailed: a part is in another process.
        """
        return {name: array for part in self.parts for name, array in part.arrays().items()}


class StagedRunner(Runner):
    """Runs stages one after the other; only hidden states, mask and positions are passed on.

    Args:
        stages: all stages, in order.
        export: the stages of the folder.
        opened: what is to be closed with the runner, such as the stages.
    """

    def __init__(
        self, stages: Sequence[LocalStage | RemoteStage], export: StagedExport, opened: ExitStack | None = None
    ) -> None:
        self._stages, self._opened = stages, opened or ExitStack()
        self._prefix = export.entries["prefill"].prefix
        last = export.outputs("decode", export.count)
        self._result_names = ["logits"] if "logits" in last else ["tokens", "scores"]

    @classmethod
    def open(cls, folder: Path, at: StageAddresses, settings: SessionSettings | None = None) -> StagedRunner:
        """The stages of a folder: those at the given addresses, and the others in this process.

        Args:
            folder: has llmconv.json, and the files of the stages that run here.
            at: where the other stages run.
            settings: session settings of the stages that run here.

        Raises:
            InputRefused: the graphs are not in stages, or files of a stage that runs here are missing.
            StageFailed: no stage answers at an address, or it serves another model or export.
            UnsupportedInput: the graphs have inputs besides tokens, mask and positions.
            UsageProblem: an invalid address, or two addresses of one stage.
        """
        export = StagedExport.read(folder)
        _refuse_extras(export)
        if not export.knows_weights:
            warn(NO_CHECKSUMS)
        stages: dict[int, LocalStage | RemoteStage] = {}
        with ExitStack() as opened:
            for text in at.addresses:
                if text != ON_RAY:
                    _connect(text, export, at.timeout, stages, opened)
            missing = [number for number in range(1, export.count + 1) if number not in stages]
            if ON_RAY in at.addresses and missing:
                actors = opened.enter_context(closing(RayStages(export, missing, settings)))
                for text in actors.addresses:
                    _connect(text, export, at.timeout, stages, opened)
            for number in [number for number in missing if number not in stages]:
                stages[number] = LocalStage(export, number, settings)
                opened.callback(stages[number].close)
            return cls([stages[number] for number in range(1, export.count + 1)], export, opened.pop_all())

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens of the prefill graph's tuned prefix."""
        return self._prefix.length if self._prefix else 0

    def prefill(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
        placed: PlacedEmbeddings | None = None,
    ) -> Step:
        """Runs the prompt; see `Runner.prefill`."""
        refuse_placed(placed)
        return self._run("prefill", ModelCall(input_ids, attention_mask, position_ids), past, extras)

    def decode(
        self,
        input_ids: Array,
        attention_mask: Array,
        position_ids: Array,
        past: Cache | None = None,
        extras: Extras | None = None,
    ) -> Step:
        """Runs a step; see `Runner.decode`."""
        use = "prefill" if self._prefix and past is None else "decode"
        return self._run(use, ModelCall(input_ids, attention_mask, position_ids), past, extras)

    def _run(self, use: str, call: ModelCall, past: Cache | None, extras: Extras | None) -> Step:
        if self._prefix and past is not None:
            call = ModelCall(call.input_ids, *after_prefix(call.attention_mask, call.position_ids, self._prefix))
        values = {name: array.astype("int64", copy=False) for name, array in vars(call).items()}
        values |= ExtraValues(given=extras or {}).of(call)
        parts = past.parts if isinstance(past, StagedCache) else [past] * len(self._stages)
        present = []
        for stage, part in zip(self._stages, parts, strict=True):
            step = stage.run(use, values, part)
            values.update(step.results)
            present.append(step.present)
        results = [values[name] for name in self._result_names]
        return step_of(self._result_names, results, StagedCache(present, max(part.length for part in present)))

    def close(self) -> None:
        """Closes the connections to the stages."""
        self._opened.close()


NO_CHECKSUMS = (
    "llmconv.json has no checksums of the weights, so stages of another model of the same shapes are not recognized: "
    "`llmconv export --stages K -o OUT` records them"
)


def _refuse_extras(export: StagedExport) -> None:
    """Refuses inputs that only some families have: a stage takes tokens, mask, positions and hidden states."""
    for use in export.entries:
        names = [name for number in range(1, export.count + 1) for name in export.inputs(use, number)]
        passed = {name for number in range(1, export.count + 1) for name in export.outputs(use, number)}
        if extra := [name for name in extra_names(dict.fromkeys(names, ())) if name not in passed]:
            raise UnsupportedInput(
                f"stages in other processes do not take the input `{extra[0]}` of this family",
                hint=f"leave out `{OPTION}`: in one process they do",
            )


def _connect(
    text: str, export: StagedExport, silence: float, stages: dict[int, LocalStage | RemoteStage], opened: ExitStack
) -> None:
    """Connects to the stage at an address and adds it to `stages`, and what closes it to `opened`."""
    before, equals, address = text.rpartition("=")
    wanted = 0
    if equals:
        with suppress(ValueError):
            wanted = int(before)
        if not 1 <= wanted <= export.count:
            raise UsageProblem(f"`{OPTION} {text}`: there is no stage `{before}`", hint=_numbered(export))
    stage = RemoteStage(Address.parse(address, OPTION), export, silence)
    problem = ""
    if wanted not in (0, stage.number):
        problem = f"`{OPTION} {text}`: that is stage {stage.number}"
    elif stage.number in stages:
        problem = f"two addresses have stage {stage.number}"
    if problem:
        stage.close()
        raise UsageProblem(problem, hint=f"give the address of each stage once; {_numbered(export)}")
    stages[stage.number] = stage
    opened.callback(stage.close)


def _numbered(export: StagedExport) -> str:
    return f"the stages of `{export.folder}` are numbered from 1 to {export.count}"
