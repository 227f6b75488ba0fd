"""The process of one candidate: times of a prompt and of steps, and logits, for llmconv's graphs, GenAI and llama.cpp.

Needs only numpy and the measured runtime, so that it also runs in another environment; `Worker` starts it.

    arguments   KIND PATH THREADS
    at start    {"ready": true}
    request     {"ids": [token, …], "steps": n}: a prompt, and n steps of one given token each
    answer      {"prompt": [wall, CPU], "steps": [wall, CPU]}, seconds; CPU is that of all threads
    request     {"ids": [token, …], "to": path}: logits of all positions as an .npy file, float32 [tokens, vocabulary]
    answer      {"done": true}
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

STEP_TOKEN, CONTEXT, BATCH = 5, 4096, 2048


class Runtime(Protocol):
    """A model that reads tokens."""

    def prompt(self, ids: list[int]) -> None:
        """Starts a new sequence."""

    def step(self, token: int) -> None:
        """Continues it."""

    def logits(self, ids: list[int]) -> Any:
        """Logits of a new sequence, float32 `[tokens, vocabulary]`."""


class Graphs:
    """llmconv's graphs, weights packed."""

    def __init__(self, folder: str, threads: int) -> None:
        runners = importlib.import_module("llmconv.runtime.onnxruntime.runner")
        settings = runners.SessionSettings(threads=threads, prepack=True)
        self._positions = importlib.import_module("llmconv.runtime.runner").default_positions
        self._runner = runners.OrtRunner.from_folder(Path(folder), settings)
        self._past: Any = None

    def _run(self, run: Callable[..., Any], ids: list[int], past: Any) -> Any:
        done = past.length if past else 0
        mask = np.ones((1, done + len(ids)), dtype=np.int64)
        result = run(np.array([ids], dtype=np.int64), mask, self._positions(mask, len(ids)), past)
        self._past = result.present
        return result.logits

    def prompt(self, ids: list[int]) -> None:
        """See `Runtime`."""
        self._run(self._runner.prefill, ids, None)

    def step(self, token: int) -> None:
        """See `Runtime`."""
        self._run(self._runner.decode, [token], self._past)

    def logits(self, ids: list[int]) -> Any:
        """See `Runtime`."""
        return self._run(self._runner.prefill, ids, None)[0]


class Genai:
    """A folder of ONNX Runtime GenAI."""

    def __init__(self, folder: str, threads: int) -> None:
        self._library = importlib.import_module("onnxruntime_genai")
        config = self._library.Config(folder)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = self._library.Model(config)
        self._generator: Any = None

    def prompt(self, ids: list[int]) -> None:
        """See `Runtime`."""
        settings = self._library.GeneratorParams(self._model)
        settings.set_search_options(max_length=CONTEXT, do_sample=False)
        self._generator = self._library.Generator(self._model, settings)
        self._generator.append_tokens(np.array(ids, dtype=np.int32))

    def step(self, token: int) -> None:
        """See `Runtime`."""
        self._generator.append_tokens(np.array([token], dtype=np.int32))

    def logits(self, ids: list[int]) -> Any:
        """See `Runtime`."""
        self.prompt(ids)
        return self._generator.get_output("logits")[0]


class LlamaCpp:
    """A GGUF file in llama.cpp, with its defaults but for threads and lengths."""

    def __init__(self, file: str, threads: int) -> None:
        self._library = library = importlib.import_module("llama_cpp")
        self._model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch = CONTEXT, BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, settings)

    def _decode(self, batch: Any) -> None:
        if self._library.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        self._library.llama_synchronize(self._context)

    def _continue(self, ids: list[int]) -> None:
        tokens = (self._library.llama_token * len(ids))(*ids)
        self._decode(self._library.llama_batch_get_one(tokens, len(ids)))

    def prompt(self, ids: list[int]) -> None:
        """See `Runtime`."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        self._continue(ids)

    def step(self, token: int) -> None:
        """See `Runtime`."""
        self._continue([token])

    def logits(self, ids: list[int]) -> Any:
        """See `Runtime`."""
        library, count = self._library, len(ids)
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        tokens = (library.llama_token * count)(*ids)
        batch = library.llama_batch_get_one(tokens, count)
        wanted = (ctypes.c_int8 * count)(*[1] * count)
        batch.logits = ctypes.cast(wanted, ctypes.POINTER(ctypes.c_int8))
        self._decode(batch)
        return np.ctypeslib.as_array(library.llama_get_logits(self._context), (count, self._vocabulary))


KINDS: dict[str, Callable[[str, int], Runtime]] = {"graphs": Graphs, "genai": Genai, "llama.cpp": LlamaCpp}


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def answer(runtime: Runtime, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    ids = request["ids"]
    if "to" in request:
        np.save(request["to"], np.asarray(runtime.logits(ids), dtype=np.float32))
        return {"done": True}

    def steps() -> None:
        for _ in range(request["steps"]):
            runtime.step(STEP_TOKEN)

    return {"prompt": timed(lambda: runtime.prompt(ids)), "steps": timed(steps)}


def main(kind: str, path: str, threads: str) -> None:
    """Answers requests until stdin ends; stdout is only for answers, output of libraries goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        runtime = KINDS[kind](path, int(threads))
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(runtime, json.loads(line))), file=answers, flush=True)
