"""`--method gptq`: the codes of a model, layer by layer on inputs that the rounded layers before make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.export.quantization import sequential_rounding
from llmconv.tensors import Array
from llmconv.verify import verify
from tests.builders.talking import save_letters
from tools.tiny_models import depth, save_tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random letters, enough for matrices of 128 columns."""
    letters = np.random.default_rng(0).choice(list("abcdefghij klmno"), 3000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(letters))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(model_type)` is a tiny model with a tokenizer."""
    made: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type) / "model"
            save_tiny(model_type, made[model_type], depth(model_type))
            save_letters(made[model_type])
        return made[model_type]

    return folder


@pytest.fixture(scope="module")
def made(model: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made(model_type, method)` is a folder with 4-bit weights; do not write into it."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(model_type: str, method: str = "gptq") -> Path:
        key = model_type, method
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("made") / "out"
            export(model(model_type), folders[key], unified=True, quant="int4", calibrate=text, method=method)
        return folders[key]

    return folder


def codes(folder: Path) -> dict[str, Array]:
    stored = load_file(folder / "quantized.safetensors")
    return {name: tensor for name, tensor in stored.items() if not name.endswith(".importance")}


@pytest.mark.one_row_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_graphs_equal_the_model_of_their_codes(
    model_type: str, model: Callable[[str], Path], made: Callable[..., Path]
) -> None:
    report = verify(made(model_type), reference=model(model_type), scenario=["prefill, 7 tokens"])
    assert report.verdict == "pass", report.closing_lines()


@pytest.mark.slow
def test_codes_of_every_layer_differ_from_those_of_the_search(made: Callable[..., Path]) -> None:
    one, other = codes(made("llama")), codes(made("llama", "search"))
    assert one.keys() == other.keys()
    names = [name for name in one if name.endswith(".codes") and ".layers." in name]
    assert names and not any(np.array_equal(one[name], other[name]) for name in names)


@pytest.mark.slow
def test_all_other_tensors_are_those_of_the_search(made: Callable[..., Path]) -> None:
    one, other = codes(made("llama")), codes(made("llama", "search"))
    others = [name for name in one if "norm" in name or "embed" in name]
    assert others and all(np.array_equal(one[name], other[name]) for name in others)


@pytest.mark.slow
def test_later_layers_see_what_rounded_layers_make(
    model: Callable[[str], Path], made: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = sequential_rounding._SequentialRun.__init__

    def forgetful(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._values = _Forgetful()

    monkeypatch.setattr(sequential_rounding._SequentialRun, "__init__", forgetful)
    export(model("llama"), tmp_path / "out", unified=True, quant="int4", calibrate=text, method="gptq")
    one, other = codes(made("llama")), codes(tmp_path / "out")
    same = {name for name in one if name.endswith(".codes") and np.array_equal(one[name], other[name])}
    first, last = "model.layers.0.self_attn.q_proj.weight.codes", "model.layers.3.mlp.down_proj.weight.codes"
    assert first in same and last not in same


class _Forgetful(dict[str, Array]):
    """Keeps nothing, so that every piece runs with the weights of the model."""

    def __setitem__(self, name: str, values: Array) -> None:
        pass


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_threads(
    model: Callable[[str], Path], made: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ort.SessionOptions

    def single() -> ort.SessionOptions:
        made = options()
        made.intra_op_num_threads = 1
        return made

    monkeypatch.setattr(ort, "SessionOptions", single)
    export(model("llama"), tmp_path / "out", unified=True, quant="int4", calibrate=text, method="gptq")
    assert (tmp_path / "out/quantized.safetensors").read_bytes() == (
        made("llama") / "quantized.safetensors"
    ).read_bytes()


def test_nothing_is_left_beside_the_output(model: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    export(model("llama"), tmp_path / "out", unified=True, quant="int4", calibrate=text, method="gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_short_text_is_refused(model: Callable[[str], Path], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh " * 60)
    with pytest.raises(InputRefused, match=r"the text has 540 tokens; `--method gptq` needs 1,536 for 96 columns"):
        export(model("llama"), tmp_path / "out", quant="int4", calibrate=short, method="gptq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"quant": "int4"}, "needs a text"), ({"quant": "a8w8"}, "4 bits"), ({"quant": "int8"}, "4 bits")],
    ids=str,
)
def test_what_it_cannot_work_on_is_refused(
    model: Callable[[str], Path], text: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    calibrate = None if said == "needs a text" else text
    with pytest.raises(UsageProblem, match=said):
        export(model("llama"), tmp_path / "out", method="gptq", calibrate=calibrate, **options)
