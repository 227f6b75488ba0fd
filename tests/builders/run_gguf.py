"""Logits of llama.cpp for a GGUF file: `python run_gguf.py FILE TOKENS OUT.npy`, in the environment `llama.cpp`."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def main(file: str, tokens: str, output: str) -> None:
    """Saves float32 [tokens, vocabulary]; the cache is in float32."""
    import llama_cpp as llama  # type: ignore[import-not-found] # noqa: PLC0415 - of its environment alone

    ids: list[int] = json.loads(tokens)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    assert model, "llama.cpp refuses the file"
    settings: Any = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads, settings.type_k, settings.type_v, settings.flash_attn_type = 1, 0, 0, 0
    context = llama.llama_init_from_model(model, settings)
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
        batch.seq_id[at][0] = 0
    assert llama.llama_decode(context, batch) == 0
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)) or llama.llama_model_n_embd(model)
    shape = len(ids), size
    np.save(output, np.ctypeslib.as_array(llama.llama_get_logits(context), shape=shape).copy())


if __name__ == "__main__":
    main(*sys.argv[1:])
