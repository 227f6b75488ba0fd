"""sentence-transformers and fastembed open the folder of `--task embed` and give llmconv's embeddings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from benchmarks import environments
from llmconv.embedding import Embedder
from llmconv.export.exporter import export
from llmconv.serve.app import make_app
from llmconv.serve.embeddings import ServedEmbedder
from llmconv.serve.scheduler import Scheduler
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.talking import save_letters

PYTHON = Path(__file__).parents[2] / environments.folder("embedders") / "bin/python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PYTHON.parents[1] / "complete").exists(), reason="`make clients` makes the environment"),
]

TEXTS = ["hello world", "the sea is blue, and wide today", "x"]

RUN = """
import json, sys
import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
from sentence_transformers import SentenceTransformer
folder, pooling, texts = sys.argv[1], PoolingType[sys.argv[2]], json.loads(sys.argv[3])
model = SentenceTransformer(folder, backend="onnx", device="cpu", model_kwargs={"file_name": "model.onnx"})
found = {"sentence-transformers": model.encode(texts).tolist()}
cut = SentenceTransformer(
    folder, backend="onnx", device="cpu", truncate_dim=24, model_kwargs={"file_name": "model.onnx"}
).encode(texts, normalize_embeddings=True)
TextEmbedding.add_custom_model(
    model="local/model", pooling=pooling, normalization=True, sources=ModelSource(hf="local/model"), dim=64,
    model_file="model.onnx",
)
opened = TextEmbedding("local/model", specific_model_path=folder)
found["fastembed"] = [row.tolist() for row in opened.embed(texts)]
print(json.dumps([found, cut.tolist()]))
"""


@pytest.mark.parametrize(("kind", "mode"), [("qwen3", "lasttoken"), ("qwen3", "mean"), ("gemma3_text", "mean")])
def test_clients_give_the_embeddings_of_llmconv(kind: str, mode: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    folder = save_letters(save_modules(save_model(tmp_path / kind, kind), mode))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.model_max_length = "~", 128
    tokenizer.padding_side = "left" if mode == "lasttoken" else "right"
    tokenizer.save_pretrained(folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"  # the clients' transformers is older
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    export(folder, task="embed")
    pooling = {"lasttoken": "LAST_TOKEN", "mean": "MEAN"}[mode]
    done = subprocess.run(
        [str(PYTHON), "-c", RUN, str(folder), pooling, json.dumps(TEXTS)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = Embedder(folder).encode(TEXTS)
    found, cut = json.loads(done.stdout.splitlines()[-1])
    for name, rows in found.items():
        np.testing.assert_allclose(np.array(rows), expected, atol=1e-6, err_msg=name)
    app = make_app(ServedEmbedder(Embedder(folder), "m"), Scheduler(1, 4))
    with TestClient(app, base_url="http://localhost") as client:
        for wanted, dimensions in ((found["sentence-transformers"], None), (cut, 24)):
            answer = client.post("/v1/embeddings", json={"input": TEXTS, "dimensions": dimensions}).json()["data"]
            np.testing.assert_allclose([one["embedding"] for one in answer], wanted, atol=1e-6)
