"""The genai backend, with the real onnxruntime-genai: installed, or from the environment of `make clients`."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import environments
from llmconv.errors import InputRefused, UsageProblem
from llmconv.export import export
from llmconv.generation import GenerationSettings, TextModel
from llmconv.generation.genai import GenaiEngine
from llmconv.runtime import SessionSettings
from tests.conftest import save_tiny

HOME = Path(__file__).parents[2] / environments.folder("genai")
PROMPTS = ["Once upon a time", "Why", "To be or not to be, that is the question"]


@pytest.fixture(scope="module")
def library() -> Iterator[None]:
    """Makes onnxruntime_genai importable; skips if it is not installed."""
    if importlib.util.find_spec("onnxruntime_genai") is not None:
        yield
        return
    places = list(HOME.glob("lib/python*/site-packages/onnxruntime_genai"))
    if not places or not (HOME / "complete").exists():
        pytest.skip("no onnxruntime-genai here nor in build/genai-env; `make clients` makes that")
    sys.path.append(str(places[0].parent))  # behind our own packages
    yield
    sys.path.remove(str(places[0].parent))


@pytest.fixture(scope="module")
def folder(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The talking model with `model.onnx` for GenAI next to the graphs of prompts and steps."""
    made = tmp_path_factory.mktemp("genai") / "llama"
    shutil.copytree(talking, made)
    export(made, prefill=True, incremental=True, unified=True, layout=["genai"], overwrite=True)
    return made


def tokens(model: TextModel, prompts: list[str], **fields: object) -> list[list[int]]:
    """The new tokens of each prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    for piece in model.stream([model.encode(text) for text in prompts], GenerationSettings().but(**fields)):
        if piece.token is not None:
            found[piece.index].append(piece.token)
    return found


@pytest.fixture(scope="module")
def opened(library: None, folder: Path) -> TextModel:
    return TextModel.open(folder, backend="genai")


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 1])
def test_greedy_tokens_are_those_of_the_onnx_backend(library: None, folder: Path, threads: int) -> None:
    genai = TextModel.open(folder, backend="genai", settings=SessionSettings(threads=threads, prepack=True))

    assert tokens(genai, PROMPTS, max_new_tokens=12) == tokens(TextModel.open(folder), PROMPTS, max_new_tokens=12)


@pytest.mark.slow
def test_the_pair_of_graphs_gives_the_same_tokens(
    library: None, talking: Path, opened: TextModel, tmp_path: Path
) -> None:
    pair = Path(shutil.copytree(talking, tmp_path / "pair"))
    export(pair, prefill=True, incremental=True, layout=["genai"], overwrite=True)

    model = TextModel.open(pair, backend="genai")

    assert tokens(model, PROMPTS[:1], max_new_tokens=9) == tokens(opened, PROMPTS[:1], max_new_tokens=9)


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False])
def test_prompts_of_several_lengths_are_right_with_the_logits_of_the_last_position(
    library: None, talking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unified: bool
) -> None:
    home = save_tiny("llama", tmp_path / "last")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(talking / name, home / name)
    options: dict[str, Any] = {"unified": unified, "prefill": True, "incremental": True}
    export(home, **options, layout=["genai"], last_logits=True)
    prompts = [np.random.default_rng(3).integers(5, 90, length).tolist() for length in (8, 3, 14)]

    first, second = (
        [*TextModel.open(home, backend=backend).stream(prompts, GenerationSettings().but(max_new_tokens=9))]
        for backend in ("genai", "onnx")
    )

    assert sorted((one.index, one.token) for one in first) == sorted((one.index, one.token) for one in second)
    assert "it needs prompts of equal length in a batch" in capsys.readouterr().err


@pytest.mark.slow
def test_a_longer_prompt_does_not_change_the_frequencies_of_a_shorter_one(
    library: None, talking: Path, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    home = save_tiny("llama", tmp_path / "dynamic", max_position_embeddings=16, rope_parameters=rope)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(talking / name, home / name)
    export(home, unified=True, layout=["genai"])
    model = TextModel.open(home, backend="genai")
    prompts = [np.random.default_rng(3).integers(5, 90, length).tolist() for length in (5, 40)]
    settings = GenerationSettings().but(max_new_tokens=8)

    together = [*model.stream(prompts, settings)]

    for index, prompt in enumerate(prompts):
        alone = [piece.token for piece in model.stream([prompt], settings)]
        assert [piece.token for piece in together if piece.index == index] == alone


@pytest.mark.slow
def test_a_prompt_samples_the_same_alone_as_in_a_batch(opened: TextModel) -> None:
    drawing = {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "seed": 7, "max_new_tokens": 10}

    together = tokens(opened, PROMPTS, **drawing)

    assert together == [tokens(opened, [text], **drawing)[0] for text in PROMPTS]
    assert together != tokens(opened, PROMPTS, **{**drawing, "seed": 8})
    assert together != tokens(opened, PROMPTS, max_new_tokens=10)


@pytest.mark.slow
def test_penalties_are_genais_and_count_no_padding(opened: TextModel, folder: Path) -> None:
    fields = {"repetition_penalty": 1.7, "max_new_tokens": 10}

    assert tokens(opened, PROMPTS, **fields) == tokens(TextModel.open(folder), PROMPTS, **fields)


@pytest.mark.slow
def test_padding_and_search_options_of_the_files_change_no_text(library: None, folder: Path, tmp_path: Path) -> None:
    home = Path(shutil.copytree(folder, tmp_path / "padding"))
    config = json.loads((home / "genai_config.json").read_text())
    last = config["model"]["vocab_size"] - 1
    config["model"]["pad_token_id"] = 9
    config["search"] |= {"no_repeat_ngram_size": 1, "min_length": 4}
    (home / "genai_config.json").write_text(json.dumps(config))
    genai, onnx = (TextModel.open(home, backend=backend) for backend in ("genai", "onnx"))

    for prompts in ([[9, 20, 9, 21, 9]], [[last, 20, 9, last - 1, 7]], [[last, 5, last], [9, 30], [8]]):
        settings = GenerationSettings().but(max_new_tokens=8)
        first, second = (
            sorted((one.index, one.token) for one in each.stream(prompts, settings)) for each in (genai, onnx)
        )
        assert first == second


@pytest.mark.slow
def test_stop_strings_and_end_tokens_end_a_text(opened: TextModel) -> None:
    prompt = opened.encode(PROMPTS[0])
    whole = "".join(piece.text for piece in opened.stream([prompt], GenerationSettings(max_new_tokens=12)))
    new = tokens(opened, PROMPTS[:1], max_new_tokens=12)[0]

    stopped = list(opened.stream([prompt], GenerationSettings(max_new_tokens=12, stop_strings=(whole[4:6],))))
    ended = list(opened.stream([prompt], GenerationSettings(max_new_tokens=12, eos_token_id=frozenset({new[5]}))))

    assert (stopped[-1].finish, "".join(piece.text for piece in stopped)) == ("stop", whole[: whole.index(whole[4:6])])
    assert (ended[-1].finish, len(ended)) == ("eos", new.index(new[5]) + 1)


@pytest.mark.slow
def test_the_context_ends_a_text(opened: TextModel) -> None:
    assert opened.context_length == 128

    pieces = list(opened.stream([[5] * 120], GenerationSettings(max_new_tokens=50)))

    assert len(pieces) == 8
    assert pieces[-1].finish == "length"


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"num_beams": 2}, {"do_sample": True, "min_p": 0.1}, {"suppress_tokens": [3]}])
def test_unsupported_settings_of_genai_are_refused(opened: TextModel, fields: dict[str, object]) -> None:
    with pytest.raises(UsageProblem) as error:
        tokens(opened, PROMPTS[:1], **fields)

    assert "--backend onnx" in error.value.hint


def test_a_folder_that_was_not_exported_for_genai_is_refused(talking: Path) -> None:
    with pytest.raises(InputRefused, match=r"no genai_config\.json") as error:
        TextModel.open(talking, backend="genai")

    assert "--layout genai" in error.value.hint


def test_without_the_library_the_hint_has_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)  # as if it were not installed
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {}}))

    with pytest.raises(InputRefused, match="needs onnxruntime-genai") as error:
        GenaiEngine.load(tmp_path)

    assert "pip install 'onnxruntime-genai" in error.value.hint
