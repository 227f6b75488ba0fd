"""The user's own embeddings in prompts: the text is that of the eager model, and bad arrays and files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from llmconv.cli import main
from llmconv.errors import InputRefused, LlmconvError, MalformedInput, UsageProblem
from llmconv.export import export
from llmconv.generation import Prompt, TextModel, generate
from llmconv.generation.prompts import read_embeddings, read_prompts
from tests.builders.talking import save_letters
from tests.conftest import DECODER, save_tiny

pytestmark = pytest.mark.slow

WIDTH = DECODER["hidden_size"]
ROWS = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A talking llama whose graphs take embeddings."""
    folder = save_letters(save_tiny("llama", tmp_path_factory.mktemp("embedded") / "llama"))
    export(folder, embeds=True)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    """The same model, open."""
    return TextModel.open(folder)


def eager_tokens(folder: Path, embedded: Callable[[Any], Any], count: int) -> list[int]:
    """New tokens of transformers' `generate` on embeddings that are made from the embedding table."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    eager = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        given = embedded(eager.get_input_embeddings())[None]
    mask = torch.ones(given.shape[:2], dtype=torch.int64)
    found = eager.generate(
        inputs_embeds=given, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in found[0]]


def before(text: str, model: TextModel) -> Callable[[Any], Any]:
    """ROWS, then the embeddings of a text."""
    import torch  # noqa: PLC0415

    return lambda table: torch.cat([torch.from_numpy(ROWS), table(torch.tensor(model.encode(text)))])


OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": ()}


def test_embeddings_before_the_prompt_give_the_text_of_the_eager_model(folder: Path, model: TextModel) -> None:
    found = generate(model, Prompt("Once", embeddings=ROWS), **OPTIONS)
    assert found.completions[0].tokens == eager_tokens(folder, before("Once", model), 8)
    assert found.completions[0].prompt_tokens == 7


def test_torch_runs_the_same_prompt(folder: Path, model: TextModel) -> None:
    found = generate(folder, Prompt("Once", embeddings=ROWS), backend="torch", **OPTIONS)
    assert (
        found.completions[0].tokens == generate(model, Prompt("Once", embeddings=ROWS), **OPTIONS).completions[0].tokens
    )


@pytest.mark.parametrize("text", ["On~ce", "On~~~ce"])
def test_embeddings_take_the_places_of_a_placeholder(folder: Path, model: TextModel, text: str) -> None:
    import torch  # noqa: PLC0415

    def embedded(table: Any) -> Any:
        parts = [table(torch.tensor(model.encode(part))) for part in ("On", "ce")]
        return torch.cat([parts[0], torch.from_numpy(ROWS), parts[1]])

    found = generate(model, Prompt(text, embeddings=ROWS, placeholder="~"), **OPTIONS)
    assert found.completions[0].tokens == eager_tokens(folder, embedded, 8)


def test_each_prompt_of_a_batch_gives_the_text_that_it_gives_alone(model: TextModel) -> None:
    mixed = Prompt("Once", embeddings=ROWS), Prompt("a~b", embeddings=ROWS[:2], placeholder="~")
    prompts: list[str | Prompt] = ["A longer prompt", *mixed]
    together = generate(model, prompts, repetition_penalty=1.3, **OPTIONS).completions
    alone = [generate(model, [one], repetition_penalty=1.3, **OPTIONS).completions[0] for one in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_static_graphs_take_embeddings_in_pieces(folder: Path, model: TextModel, tmp_path: Path) -> None:
    sizes = {"shapes": "static", "max_seq_len": 32, "prompt_len": 2}
    static = export(folder, tmp_path / "static", embeds=True, **sizes).folder  # type: ignore[arg-type]
    found, expected = (generate(one, Prompt("Once", embeddings=ROWS), **OPTIONS) for one in (static, model))
    assert found.completions[0].tokens == expected.completions[0].tokens


def test_a_tensor_in_bfloat16_is_accepted(model: TextModel) -> None:
    import torch  # noqa: PLC0415

    given = torch.from_numpy(ROWS).bfloat16().requires_grad_()
    found, expected = (
        generate(model, Prompt("Once", embeddings=one), **OPTIONS) for one in (given, given.detach().float().numpy())
    )
    assert found.completions[0].tokens == expected.completions[0].tokens


@pytest.mark.parametrize("ending", [".npy", ".safetensors"])
def test_json_lines_refer_to_files_next_to_them(folder: Path, model: TextModel, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    if ending == ".npy":
        np.save(path, ROWS)
    else:
        save_file({"rows": ROWS}, path)
    line = {"prompt": "Once", "embeddings": path.name, "id": 7}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line))
    options = ["--max-new-tokens", "8", "--temperature", "0", "--output-file", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(
        main, ["generate", str(folder), "--prompt-file", str(tmp_path / "prompts.jsonl"), *options]
    )
    assert result.exit_code == 0, result.stderr
    written = json.loads((tmp_path / "out.jsonl").read_text())
    expected = generate(model, Prompt("Once", embeddings=ROWS), max_new_tokens=8, temperature=0, do_sample=False)
    assert (written["tokens"], written["id"]) == (expected.completions[0].tokens, 7)
    assert written["embeddings"] == path.name


def test_graphs_that_take_tokens_refuse_embeddings(talking: Path) -> None:
    with pytest.raises(UsageProblem, match="tokens, and no embeddings") as caught:
        generate(talking, Prompt("Once", embeddings=ROWS))
    assert "--embeds" in caught.value.hint


def test_embeddings_of_another_size_are_refused(model: TextModel) -> None:
    with pytest.raises(InputRefused, match=f"have {WIDTH - 1} numbers per token"):
        generate(model, Prompt("Once", embeddings=ROWS[:, 1:]))


def test_a_beam_search_with_embeddings_is_refused(model: TextModel) -> None:
    with pytest.raises(UsageProblem, match="beam search"):
        generate(model, Prompt("Once", embeddings=ROWS), num_beams=2)


@pytest.mark.parametrize(("text", "problem"), [("Once", "0 placeholder"), ("a~b~c", "2 placeholder")])
def test_another_number_of_placeholders_is_refused(model: TextModel, text: str, problem: str) -> None:
    with pytest.raises(InputRefused, match=problem):
        generate(model, Prompt(text, embeddings=ROWS, placeholder="~"))


def test_an_unknown_placeholder_is_refused(model: TextModel) -> None:
    with pytest.raises(InputRefused, match="`<image>` is not a token"):
        generate(model, Prompt("Once", embeddings=ROWS, placeholder="<image>"))


BAD: dict[str, Any] = {
    "three axes": ROWS[None],
    "no rows": ROWS[:0],
    "integers": ROWS.astype(np.int64),
    "objects": np.array([[None]]),
    "texts": np.array([["a"]]),
    "NaN": np.where(ROWS > 0, np.nan, ROWS),
    "infinity in float32": ROWS.astype(np.float64) * 1e300,
    "too many": np.broadcast_to(np.float32(1), (1 << 20, 1 << 10)),
    "a list": [[0.5]],
}


@pytest.mark.parametrize("rows", BAD.values(), ids=BAD)
def test_arrays_that_are_not_embeddings_are_refused(model: TextModel, rows: Any) -> None:
    with pytest.raises(UsageProblem):
        generate(model, Prompt("Once", embeddings=rows))


def test_files_that_are_not_embeddings_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "nan.npy", np.full((2, 4), np.nan, np.float32))
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}]), allow_pickle=True)
    np.savez(tmp_path / "several.npy.npz", ROWS)
    (tmp_path / "several.npy.npz").rename(tmp_path / "several.npy")
    (tmp_path / "text.npy").write_text("hello")
    whole = (tmp_path / "nan.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-4])
    save_file({"a": ROWS, "b": ROWS}, tmp_path / "two.safetensors")
    save_file({"a": ROWS.astype(np.int32)}, tmp_path / "integers.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 40)
    for path in [*sorted(tmp_path.iterdir()), tmp_path / "missing.npy", tmp_path]:
        with pytest.raises((InputRefused, MalformedInput)):
            read_embeddings(path)


LINES = [
    '{"prompt": "a", "embeddings": [[0.5]]}',
    '{"prompt": "a", "embeddings": ""}',
    '{"prompt": "a", "embeddings": "a\\u0000"}',
    '{"prompt": "a", "placeholder": "~"}',
    '{"prompt": "a", "embeddings": "a.npy", "placeholder": 3}',
]


@pytest.mark.parametrize("line", LINES)
def test_mistakes_in_lines_with_embeddings_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(LlmconvError, match="line 1"):
        read_prompts(tmp_path / "p.jsonl")
