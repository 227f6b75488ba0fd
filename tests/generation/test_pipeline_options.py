"""Options of transformers' pipeline: tokenizer, streamer, device, dtype, and a model in memory."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from threading import Thread
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, TextStreamer, pipeline

import llmconv
from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation import TextModel, generate

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def tokenizer(talking: Path) -> Any:
    """The tokenizer of characters."""
    return AutoTokenizer.from_pretrained(talking)


@pytest.fixture(scope="module")
def bare(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with graphs and no tokenizer."""
    ignored = shutil.ignore_patterns("tokenizer*", "special_tokens_map.json")
    return Path(shutil.copytree(talking, tmp_path_factory.mktemp("bare") / "tiny", ignore=ignored))


@pytest.fixture(scope="module")
def loaded(talking: Path) -> Any:
    """A model of transformers in memory, which is being trained."""
    return AutoModelForCausalLM.from_pretrained(talking).train()


def text(pipe: Any, **options: Any) -> str:
    """The greedy text after a prompt."""
    found: str = pipe("Once", **{**GREEDY, **options})[0]["generated_text"]
    return found


@pytest.fixture(scope="module")
def expected(talking: Path) -> str:
    """The greedy text of the graphs."""
    return text(llmconv.pipeline(model=talking))


@pytest.mark.slow
def test_a_tokenizer_is_an_object_or_a_folder(bare: Path, talking: Path, tokenizer: Any, expected: str) -> None:
    with pytest.raises(InputRefused, match="has no tokenizer"):
        llmconv.pipeline(model=bare)
    for given in (tokenizer, talking, str(talking)):
        assert text(llmconv.pipeline("text_generation", model=bare, tokenizer=given)) == expected
    graphs = (bare / "prefill.onnx", bare / "decode.onnx")
    assert text(llmconv.pipeline("text_generation", model=graphs, tokenizer=tokenizer)) == expected
    made = generate(TextModel.open(*graphs, tokenizer=tokenizer), "Once", **GREEDY)
    assert made.completions == generate(bare, "Once", tokenizer=talking, **GREEDY).completions
    assert made.completions[0].text == expected.removeprefix("Once")


@pytest.mark.slow
def test_the_call_of_mindformers_runs(bare: Path, tokenizer: Any) -> None:
    pipe = llmconv.pipeline(task="text_generation", model=bare, tokenizer=tokenizer)
    call = {"do_sample": False, "top_k": 1, "top_p": 1.0, "temperature": 1.0, "repetition_penalty": 1.0}
    tokens = {"eos_token_id": 2, "pad_token_id": 0, "max_length": 16, "add_special_tokens": False, "streamer": None}
    assert len(pipe(["Once", "a"], **call, **tokens)) == 2


def test_a_streamer_prints_what_transformers_prints(talking: Path, tokenizer: Any) -> None:
    shown = []
    for make in (llmconv.pipeline, pipeline):
        pipe = make("text-generation", model=str(talking), tokenizer=tokenizer)
        with redirect_stdout(io.StringIO()) as printed:
            pipe(["Once", "a"], streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
        shown.append(printed.getvalue())
    assert shown[0] == shown[1] and len(shown[0].splitlines()) == 2


@pytest.mark.quick_rows("generate")
@pytest.mark.parametrize("way", ["pipeline", "generate", "stream"])
def test_an_iterator_gets_the_text_from_a_thread(talking: Path, tokenizer: Any, expected: str, way: str) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    model = TextModel.open(talking)
    ways: dict[str, Callable[[], object]] = {
        "pipeline": lambda: llmconv.pipeline(model=model, streamer=streamer)("Once", **GREEDY),
        "generate": lambda: generate(model, "Once", streamer=streamer, **GREEDY),
        "stream": lambda: list(model.stream([model.encode("Once")], model.defaults.but(**GREEDY), streamer=streamer)),
    }
    thread = Thread(target=ways[way])
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


def test_an_error_ends_the_streamer(talking: Path, tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    with pytest.raises(InputRefused):
        llmconv.pipeline(model=talking, streamer=streamer)("a" * 200)
    assert "".join(streamer) == ""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tokenizer": ({"tokenizer": 3}, "`tokenizer` is an int"),
    "tokenizer class": ({"tokenizer": AutoTokenizer}, "`tokenizer` is a type"),
    "streamer": ({"streamer": print}, "`streamer` is a builtin_function_or_method"),
    "streamer class": ({"streamer": TextStreamer}, "`streamer` is a type"),
    "device": ({"device": 1.5}, "`device` is a float"),
    "device of graphs": ({"device": "mps"}, "do not run on the device `mps`"),
    "dtype": ({"torch_dtype": torch.float16}, "compute in float32, not in float16"),
    "dtype twice": ({"dtype": "float32", "torch_dtype": "float32"}, "are the same option"),
    "dtype name": ({"dtype": "fp99"}, "unknown dtype `fp99`"),
    "session": ({"session": {"threads": 1}}, "`session` is a dict"),
    "threads": ({"threads": "two"}, "`threads` is a str"),
    "setting": ({"max_new_token": 3}, "`max_new_token` is not a generation setting"),
    "kind": ({"batch_size": "8"}, "`batch_size` is a str"),
}


@pytest.mark.parametrize(("options", "problem"), WRONG.values(), ids=WRONG)
def test_mistakes_are_told_when_the_pipeline_is_made(talking: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageProblem, match=problem):
        llmconv.pipeline(model=talking, **options)


@pytest.mark.slow_rows("{'device': device(type='cpu')}", "{'dtype': 'auto'}")
@pytest.mark.parametrize(
    "options",
    [
        {"device": -1},
        {"device": torch.device("cpu")},
        {"dtype": "auto"},
        {"torch_dtype": torch.float32},
        {"threads": 1},
    ],
    ids=str,
)
def test_what_graphs_do_anyway_is_accepted(talking: Path, options: dict[str, Any], expected: str) -> None:
    assert text(llmconv.pipeline(model=talking, **options)) == expected


def test_the_eager_model_takes_torchs_objects(talking: Path, expected: str) -> None:
    given: dict[str, Any] = {"device": torch.device("cpu"), "torch_dtype": torch.float32}
    assert text(llmconv.pipeline(model=talking, backend="torch", **given)) == expected


def test_a_streamer_takes_one_text_at_a_time(talking: Path, tokenizer: Any) -> None:
    with pytest.raises(UsageProblem, match="one text at a time"):
        generate(talking, "a", streamer=TextStreamer(tokenizer), num_return_sequences=2, do_sample=True)
    with pytest.raises(UsageProblem, match="no beam search"):
        generate(talking, "a", streamer=TextStreamer(tokenizer), num_beams=2)


def test_a_model_in_memory_is_run_without_dropout(loaded: Any, tokenizer: Any, expected: str) -> None:
    pipe = llmconv.pipeline(model=loaded, tokenizer=tokenizer, device="cpu", dtype=torch.float32)
    assert text(pipe) == expected and not loaded.training


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_around_a_model_in_memory_counts(talking: Path, tokenizer: Any, expected: str) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(talking), config)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.4)
    merged = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(talking), config)
    merged.load_state_dict(tuned.state_dict())
    found = [text(llmconv.pipeline(model=each, tokenizer=tokenizer)) for each in (tuned, merged.merge_and_unload())]
    assert found[0] == found[1] != expected


def test_models_in_memory_that_cannot_run_are_refused(loaded: Any, tokenizer: Any) -> None:
    with torch.device("meta"):
        empty = type(loaded)(loaded.config)
    for model, problem in [(empty, "on the meta device"), (torch.nn.Linear(2, 2), "not a causal language model")]:
        with pytest.raises(UsageProblem, match=problem):
            llmconv.pipeline(model=model, tokenizer=tokenizer)
    with pytest.raises(UsageProblem, match="has no tokenizer"):
        llmconv.pipeline(model=loaded)
    with pytest.raises(UsageProblem, match="`dtype` has no effect"):
        llmconv.pipeline(model=loaded, tokenizer=tokenizer, dtype="float16")
