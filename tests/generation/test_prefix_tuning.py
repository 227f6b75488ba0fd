"""`--prefix-tuning`: the cache begins with a tuned prefix, and the tokens are those of PEFT's own generate."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from llmconv.cli import main
from llmconv.convert import to_hf
from llmconv.errors import InputRefused, LlmconvError, UnsupportedInput, UsageProblem
from llmconv.export import export
from llmconv.generation import Conversation, SharedPrefix, TextModel, generate
from llmconv.runtime import default_positions, extra_inputs
from llmconv.runtime.onnxruntime.runner import OrtRunner
from llmconv.runtime.prefix import open_prefix, with_prefix
from tests.builders.prefix_models import LENGTH, save_adapter
from tests.builders.talking import save_letters
from tests.conftest import save_tiny
from tools.state_configs import STATE_CONFIGS

PADDLE = Path(__file__).parents[1] / "fixtures/paddle/prefix_llama_bf16"
START = [20, 30, 40]
PROMPTS = [[*START, 50, 60, 70], [*START, 9], [*START, 8, 21, 33, 60, 61, 62, 63]]
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def adapter(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random prefix of the tiny Llama, which `talking` also is."""
    return save_adapter(tiny("llama"), tmp_path_factory.mktemp("adapter"), "PrefixTuning")


def tokens_of(model: TextModel, prompts: Sequence[Sequence[int]], cache: Any = None, **fields: Any) -> list[list[int]]:
    """New tokens of every prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    settings = model.defaults.but(**{"max_new_tokens": 16, "eos_token_id": (15, 10, 64, 2), **fields})
    for piece in model.stream(prompts, settings, cache):
        found[piece.index] += [] if piece.token is None else [piece.token]
    return found


def peft_tokens(base: Path, adapter: Path, prompt: Sequence[int], **fields: Any) -> list[int]:
    """New tokens of PEFT's own generate, end token included."""
    import peft  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
        ids = torch.tensor([list(prompt)])
        given = {"max_new_tokens": 16, "eos_token_id": [15, 10, 64, 2], "do_sample": False, **fields}
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
    return [int(token) for token in found[0, -(found.shape[1] - len(prompt)) :]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_every_prompt_of_a_batch_continues_as_with_peft(talking: Path, adapter: Path, backend: str) -> None:
    model = TextModel.open(talking, backend=backend, prefix_tuning=adapter)
    expected = [peft_tokens(talking, adapter, prompt) for prompt in PROMPTS]
    assert tokens_of(model, PROMPTS) == expected
    assert tokens_of(TextModel.open(talking, backend=backend), PROMPTS) != expected


@pytest.mark.quick_rows("PromptTuning")
@pytest.mark.parametrize("kind", ["PromptTuning", "PromptEncoder"])
def test_a_soft_prompt_runs_on_the_eager_model(talking: Path, tiny: Tiny, tmp_path: Path, kind: str) -> None:
    soft = save_adapter(tiny("llama"), tmp_path, kind)
    model = TextModel.open(talking, backend="torch", prefix_tuning=soft)
    assert tokens_of(model, PROMPTS) == [peft_tokens(talking, soft, prompt) for prompt in PROMPTS]


def test_graphs_that_take_tokens_refuse_a_soft_prompt(talking: Path, tiny: Tiny, tmp_path: Path) -> None:
    soft = save_adapter(tiny("llama"), tmp_path, "PromptTuning")
    with pytest.raises(UsageProblem, match="the graphs take tokens") as refusal:
        TextModel.open(talking, prefix_tuning=soft)
    assert "export MODEL --prefix PATH" in refusal.value.hint


def test_caches_of_shared_starts_and_of_chats_contain_the_prefix_once(talking: Path, adapter: Path) -> None:
    model = TextModel.open(talking, prefix_tuning=adapter)
    alone = [tokens_of(model, [prompt])[0] for prompt in PROMPTS]
    assert tokens_of(model, PROMPTS, SharedPrefix(START)) == alone
    conversation = Conversation()
    for prompt in ([*START, 7], [*START, 7, 8, 9], [*START, 7, 5]):
        assert tokens_of(model, [prompt], conversation) == tokens_of(model, [prompt])


@pytest.mark.slow
def test_beams_continue_the_prefix(talking: Path, adapter: Path) -> None:
    model = TextModel.open(talking, prefix_tuning=adapter)
    expected = [peft_tokens(talking, adapter, prompt, num_beams=3) for prompt in PROMPTS[:2]]
    assert tokens_of(model, PROMPTS[:2], num_beams=3) == expected


@pytest.mark.slow
def test_logits_equal_those_of_graphs_with_the_prefix_in_them_bit_for_bit(
    talking: Path, adapter: Path, tmp_path: Path
) -> None:
    built = _exported(talking, tmp_path / "built", prefix=adapter)
    ids, mask = np.array([PROMPTS[0]]), np.ones((1, len(PROMPTS[0])), dtype=np.int64)
    call = ids, mask, default_positions(mask, ids.shape[1])
    given = with_prefix(OrtRunner.from_folder(talking), open_prefix(adapter)).prefill(*call)
    np.testing.assert_array_equal(given.logits, OrtRunner.from_folder(built).prefill(*call).logits)
    assert given.present.length == LENGTH + len(PROMPTS[0])


def test_a_long_prompt_after_a_prefix_in_the_graph(
    talking: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = OrtRunner.from_folder(_exported(talking, tmp_path / "built", prefix=adapter))
    ids, mask = np.array([PROMPTS[0]]), np.ones((1, len(PROMPTS[0])), dtype=np.int64)
    call = ids, mask, default_positions(mask, ids.shape[1])
    monkeypatch.setattr(extra_inputs, "PART", 2)
    last = runner.prefill(*call, last_only=True)
    np.testing.assert_allclose(last.logits[:, -1], runner.prefill(*call).logits[:, -1], atol=1e-5)
    assert last.present.length == LENGTH + len(PROMPTS[0])


KINDS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2},
    "shared buffer": {"cache": "shared-buffer"},
    "static": {"shapes": "static", "batch_size": 4, "max_seq_len": 64, "prompt_len": 8},
    "ort-cpu": {"target": "ort-cpu", "cache": "shared-buffer"},
    "optimum": {"layout": "optimum"},
}


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph_continues_the_prefix(talking: Path, adapter: Path, tmp_path: Path, kind: str) -> None:
    folder = _exported(talking, tmp_path / "model", **KINDS[kind])
    usual = TextModel.open(talking, prefix_tuning=adapter)
    model = TextModel.open(folder, prefix_tuning=adapter)
    assert tokens_of(model, PROMPTS) == tokens_of(usual, PROMPTS)
    assert tokens_of(model, PROMPTS, SharedPrefix(START)) == tokens_of(usual, PROMPTS)


@pytest.mark.one_row_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "gemma2"])
def test_every_rule_for_positions_counts_the_prefix_as_peft(talking_as: Tiny, tmp_path: Path, model_type: str) -> None:
    folder = talking_as(model_type)
    prefix = save_adapter(folder, tmp_path / "adapter", "PrefixTuning")
    expected = [peft_tokens(folder, prefix, prompt) for prompt in PROMPTS]
    for backend in ("onnx", "torch"):
        model = TextModel.open(folder, backend=backend, prefix_tuning=prefix)
        size = model.sequences or len(PROMPTS)
        parts = [PROMPTS[start : start + size] for start in range(0, len(PROMPTS), size)]
        assert [tokens for part in parts for tokens in tokens_of(model, part)] == expected


def test_a_window_would_count_padding_after_the_prefix(talking_as: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(talking_as("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    model = TextModel.open(folder, prefix_tuning=save_adapter(folder, tmp_path / "adapter", "PrefixTuning"))
    assert model.sequences == 1
    with pytest.raises(UsageProblem, match="padding would shift the window"):
        tokens_of(model, PROMPTS)


@pytest.mark.slow
def test_pre_caches_continue_as_in_paddlenlp(tmp_path: Path) -> None:
    to_hf(PADDLE / "base", tmp_path / "hf")
    export(tmp_path / "hf")
    reference = np.load(PADDLE / "reference.npz")
    ids = reference["input_ids"]
    mask = np.ones_like(ids)
    runner = with_prefix(OrtRunner.from_folder(tmp_path / "hf"), open_prefix(PADDLE / "prefix"))
    logits = runner.prefill(ids, mask, default_positions(mask, ids.shape[1])).logits
    np.testing.assert_allclose(logits, reference["logits"], atol=2e-5)


def test_a_prefix_of_another_model_is_refused(talking: Path) -> None:
    with pytest.raises(InputRefused, match="shape mismatch for the prefix"):
        TextModel.open(talking, prefix_tuning=PADDLE / "prefix" / "pre_caches.npy")


def test_a_lora_is_not_a_prefix(talking: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedInput, match="`LORA`") as refusal:
        TextModel.open(talking, prefix_tuning=tmp_path)
    assert "merge-lora" in refusal.value.hint


@pytest.mark.quick_rows("options0-InputRefused-has room for 5")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shapes": "static", "max_seq_len": LENGTH, "prompt_len": 1}, InputRefused, "has room for 5"),
        ({"kv_cache": "int8"}, UnsupportedInput, "8-bit codes"),
    ],
)
def test_graphs_whose_cache_cannot_begin_with_a_prefix_refuse_it(
    talking: Path, adapter: Path, tmp_path: Path, options: dict[str, Any], error: type[LlmconvError], message: str
) -> None:
    folder = _exported(talking, tmp_path / "model", **options)
    with pytest.raises(error, match=message):
        TextModel.open(folder, prefix_tuning=adapter)


def test_graphs_with_a_prefix_in_them_refuse_a_second_one(talking: Path, adapter: Path, tmp_path: Path) -> None:
    folder = _exported(talking, tmp_path / "model", prefix=adapter)
    with pytest.raises(UsageProblem, match="begin with a prefix of 5 tokens already"):
        TextModel.open(folder, prefix_tuning=adapter)


@pytest.mark.slow
def test_a_model_with_states_refuses_a_prefix(adapter: Path, tmp_path: Path) -> None:
    folder = save_letters(save_tiny("mamba", tmp_path / "mamba", **STATE_CONFIGS["mamba"]))
    with pytest.raises(UnsupportedInput, match="more than keys and values"):
        TextModel.open(folder, backend="torch", prefix_tuning=adapter)


@pytest.mark.slow
def test_the_prefix_takes_part_of_the_context(talking: Path, adapter: Path) -> None:
    usual, model = TextModel.open(talking), TextModel.open(talking, prefix_tuning=adapter)
    assert usual.context_length and model.context_length == usual.context_length - LENGTH


def test_an_open_model_takes_no_prefix(talking: Path, adapter: Path) -> None:
    with pytest.raises(UsageProblem, match="`prefix_tuning` has no effect on an open model"):
        generate(TextModel.open(talking), "a", prefix_tuning=adapter)


@pytest.mark.slow
def test_the_command_takes_a_prefix(chatting: Path, tiny: Tiny, tmp_path: Path) -> None:
    prefix = save_adapter(chatting, tmp_path / "adapter", "PrefixTuning")
    call = ["generate", str(chatting), "hello", "--max-new-tokens", "4", "--prefix-tuning", str(prefix)]
    given, usual = CliRunner().invoke(main, call), CliRunner().invoke(main, call[:-2])
    assert given.exit_code == usual.exit_code == 0, given.stderr
    expected = generate(chatting, "hello", max_new_tokens=4, prefix_tuning=prefix).completions[0].text
    assert given.stdout == f"{expected}\n" != usual.stdout


def _exported(source: Path, folder: Path, **options: Any) -> Path:
    """The model with graphs of another kind."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.onnx", "llmconv.json"))
    export(folder, **options)
    return folder
