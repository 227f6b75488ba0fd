"""Runs in the environment of vLLM: log-probabilities, greedy tokens and ids of texts of a Hugging Face folder.

Of the request, `folder` is the folder (null to ask for versions alone), `batches` are prompts [prompt][token], `texts`
texts, `new` the number of new tokens, `dtype` vLLM's option of that name, `adapter` a LoRA adapter of PEFT or null,
`tokenizer` whether to open that of the folder, and `output` a folder for `0.npz` and so on by prompt. Of the answer,
`dtype` is the one that vLLM computes in, `ends` are the tokens that end a text, `ids` those of each text with and
without special tokens around it, and `rows` the new tokens of each prompt; without vLLM, `missing` says so.

The model runs without compilation and CUDA graphs, with the cache in its own dtype, all prompts in one batch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

LIKELIEST = 1000  # tokens of a row whose log-probabilities are compared
CACHE = 1 << 30  # bytes of the cache
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has for adapters
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def main() -> None:
    """Answers the request on stdin; stdout is only for the answer, output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.update(SETTINGS)
    request = json.load(sys.stdin)
    versions = installed()
    if not versions:
        answers.write(json.dumps({"missing": "No package metadata was found for vllm"}))
        return
    answer: dict[str, Any] = {"versions": versions}
    try:
        answer |= ran(request) if request["folder"] else {}
    except Exception as error:
        said = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {said}")
    answers.write(json.dumps(answer))
    answers.flush()
    os._exit(0)  # its engine may wait for threads


def installed() -> dict[str, str]:
    """The version of vLLM, whose builds for other devices than CUDA have other names."""
    for name, names in importlib.metadata.packages_distributions().items():
        if name == "vllm":
            return {names[0]: importlib.metadata.version(names[0])}
    return {}


def ran(request: dict[str, Any]) -> dict[str, Any]:
    """The other fields of the answer."""
    vllm, numpy = importlib.import_module("vllm"), importlib.import_module("numpy")
    options: dict[str, Any] = {}
    lora = None
    if request["adapter"]:
        given = json.loads((Path(request["adapter"]) / "adapter_config.json").read_text(encoding="utf-8"))
        rank = max([given.get("r", 8), *(given.get("rank_pattern") or {}).values()])
        options = {"enable_lora": True, "max_lora_rank": next((one for one in RANKS if one >= rank), rank)}
        lora = importlib.import_module("vllm.lora.request").LoRARequest("adapter", 1, request["adapter"])
    model = vllm.LLM(
        request["folder"],
        dtype=request["dtype"],
        skip_tokenizer_init=not request["tokenizer"],
        max_model_len=max(map(len, request["batches"])) + request["new"],
        max_num_seqs=len(request["batches"]),
        max_logprobs=LIKELIEST,
        kv_cache_memory_bytes=CACHE,
        enforce_eager=True,
        enable_prefix_caching=False,
        **options,
    )
    config = model.llm_engine.model_config
    count = min(LIKELIEST, config.get_vocab_size())
    settings = vllm.SamplingParams(
        temperature=0,
        max_tokens=request["new"],
        ignore_eos=True,
        logprobs=count,
        prompt_logprobs=None if lora else count,  # with an adapter vLLM computes no logits within a prompt
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["batches"]]
    found = model.generate(prompts, settings, use_tqdm=False, lora_request=lora)
    for number, one in enumerate(found):
        rows = [*(one.prompt_logprobs or [])[1:], *one.outputs[0].logprobs]
        ranked = [sorted(row.items(), key=lambda item: -item[1].logprob)[:count] for row in rows]
        numpy.savez(
            Path(request["output"]) / f"{number}.npz",
            ids=numpy.array([[token for token, _ in row] for row in ranked]),
            values=numpy.array([[one.logprob for _, one in row] for row in ranked], numpy.float32),
        )
    tokenizer: Any = model.get_tokenizer() if request["tokenizer"] else None
    return {
        "dtype": str(config.dtype).removeprefix("torch."),
        "ends": ends(config, tokenizer),
        "ids": [
            [tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False)]
            for text in request["texts"]
        ],
        "rows": [list(one.outputs[0].token_ids) for one in found],
    }


def ends(config: Any, tokenizer: Any) -> list[int]:
    """Tokens at which vLLM ends a text by default: those of generation_config.json, and the tokenizer's."""
    listed = config.try_get_generation_config().get("eos_token_id")
    found = {*(listed if isinstance(listed, list) else [listed]), getattr(tokenizer, "eos_token_id", None)}
    return sorted(found - {None})


if __name__ == "__main__":
    main()
