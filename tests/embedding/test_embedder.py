"""Embedder: tokens, prompts, padding and order of texts, compared with transformers itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModel, AutoTokenizer

from llmconv.cli import main
from llmconv.embedding import Embedder, embed
from llmconv.errors import InputRefused, MalformedInput, UsageProblem
from llmconv.export import export
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.quantizers import save_tokenizer
from tests.builders.safetensors import change_tensor
from tests.builders.tracing import trace_once

trace_once()

PROMPTS = {"prompts": {"query": "t9 ", "document": ""}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like Qwen3-Embedding, with a tokenizer of the words `t0` to `t15`; do not write into it."""
    path = save_modules(save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))
    save_tokenizer(path)
    (path / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    export(path, task="embed")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[list[int]], object]:
    """The embedding of some tokens by transformers and torch."""
    model = AutoModel.from_pretrained(folder).eval()

    def embedding(tokens: list[int]) -> object:
        with torch.no_grad():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden, dim=0).numpy()

    return embedding


@pytest.mark.slow
def test_texts_of_several_lengths_keep_their_order(folder: Path, expected: Callable[[list[int]], object]) -> None:
    found = Embedder(folder).encode(["t3 t4 t5", "t6", "t1 t2"], batch_size=2)
    wanted = [expected([3, 4, 5]), expected([6]), expected([1, 2])]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array(wanted), atol=1e-5)


@pytest.mark.slow
def test_a_prompt_of_the_model_stands_in_front(folder: Path, expected: Callable[[list[int]], object]) -> None:
    found = Embedder(folder).encode("t3", prompt_name="query")
    np.testing.assert_allclose(found[0], np.asarray(expected([9, 3])), atol=1e-5)


def test_an_embedding_that_is_no_number_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    change_tensor(
        broken / "model.safetensors", "layers.0.mlp.down_proj.weight", lambda values: np.full_like(values, np.nan)
    )
    with pytest.raises(MalformedInput, match="the embedding of a text is NaN or infinite"):
        Embedder(broken).encode(["t3 t4"])


def test_an_unknown_prompt_is_refused(folder: Path) -> None:
    with pytest.raises(UsageProblem, match="no prompt `answer`"):
        Embedder(folder).encode(["t3"], prompt_name="answer")


def test_a_text_that_is_too_long_is_cut_with_a_warning(
    folder: Path, tmp_path: Path, expected: Callable[[list[int]], object], capfd: pytest.CaptureFixture[str]
) -> None:
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).hardlink_to(path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2, "do_lower_case": True}))
    found = Embedder(tmp_path).encode(["T3 t4 t5"])
    np.testing.assert_allclose(found[0], np.asarray(expected([3, 4])), atol=1e-5)
    assert "longer than 2 tokens" in capfd.readouterr().err


def test_a_tokenizer_that_cuts_beginnings_cuts_that_of_a_very_long_text(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).hardlink_to(path)
    (tmp_path / "tokenizer_config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "truncation_side": "left"}))
    text = "t3 t4 " * 9000 + "t5"
    embedder, tokenizer = Embedder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert embedder.tokens([text]) == [tokenizer(text, truncation=True, max_length=embedder.most)["input_ids"]]
    assert "were cut at their beginning" in capfd.readouterr().err


def test_a_prompt_of_a_reranker_that_is_too_long_is_refused(folder: Path) -> None:
    """What its template writes after the document has the score, and would be cut."""
    embedder = Embedder(folder)
    embedder.role, embedder.most = "rerank", 2
    with pytest.raises(InputRefused, match="text 2 is longer than 2 tokens, and its score is read at its end"):
        embedder.tokens(["t3", "t3 t4 t5"])


def test_a_folder_without_such_a_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="is an empty folder"):
        Embedder(tmp_path)


@pytest.mark.parametrize(
    "content", ['{"prompts": ["query"]}', '{"default_prompt_name": "query"}', '{"default_prompt_name": []}', "["]
)
def test_a_damaged_file_of_prompts_is_refused(content: str, folder: Path, tmp_path: Path) -> None:
    for name in ("llmconv.json", "model.onnx", "model.safetensors", "config.json"):
        (tmp_path / name).hardlink_to(folder / name)
    (tmp_path / "config_sentence_transformers.json").write_text(content)
    with pytest.raises(MalformedInput, match="config_sentence_transformers"):
        Embedder(tmp_path)


def test_the_command_prints_one_json_object_per_text(folder: Path) -> None:
    result = CliRunner().invoke(main, ["embed", str(folder), "t3", "t4"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"] for row in rows] == ["t3", "t4"] and {len(row["embedding"]) for row in rows} == {64}


def test_the_command_answers_with_one_object_on_demand(folder: Path) -> None:
    result = CliRunner().invoke(main, ["embed", str(folder), "t3", "t4", "--json"])
    found = json.loads(result.stdout)
    assert found["role"] == "embed" and [row["text"] for row in found["results"]] == ["t3", "t4"]


@pytest.mark.slow
def test_the_command_writes_an_array(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("t3\n\nt4 t5\n")
    arguments = ["embed", str(folder), "--text-file", str(tmp_path / "texts.txt"), "--output-file"]
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "out.npy")]).exit_code == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), Embedder(folder).encode(["t3", "t4 t5"]), atol=1e-6)


def test_the_command_replaces_no_file_unasked(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("t3")
    arguments = ["embed", str(folder), "--text-file", str(file), "--output-file"]
    assert CliRunner().invoke(main, [*arguments, str(file), "--overwrite"]).exit_code == 2
    (tmp_path / "out.jsonl").write_text("old")
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "out.jsonl")]).exit_code == 3
    assert (file.read_text(), (tmp_path / "out.jsonl").read_text()) == ("t3", "old")
    assert CliRunner().invoke(main, [*arguments, str(tmp_path / "out.jsonl"), "--overwrite"]).exit_code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == "t3"


def test_a_name_of_a_file_in_place_of_a_text_is_refused(folder: Path) -> None:
    result = CliRunner().invoke(main, ["embed", str(folder), "texts.txt"])
    assert result.exit_code == 2 and "--text-file texts.txt" in result.stderr


@pytest.mark.parametrize("texts", [[], ["t3", "--text-file", "x.txt"]])
def test_no_text_or_two_sources_of_texts_are_refused(texts: list[str], folder: Path) -> None:
    assert CliRunner().invoke(main, ["embed", str(folder), *texts]).exit_code == 2


def test_the_function_reads_a_file_and_writes_what_it_returns(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("ab\ncde\n")
    found = embed(folder, text_file=tmp_path / "texts.txt", output_file=tmp_path / "out.npy", threads=1)
    np.testing.assert_array_equal(found.values, Embedder(folder).encode(["ab", "cde"]))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), found.values)
    assert [row["text"] for row in found.rows()] == found.texts == ["ab", "cde"]


def test_the_function_takes_the_options_of_sessions_by_name(folder: Path) -> None:
    with pytest.raises(UsageProblem, match="no parameter `thread`"):
        embed(folder, ["ab"], thread=1)  # type: ignore[call-arg]
    with pytest.raises(UsageProblem, match="no provider `nowhere`"):
        embed(folder, "ab", provider="nowhere")


TEMPLATE = "{% for m in messages %}{{ 't12 ' if m.role == 'user' else 't13 ' }}{{ m.content }}{{ ' t14 ' }}{% endfor %}"


@pytest.fixture
def chatting(folder: Path, tmp_path: Path) -> Path:
    """As sentence-transformers 6 saves a model whose tokenizer has a chat template."""
    for path in folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).hardlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    kinds = {kind: {"method": "forward", "method_output_name": "last_hidden_state"} for kind in ("text", "message")}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": kinds}))
    return tmp_path


def test_a_text_is_a_message_where_the_model_was_saved_with_its_chat_template(chatting: Path) -> None:
    embedder = Embedder(chatting)
    assert embedder.tokens(["t3 t4", "t5"]) == [[12, 3, 4, 14], [12, 5, 14]]
    assert embedder.tokens(["t3"], "query") == [[13, 9, 14, 12, 3, 14]]


def test_a_message_that_is_cut_keeps_what_the_template_writes_after_it(chatting: Path) -> None:
    embedder = Embedder(chatting)
    embedder.most = 4
    cut, whole = embedder.tokens(["t3 t4 t5 t6", "t3"])
    assert (len(cut), cut[:2], cut[-1], whole) == (4, [12, 3], 14, [12, 3, 14])


def test_before_version_6_a_text_is_no_message(chatting: Path) -> None:
    (chatting / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9}))
    assert Embedder(chatting).tokens(["t3 t4"]) == [[3, 4]]


@pytest.mark.parametrize("name", ["processor_kwargs", "tokenizer_args"])
def test_a_length_among_the_options_of_the_tokenizer_counts(chatting: Path, name: str) -> None:
    fields = {name: {"model_max_length": 2}, "max_seq_length": 9}
    (chatting / "sentence_bert_config.json").write_text(json.dumps(fields))
    assert Embedder(chatting).tokens(["t3 t4 t5"]) == [[3, 4]]


@pytest.mark.parametrize(
    "fields", [{"processing_kwargs": {"text": {"max_length": 3}}}, {"processor_kwargs": {"bos_token": "t4"}}]
)
def test_other_options_of_the_tokenizer_are_refused(chatting: Path, fields: dict[str, object]) -> None:
    (chatting / "sentence_bert_config.json").write_text(json.dumps(fields))
    with pytest.raises(InputRefused, match=next(iter(fields))):
        Embedder(chatting)


def test_embeddings_have_the_dimensions_that_the_model_was_saved_with(chatting: Path) -> None:
    whole = Embedder(chatting).encode(["t3 t4"])
    (chatting / "config_sentence_transformers.json").unlink()
    (chatting / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 16}))
    found = Embedder(chatting).encode(["t3 t4"])
    assert found.shape == (1, 16)
    np.testing.assert_array_equal(found, whole[:, :16])
