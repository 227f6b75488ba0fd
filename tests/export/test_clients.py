"""The clients themselves, each in an environment of its own (`make clients`): the greedy tokens of the eager model.

The models have unusual shapes: a head size that is not hidden/heads, one key/value head, a tied head, a sliding window
shorter than the text, no position_ids, bfloat16 weights in several files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environments
from llmconv.export import export
from tests.builders.chatting import save_chatting
from tests.conftest import save_tiny
from tests.test_docs import blocks

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "clients"
ROOT = Path(__file__).parents[2]
LAYOUTS = ("genai", "optimum", "transformersjs")
PROMPTS = [[5, 9, 11, 23, 40, 7], [9, 12, 8]]
NEW = 14

ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 5}),
    "bloom": ("bloom", {}),
    "gpt2": ("gpt2", {"n_head": 8}),
    "llama": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every unusual model with all layouts in place; the llama's weights are bfloat16 in several files."""
    home = tmp_path_factory.mktemp("clients")
    made = {name: save_tiny(kind, home / name, **changes) for name, (kind, changes) in ODD.items()}
    made["llama"] = export(made["llama"], home / "sharded", dtype="bfloat16", max_shard_size="60KB").folder
    assert len(list(made["llama"].glob("model-*.safetensors"))) > 3
    (made["bloom"] / "generation_config.json").unlink()
    for folder in made.values():
        export(folder, layout=LAYOUTS)
    return made


def run(client: str, command: list[str | Path], jobs: list[dict[str, Any]]) -> list[Any]:
    """The client's answers to the jobs; skips without its environment."""
    home = ROOT / environments.folder(client)
    if not (home / "complete").exists():
        pytest.skip(f"no build/{client}-env; `make clients` makes it")
    done = subprocess.run(command, cwd=home, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def genai(jobs: list[dict[str, Any]]) -> list[Any]:
    return run("genai", ["bin/python", HERE / "genai_client.py"], jobs)


def optimum(jobs: list[dict[str, Any]]) -> list[Any]:
    return run("optimum", ["bin/python", HERE / "optimum_client.py"], jobs)


def transformersjs(jobs: list[dict[str, Any]]) -> list[Any]:
    return run("transformersjs", ["node", HERE / "transformersjs_client.mjs"], jobs)


def eager(folder: Path, prompt: list[int], new: int = NEW, end: int = 2) -> list[int]:
    """The tokens that the eager model adds, the end token left out."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    added: list[int] = tokens[0, len(prompt) :].tolist()
    return until_end(added, end)


def test_the_snippet_for_optimum_reads_a_tokenizer_saved_by_transformers_5(tmp_path: Path) -> None:
    folder = save_chatting(tmp_path / "MODEL")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "TokenizersBackend"
    config["extra_special_tokens"] = ["<unk>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    export(folder, layout="optimum")
    (snippet,) = [code for code in blocks(ROOT / "docs/clients.md", "python") if "optimum" in code]
    home = ROOT / environments.folder("optimum")
    if not (home / "complete").exists():
        pytest.skip("no build/optimum-env; `make clients` makes it")
    python = [str(home / "bin/python"), "-c", snippet]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    prompt = [ord(letter) - 0x1F for letter in "Once upon a time"]
    text = "".join(chr(0x1F + token) for token in eager(folder, prompt, 20))
    assert done.stdout.splitlines()[-1] == repr(["Once upon a time" + text])


def until_end(tokens: list[int], end: int = 2) -> list[int]:
    """Without the end token and the padding after it."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


@pytest.mark.parametrize("client", [optimum, transformersjs], ids=lambda client: client.__name__)
def test_a_padded_batch_gives_the_tokens_of_the_eager_model(
    folders: dict[str, Path], client: Callable[[list[dict[str, Any]]], list[Any]]
) -> None:
    answers = client([{"folder": str(folder), "batch": PROMPTS, "new": NEW} for folder in folders.values()])
    for folder, rows in zip(folders.values(), answers, strict=True):
        assert [until_end(row) for row in rows] == [eager(folder, prompt) for prompt in PROMPTS], folder.name


@pytest.mark.parametrize("prompt", [[5, 9, 11, 23, 40, 7], [5]], ids=["several tokens", "one token"])
def test_genai_gives_the_tokens_of_the_eager_model_with_one_graph(folders: dict[str, Path], prompt: list[int]) -> None:
    answers = genai([{"folder": str(folder), "turns": [prompt], "new": NEW} for folder in folders.values()])
    assert answers == [prompt + eager(folder, prompt) for folder in folders.values()]


def test_genai_gives_the_tokens_of_the_eager_model_with_two_graphs(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = [[5, 9, 11, 23, 40, 7], [5]]
    pairs = [with_two_graphs(folder, tmp_path / name) for name, folder in folders.items()]
    answers = genai([{"folder": str(pair), "turns": [prompt], "new": NEW} for pair in pairs for prompt in prompts])
    assert answers == [prompt + eager(pair, prompt) for pair in pairs for prompt in prompts]


def with_two_graphs(folder: Path, target: Path) -> Path:
    """A copy with prefill.onnx and decode.onnx only."""
    return export(bare_copy(folder, target), prefill=True, incremental=True, layout="genai").folder


def bare_copy(folder: Path, target: Path) -> Path:
    """A copy without graphs."""
    ignored = shutil.ignore_patterns("*.onnx", "onnx", "*.onnx_data*", "*.graph", "llmconv.json", "genai_config.json")
    return Path(shutil.copytree(folder, target, ignore=ignored))


def test_genai_takes_further_turns_on_the_same_cache(folders: dict[str, Path]) -> None:
    turns = [[5, 9, 11, 23], [33, 44, 55], [61]]
    answers = genai([{"folder": str(folder), "turns": turns, "new": 3} for folder in folders.values()])
    for folder, answer in zip(folders.values(), answers, strict=True):
        assert answer == conversation(folder, turns), folder.name


def test_genai_takes_further_turns_over_one_shared_buffer(folders: dict[str, Path], tmp_path: Path) -> None:
    turns, copies = [[5, 9, 11, 23], [33, 44, 55], [61]], []
    for name, folder in folders.items():
        copies.append(bare_copy(folder, tmp_path / name))
        export(copies[-1], layout="genai", cache="shared-buffer")
    answers = genai([{"folder": str(copy), "turns": turns, "new": 3} for copy in copies])
    for copy, answer in zip(copies, answers, strict=True):
        assert answer == conversation(copy, turns), copy.name


def conversation(folder: Path, turns: list[list[int]]) -> list[int]:
    """All tokens after the eager model answered each turn with three."""
    tokens: list[int] = []
    for turn in turns:
        tokens += turn
        tokens += eager(folder, tokens, 3)
    return tokens


def test_genai_takes_a_turn_after_an_answer_that_ended_by_itself(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen3"], tmp_path / "qwen3"))
    first = eager(folder, [5, 9, 11, 23])
    answer = first[: first.index(first[2])]  # the end comes after one or two tokens
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": first[2], "pad_token_id": 0}))
    export(folder, layout="genai", overwrite=True)
    (tokens,) = genai([{"folder": str(folder), "turns": [[5, 9, 11, 23], [33, 44, 55]], "new": 1 + len(answer)}])
    turns = [5, 9, 11, 23, *answer, 33, 44, 55]
    assert tokens[: len(turns)] == turns
    assert tokens[len(turns) :] == eager(folder, turns, 1 + len(answer), end=first[2])


def test_genai_takes_batches_padded_on_the_right(folders: dict[str, Path]) -> None:
    # A window counts the padding between prompt and answer, in the eager model too, so gemma2 is not asked.
    rest = {name: folder for name, folder in folders.items() if name != "gemma2"}
    pads = {"gpt2": 2}  # it has no padding token; the end token is taken
    jobs = [{"folder": str(f), "batch": PROMPTS, "new": NEW, "pad": pads.get(name, 0)} for name, f in rest.items()]
    for folder, rows in zip(rest.values(), genai(jobs), strict=True):
        assert [until_end(row) for row in rows] == [eager(folder, prompt) for prompt in PROMPTS], folder.name


def test_genai_does_not_end_a_model_without_end_token_early(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "endless", eos_token_id=None, pad_token_id=None)
    export(folder, layout="genai")
    (answer,) = genai([{"folder": str(folder), "turns": [[5, 9, 11]], "new": 60}])
    assert len(answer) == 63


def test_transformersjs_opens_a_copy_without_links(folders: dict[str, Path], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folders["qwen3"], tmp_path / "copied"))
    assert not any(path.is_symlink() for path in copied.rglob("*"))
    (copied / "model.safetensors").unlink()
    options = {"use_external_data_format": True}
    (rows,) = transformersjs([{"folder": str(copied), "batch": PROMPTS, "new": NEW, "options": options}])
    assert [until_end(row) for row in rows] == [eager(folders["qwen3"], prompt) for prompt in PROMPTS]
