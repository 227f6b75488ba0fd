"""`export --lora-inputs`: one set of graphs computes the base, and the model with any LoRA adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import merge_lora, onnx_adapter
from llmconv.convert.adapter_file import lora_factors
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.generation import TextModel
from llmconv.runtime import OrtRunner, default_positions
from llmconv.verify import verify
from tests.builders.lora_inputs import peft_tokens, save_lora
from tests.builders.talking import save_letters
from tests.convert.adapters.test_other_tools import FIXTURES, base_of

PROMPTS = [[20, 30, 40, 50, 60], [9, 8], [33, 60, 61, 62, 63, 64, 65, 66]]


@pytest.fixture(scope="module")
def adaptable(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`talking`, with graphs that have inputs for factors; do not write into it."""
    return _exported(talking, tmp_path_factory.mktemp("adaptable") / "model", lora_inputs="all-linear")


@pytest.fixture(scope="module")
def adapter(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA with a rank and an alpha of its own for some modules."""
    patterns: dict[str, Any] = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 9}}
    return save_lora(talking, tmp_path_factory.mktemp("adapter"), use_rslora=True, **patterns)


def _exported(source: Path, folder: Path, **options: Any) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.onnx", "llmconv.json"))
    export(folder, **options)
    return folder


def tokens_of(model: TextModel, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Twelve new tokens of every prompt, in one batch."""
    found: list[list[int]] = [[] for _ in prompts]
    for piece in model.stream(prompts, model.defaults.but(max_new_tokens=12, eos_token_id=())):
        found[piece.index] += [] if piece.token is None else [piece.token]
    return found


def logits_of(runner: OrtRunner) -> np.ndarray[Any, Any]:
    ids = np.array([[5, 6, 7, 8]])
    mask = np.ones_like(ids)
    return runner.prefill(ids, mask, default_positions(mask, ids.shape[1])).logits


@pytest.mark.slow
def test_layers_are_replicated(adaptable: Path) -> None:
    exported = export(adaptable, lora_inputs="all-linear", dry_run=True)
    assert exported.traced_layers < exported.num_layers


@pytest.mark.slow
def test_without_an_adapter_the_bits_are_those_of_the_base(talking: Path, adaptable: Path) -> None:
    expected = logits_of(OrtRunner.from_folder(talking))
    np.testing.assert_array_equal(logits_of(OrtRunner.from_folder(adaptable)), expected)


@pytest.mark.slow
def test_texts_continue_as_with_peft(adaptable: Path, adapter: Path) -> None:
    expected = peft_tokens(adaptable, adapter, PROMPTS)
    assert tokens_of(TextModel.open(adaptable, adapter=adapter)) == expected
    assert tokens_of(TextModel.open(adaptable)) != expected


@pytest.mark.slow
def test_adapters_of_several_ranks_share_one_set_of_graphs(adaptable: Path, adapter: Path, tmp_path: Path) -> None:
    other = save_lora(adaptable, tmp_path / "other", seed=5, r=7, target_modules=["v_proj", "gate_proj"])
    base = TextModel.open(adaptable)
    before = tokens_of(base)
    first, second = base.with_adapter(adapter), base.with_adapter(other)
    for model, path in ((first, adapter), (second, other), (second.with_adapter(adapter), adapter)):
        assert tokens_of(model) == peft_tokens(adaptable, path, PROMPTS)
    assert tokens_of(base) == before


@pytest.mark.slow
def test_a_file_has_the_same_factors_and_onnxruntime_itself_reads_it(
    adaptable: Path, adapter: Path, tmp_path: Path
) -> None:
    file = tmp_path / "style.onnx_adapter"
    made = onnx_adapter(adaptable, adapter, file)
    assert made.nbytes == file.stat().st_size and "model.layers.0.self_attn.q_proj" in made.modules
    expected = logits_of(OrtRunner.from_folder(adaptable).with_factors(lora_factors(adaptable, adapter)))
    as_written = TextModel.open(adaptable, adapter=file, form="file").runner
    np.testing.assert_array_equal(logits_of(as_written), expected)  # type: ignore[arg-type]
    np.testing.assert_array_equal(_stock_logits(adaptable / "prefill.onnx", file), expected)


def _stock_logits(graph: Path, file: Path) -> np.ndarray[Any, Any]:
    """Logits by onnxruntime's own adapter API."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(graph, options, ["CPUExecutionProvider"])
    adapter: Any = ort.LoraAdapter()
    run = ort.RunOptions()
    adapter.Load(str(file))
    run.add_active_adapter(adapter)
    ids = np.array([[5, 6, 7, 8]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    for port in session.get_inputs():
        if port.name.startswith("past_"):
            feeds[port.name] = np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32)
    found: np.ndarray[Any, Any] = session.run(["logits"], feeds, run)[0]
    return found


@pytest.mark.slow
def test_adapters_of_other_programs_are_factors_too(tmp_path: Path) -> None:
    case = "mlx/llama_lora"
    base = _exported(base_of(case), tmp_path / "base", lora_inputs="all-linear")
    merge_lora(base_of(case), [FIXTURES / case], tmp_path / "merged")
    export(tmp_path / "merged")
    runner = TextModel.open(save_letters(base), adapter=FIXTURES / case).runner
    expected = logits_of(OrtRunner.from_folder(tmp_path / "merged"))
    np.testing.assert_allclose(logits_of(runner), expected, atol=1e-4)  # type: ignore[arg-type]


def test_graphs_without_inputs_refuse_an_adapter(talking: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="no inputs for LoRA factors") as refusal:
        TextModel.open(talking, adapter=adapter)
    assert "--lora-inputs all-linear" in refusal.value.hint
    with pytest.raises(InputRefused, match="no inputs for LoRA factors"):
        TextModel.open(talking).with_adapter(adapter)
    with pytest.raises(InputRefused, match="no graphs with inputs for LoRA factors"):
        onnx_adapter(talking, adapter, tmp_path / "x.onnx_adapter")
    assert not list(tmp_path.iterdir())


REFUSED: list[tuple[dict[str, Any], type[LlmconvError], str]] = [
    ({"use_dora": True}, UnsupportedInput, "is not a product of two factors"),
    ({"target_modules": ["embed_tokens"]}, InputRefused, "no LoRA inputs for `model.embed_tokens`"),
    ({"target_modules": ["lm_head"]}, InputRefused, "no LoRA inputs for `lm_head`"),
    ({"modules_to_save": ["norm"]}, UnsupportedInput, r"replaces `model\.layers\.0"),
    ({"init_lora_weights": "pissa"}, UnsupportedInput, "changed the base"),
]


@pytest.mark.slow_rows("settings2-InputRefused-no LoRA inputs for `lm_head`")
@pytest.mark.parametrize(("settings", "error", "message"), REFUSED)
def test_what_factors_cannot_express_is_refused(
    adaptable: Path, tmp_path: Path, settings: dict[str, Any], error: type[LlmconvError], message: str
) -> None:
    odd = save_lora(adaptable, tmp_path / "odd", **settings)
    with pytest.raises(error, match=message) as refusal:
        TextModel.open(adaptable, adapter=odd)
    assert refusal.value.hint


@pytest.mark.slow
def test_a_target_that_the_graphs_lack_is_refused(talking: Path, adapter: Path, tmp_path: Path) -> None:
    folder = _exported(talking, tmp_path / "model", lora_inputs="q_proj,v_proj")
    with pytest.raises(InputRefused, match=r"no LoRA inputs for `model\.layers\.0\.mlp\.down_proj`") as refusal:
        TextModel.open(folder, adapter=adapter)
    assert "some for q_proj, v_proj" in refusal.value.hint
    own = save_lora(talking, tmp_path / "own", target_modules=["q_proj"])
    assert tokens_of(TextModel.open(folder, adapter=own)) == peft_tokens(folder, own, PROMPTS)


def test_an_adapter_of_another_model_is_refused(
    adaptable: Path, talking_as: Callable[[str], Path], tmp_path: Path
) -> None:
    other = save_lora(talking_as("gpt2"), tmp_path / "other", target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(MalformedInput):
        TextModel.open(adaptable, adapter=other)
    wider = {f"model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones((8, 8), np.float32) for part in "AB"}
    with pytest.raises(InputRefused, match="shape mismatch for the LoRA factors"):
        OrtRunner.from_folder(adaptable).with_factors(wider)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora_inputs": "q_porj"}, InputRefused, "no linear layer of that name"),
        ({"lora_inputs": "q_proj,,v_proj"}, UsageProblem, "empty name"),
        ({"lora_inputs": "all-linear", "precision": "float16"}, UsageProblem, "without `--precision float16`"),
        ({"lora_inputs": "all-linear", "stages": 2}, UsageProblem, "without `--stages`"),
        ({"lora_inputs": "all-linear", "layout": "optimum"}, UsageProblem, "--lora-inputs"),
    ],
)
def test_impossible_requests_are_refused(
    talking: Path, options: dict[str, Any], error: type[LlmconvError], message: str
) -> None:
    with pytest.raises(error, match=message):
        export(talking, dry_run=True, **options)


@pytest.mark.parametrize(
    "kind", [{"cache": "shared-buffer", "target": "ort-cpu"}, {"shapes": "static", "max_seq_len": 64}]
)
@pytest.mark.slow
def test_every_kind_of_cache_takes_factors(talking: Path, adapter: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    folder = _exported(talking, tmp_path / "model", lora_inputs="all-linear", **kind)
    base = TextModel.open(folder)
    alone = [tokens_of(base, [prompt])[0] for prompt in PROMPTS]
    tuned = base.with_adapter(adapter)
    assert [tokens_of(tuned, [prompt])[0] for prompt in PROMPTS] == peft_tokens(folder, adapter, PROMPTS)
    assert [tokens_of(base, [prompt])[0] for prompt in PROMPTS] == alone


@pytest.mark.slow
def test_verify_proves_the_base_and_the_adapter(adaptable: Path, adapter: Path) -> None:
    for method in ("whole", "induction"):
        assert verify(adaptable, record=False, method=method).verdict == "pass"
    assert verify(adaptable, adapter=adapter).verdict == "pass"


@pytest.mark.slow
def test_verify_finds_a_graph_that_reads_the_factor_of_another_layer(
    adaptable: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adaptable, tmp_path / "model"))
    one, other = (f"model.layers.{layer}.mlp.down_proj.lora_B.weight" for layer in (1, 2))
    exchanged = {one: other, other: one}
    for graph in ("prefill.onnx", "decode.onnx"):
        model = onnx.load(folder / graph, load_external_data=False)
        for node in model.graph.node:
            node.input[:] = [exchanged.get(name, name) for name in node.input]
        onnx.save(model, folder / graph)
    options: dict[str, Any] = {"record": False, "allow_changed": True, "scenario": ["prefill, 7 tokens"]}
    base = verify(folder, **options)
    assert base.verdict == "pass" and "faults of LoRA factors (`--adapter` runs them)" in base.unseen
    assert verify(folder, adapter=adapter, **options).verdict == "fail"


def test_verify_names_the_factors_that_an_adapter_does_not_have(adaptable: Path, talking: Path, tmp_path: Path) -> None:
    adapter = save_lora(talking, tmp_path / "adapter", target_modules=["q_proj"])
    report = verify(adaptable, adapter=adapter, scenario=["left padding"])
    assert report.verdict == "pass"
    assert [one for one in report.unseen if one.startswith("faults of LoRA factors of ") and "down_proj" in one]


def test_verify_refuses_graphs_without_inputs_and_other_adapters(talking: Path, adapter: Path, adaptable: Path) -> None:
    with pytest.raises(InputRefused, match="no inputs for LoRA factors"):
        verify(talking, adapter=adapter)
    with pytest.raises(UsageProblem, match="compares with PEFT"):
        verify(adaptable, adapter=FIXTURES / "mlx" / "llama_lora")
    with pytest.raises(UsageProblem, match="runs the whole model"):
        verify(adaptable, adapter=adapter, method="structure")


def test_the_command_writes_a_file_and_refuses_another_name(adaptable: Path, adapter: Path, tmp_path: Path) -> None:
    call = ["onnx-adapter", str(adaptable), str(adapter), "-o"]
    wrong = CliRunner().invoke(main, [*call, str(tmp_path / "x.bin")])
    assert wrong.exit_code == 2 and "x.onnx_adapter" in wrong.stderr
    file = tmp_path / "x.onnx_adapter"
    assert CliRunner().invoke(main, [*call, str(file)]).exit_code == 0
    again = CliRunner().invoke(main, [*call, str(file)])
    assert again.exit_code == 3 and "--overwrite" in again.stderr
    text = CliRunner().invoke(
        main, ["generate", str(adaptable), "abc", "--adapter", str(file), "--max-new-tokens", "4"]
    )
    assert text.exit_code == 0 and text.stdout.strip()
