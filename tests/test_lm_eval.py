"""The harness gives the same scores and texts for graphs as for the eager model."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environments
from llmconv.export.exporter import export
from tests.builders.server_process import serving
from tests.builders.talking import save_letters
from tests.conftest import save_tiny

HOME = Path(__file__).parents[1] / environments.folder("lm-eval")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (HOME / "complete").exists(), reason="`make clients` makes the environment of lm-eval"),
]

TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{answers}}"
doc_to_target: right
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
""",
    "text": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{question}}"
generation_kwargs: {until: ["o"], max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}

RUN = """
import json, site, sys
site.addsitedir(sys.argv[1])
import lm_eval
from lm_eval.tasks import TaskManager
from llmconv.lm_eval import TextModelLM
folder, tasks, batch = sys.argv[2], sys.argv[3], int(sys.argv[4])
found = {}
for name, model, args in (
    ("hf", "hf", {"pretrained": folder, "dtype": "float32", "device": "cpu"}),
    ("llmconv", TextModelLM(folder, batch_size=batch), None),
    ("served", "local-completions", {"base_url": sys.argv[5], "model": None, "batch_size": batch}),
):
    if name == "served" and not sys.argv[5]:
        continue
    run = lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=["choice", "text"] + ["perplexity"] * (name != "served"),
        bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=tasks),
    )
    found[name] = {task: [one["filtered_resps"] for one in samples] for task, samples in run["samples"].items()}
print(json.dumps(found))
"""


def evaluated(folder: Path, home: Path, batch: int, address: str = "") -> dict[str, Any]:
    """The harness's answers by model and task; `address` is that of a server of the model, as one more of them."""
    words = ("cat", "lighthouse", "sea", "tree")
    documents = [
        {
            "question": f"the {word} is",
            "answers": [f" {word}ish", " red", " b"],
            "right": index % 3,
            "text": f"Once there was a {word}. It saw {word * (1 + 8 * index)}.",
        }
        for index, word in enumerate(words)
    ]
    tasks = home / "tasks"
    tasks.mkdir()
    (tasks / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    data = {"path": "json", "files": {"test": str(tasks / "documents.jsonl")}}
    for name, text in TASKS.items():
        source = f"dataset_path: {data['path']}\ndataset_kwargs: {{data_files: {json.dumps(data['files'])}}}\n"
        (tasks / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{source}{text}")
    line = [str(HOME / "bin/python"), "-c", RUN, sysconfig.get_path("purelib"), str(folder), str(tasks), str(batch)]
    line.append(address)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "cache")}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def saved(model_type: str, folder: Path, end: str = "~", **config: Any) -> Path:
    """A tiny model with graphs and the special tokens that the harness needs; only the tokenizer names the end."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    save_letters(save_tiny(model_type, folder, **config))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = end, end, "`"
    tokenizer.save_pretrained(folder)
    export(folder, prefill=True, incremental=True)
    return folder


def test_a_server_gives_the_scores_and_texts_of_the_graphs(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama", max_position_embeddings=512)
    with serving(folder) as served:
        found = evaluated(folder, tmp_path, 2, f"{served.address}/v1/completions")
    ours, theirs = found["served"], found["llmconv"]
    assert ours["text"] == theirs["text"]
    for mine, wanted in zip(ours["choice"], theirs["choice"], strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in wanted]
        assert [float(score) for score, _ in mine] == pytest.approx([float(score) for score, _ in wanted], rel=1e-5)


def test_the_tokenizers_end_token_ends_a_text(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = evaluated(saved("llama", tmp_path / "whole" / "llama"), tmp_path / "whole", 1)["hf"]["text"]
    end = next(text[2] for (text,) in whole if len(set(text)) > 3)  # a letter that the model writes

    found = evaluated(saved("llama", tmp_path / "llama", end=end), tmp_path, 1)

    assert found["llmconv"]["text"] == found["hf"]["text"] != whole


@pytest.mark.parametrize(("model_type", "batch"), [("llama", 1), ("llama", 3), ("gemma2", 2), ("gpt2", 4)])
def test_the_scores_are_those_of_the_eager_model(model_type: str, batch: int, tmp_path: Path) -> None:
    found = evaluated(saved(model_type, tmp_path / model_type), tmp_path, batch)
    ours, theirs = found["llmconv"], found["hf"]
    assert ours["text"] == theirs["text"] and any(text for (text,) in ours["text"])
    flat = {name: [answer for document in answers["choice"] for answer in document] for name, answers in found.items()}
    assert [is_greedy for _, is_greedy in flat["llmconv"]] == [is_greedy for _, is_greedy in flat["hf"]]
    scores = {
        name: [float(score) for score, _ in flat[name]] + [float(one) for (one,) in found[name]["perplexity"]]
        for name in found
    }
    assert scores["llmconv"] == pytest.approx(scores["hf"], rel=1e-5)
    assert len(set(scores["hf"])) > 10
