"""Runs in the environment of llama-cpp-python: logits, greedy tokens and ids of texts of a GGUF file.

Of the request, `folder` is the file (null to ask for versions alone), `batches` are prompts [prompt][token], `texts`
texts, `new` the number of new tokens, and `output` a folder for the logits, `0.npy` and so on by prompt. Of the answer,
`ends` are the tokens that end a text, `ids` those of each text with and without special tokens around it, and `rows`
the new tokens of each prompt; without llama-cpp-python, `missing` is the error of its import.

The cache is float32 and attention is computed plainly, on the CPU: the rounding of products is left.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ERROR = 4  # level of those of llama.cpp's messages that are errors
FLOAT32 = 0  # ggml's number of the type, for the cache


def main() -> None:
    """Answers the request on stdin; stdout is only for the answer, output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        llama, numpy = importlib.import_module("llama_cpp"), importlib.import_module("numpy")
        versions = {"llama-cpp-python": str(llama.__version__)}
    except ImportError as error:
        answers.write(json.dumps({"missing": str(error)}))
        return
    answer: dict[str, Any] = {"versions": versions}
    answers.write(json.dumps({**answer, **(ran(llama, numpy, request) if request["folder"] else {})}))


def ran(llama: Any, numpy: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The fields `ends`, `ids` and `rows` of the answer; RuntimeError with llama.cpp's message for a bad file."""
    errors: list[str] = []

    def heed(level: int, text: bytes, _: Any) -> None:
        if level == ERROR:
            errors.append(text.decode("utf-8", "replace").strip())

    heard = llama.llama_log_callback(heed)  # kept until the end: llama.cpp has its address alone
    llama.llama_log_set(heard, None)
    llama.llama_backend_init()
    settings = llama.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(request["folder"].encode(), settings)
    if not model:
        raise RuntimeError(next(filter(None, errors), "it does not open the file"))
    vocabulary = llama.llama_model_get_vocab(model)
    size = llama.llama_vocab_n_tokens(vocabulary)
    rows = []
    for number, prompt in enumerate(request["batches"]):
        logits, row = generated(llama, numpy, model, prompt, request["new"], size)
        numpy.save(Path(request["output"]) / f"{number}.npy", logits)
        rows.append(row)
    return {
        "ends": [token for token in range(size) if llama.llama_vocab_is_eog(vocabulary, token)],
        "ids": [[encoded(llama, vocabulary, text, special) for special in (True, False)] for text in request["texts"]],
        "rows": rows,
    }


def encoded(llama: Any, vocabulary: Any, text: str, special: bool) -> list[int]:
    """The ids of a text, in which the names of special tokens are these tokens; `special` adds those around it."""
    data = text.encode()
    found = (llama.llama_token * (len(data) + 8))()
    count = llama.llama_tokenize(vocabulary, data, len(data), found, len(found), special, True)
    if count < 0:
        raise RuntimeError(f"it needs {-count} tokens for {len(data)} bytes of text")
    return list(found[:count])


def generated(llama: Any, numpy: Any, model: Any, prompt: list[int], new: int, size: int) -> tuple[Any, list[int]]:
    """Logits float32 [prompt and new tokens but the last, vocabulary], and the `new` tokens of greedy search.

    The prompt is one call, each new token another over the cache. `size` is that of the vocabulary.
    """
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(prompt) + new
    settings.type_k = settings.type_v = FLOAT32
    settings.flash_attn_type, settings.offload_kqv, settings.op_offload = 0, False, False
    context = llama.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("it makes no context for the model")
    found, row, tokens, past = [], [], prompt, 0
    while True:
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, past + at, 1, 1
            batch.seq_id[at][0] = 0
        if code := llama.llama_decode(context, batch):
            raise RuntimeError(f"it returns {code} for {len(tokens)} tokens after {past}")
        llama.llama_batch_free(batch)
        shape = len(tokens), size
        found.append(numpy.ctypeslib.as_array(llama.llama_get_logits(context), shape=shape).copy())
        row.append(int(found[-1][-1].argmax()))
        past, tokens = past + len(tokens), row[-1:]
        if len(row) == new:
            llama.llama_free(context)
            return numpy.concatenate(found), row


if __name__ == "__main__":
    main()
