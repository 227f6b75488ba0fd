"""The process of one candidate: reads batches as JSON lines from stdin, writes times and tokens to stdout.

Needs only the standard library and the measured runtime, so that it also runs in another environment. All runtimes do
the same: greedy search without an end token.

    arguments   KIND FOLDER THREADS PROVIDER
    at start    {"ready": {package: version}}
    request     {"prompts": [[token, …], …], "new": n, "expected": [[token, …], …]}, prompts of one length; `expected`
                are the tokens of the first candidate, among which GenAI's end token must not be
    answer      {"times": [seconds from the start to each token], "tokens": [[token, …], …], "peak": bytes,
                "guessed": number of tokens that came from the call of the token before}
    or          {"error": text, "hint": text}, the hint empty if there is none
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

Answer = tuple[list[float], list[list[int]]] | tuple[list[float], list[list[int]], int]
Run = Callable[[list[list[int]], int], Answer]


def open_onnx(folder: str, threads: int, provider: str, prepack: bool = False, speculate: str = "off") -> Run:
    """llmconv's own loop over its graphs, packed with `prepack`; decodes every token if there is a tokenizer."""
    from llmconv.bench.own_loop import open_text_model  # noqa: PLC0415 - other runtimes' environments lack llmconv
    from llmconv.generation import GenerationSettings  # noqa: PLC0415 - as above

    opened = open_text_model(folder, threads, prepack, provider, speculate)

    def run(prompts: list[list[int]], new: int) -> Answer:
        tokens: list[list[int]] = [[] for _ in prompts]
        times, guessed, started = [], 0, time.perf_counter()
        for piece in opened.stream(prompts, GenerationSettings(max_new_tokens=new)):
            if piece.token is not None:
                tokens[piece.index].append(piece.token)
                guessed += piece.guessed
            if piece.token is not None and piece.index == len(prompts) - 1:
                times.append(time.perf_counter() - started)
        return times, tokens, guessed

    return run


def open_torch(folder: str, threads: int, provider: str) -> Run:
    """`generate` of transformers over the eager model: in float32 on the CPU, elsewhere in the dtype of its weights."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(threads)
    dtype = torch.float32 if provider == "cpu" else "auto"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return _hugging_face(model.to(provider).eval(), provider)


def open_optimum(folder: str, threads: int, provider: str) -> Run:
    """`generate` of optimum's `ORTModelForCausalLM`."""
    importlib.import_module("torch").set_num_threads(threads)
    library = importlib.import_module("onnxruntime")
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    model = importlib.import_module("optimum.onnxruntime").ORTModelForCausalLM
    names = {name.removesuffix("ExecutionProvider").lower(): name for name in library.get_available_providers()}
    if provider not in names:
        raise ValueError(f"its onnxruntime has no provider `{provider}`; it has {', '.join(names)}")
    return _hugging_face(model.from_pretrained(folder, session_options=options, provider=names[provider]), provider)


def _hugging_face(model: Any, device: str) -> Run:
    """Greedy search by `generate`; a stopping criterion that never stops takes the time of every step."""
    torch = importlib.import_module("torch")
    config = importlib.import_module("transformers").GenerationConfig

    def run(prompts: list[list[int]], new: int) -> Answer:
        ids, times, started = torch.tensor(prompts, device=device), [], time.perf_counter()

        def see(*_: Any, **__: Any) -> Any:
            times.append(time.perf_counter() - started)
            return torch.zeros(len(prompts), dtype=torch.bool, device=device)

        settings = config(max_new_tokens=new, do_sample=False, pad_token_id=0, use_cache=True)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, stopping_criteria=[see]
        )
        return times, found[:, ids.shape[1] :].tolist()

    model.generation_config = config()  # otherwise the model's own end token would end it
    return run


class Genai:
    """The generator of ONNX Runtime GenAI; the end and padding token it needs is one that the texts do not have."""

    def __init__(self, folder: str, threads: int, provider: str) -> None:
        self._library, self._numpy = importlib.import_module("onnxruntime_genai"), importlib.import_module("numpy")
        self._folder, self._threads = folder, threads
        self._vocabulary = json.loads((Path(folder) / "genai_config.json").read_text())["model"]["vocab_size"]
        self._open(self._vocabulary - 1)

    def _open(self, end: int) -> None:
        self._end, config = end, self._library.Config(self._folder)
        options = {"session_options": {"intra_op_num_threads": self._threads}}
        model = {"eos_token_id": end, "pad_token_id": end, "decoder": options}  # a list would be appended
        config.overlay(json.dumps({"model": model}))
        self._model = self._library.Model(config)

    def avoid(self, tokens: set[int]) -> None:
        """Chooses an end and padding token that is not one of `tokens`."""
        if self._end in tokens:
            self._open(next(token for token in reversed(range(self._vocabulary)) if token not in tokens))

    def __call__(self, prompts: list[list[int]], new: int) -> Answer:
        started, times = time.perf_counter(), []
        length = len(prompts[0]) + new
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), **GREEDY)
        generator = self._library.Generator(self._model, params)
        generator.append_tokens(self._numpy.array(prompts if len(prompts) > 1 else prompts[0], dtype="int32"))
        while not generator.is_done():
            generator.generate_next_token()
            times.append(time.perf_counter() - started)
        return times, [generator.get_sequence(row).tolist()[-new:] for row in range(len(prompts))]


# plain greedy search of GenAI, whatever `genai_config.json` has
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# runtime to the function that opens a folder, and the packages whose versions are reported
KINDS: dict[str, tuple[Callable[[str, int, str], Run], tuple[str, ...]]] = {
    "onnx": (open_onnx, ("llmconv", "onnxruntime")),
    "packed": (partial(open_onnx, prepack=True), ("llmconv", "onnxruntime")),
    "lookup": (partial(open_onnx, prepack=True, speculate="lookup"), ("llmconv", "onnxruntime")),
    "torch": (open_torch, ("transformers", "torch")),
    "optimum": (open_optimum, ("optimum-onnx", "transformers", "onnxruntime")),
    "genai": (Genai, ("onnxruntime-genai", "onnxruntime")),
}


def serve(kind: str, folder: str, threads: int, provider: str, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answers requests for one of `KINDS` until stdin ends; torch computes on the device `provider`."""
    opener, packages = KINDS[kind]
    try:
        run = opener(folder, threads, provider)
    except Exception as error:  # any library can raise anything
        return answer({"error": _first_line(error), "hint": str(getattr(error, "hint", "") or "")})
    answer({"ready": {name: _version(name) for name in packages}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if hasattr(run, "avoid"):
                run.avoid({token for row in request["prompts"] + request["expected"] for token in row})
            _reset_peak()
            times, tokens, *guessed = run(request["prompts"], request["new"])
            answer({"times": times, "tokens": tokens, "peak": _peak(), "guessed": sum(guessed)})
        except Exception as error:
            answer({"error": _first_line(error)})
    return None


def _first_line(error: Exception) -> str:
    """The first line of an error message; the name of the class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _version(package: str) -> str:
    """The version that the module says, since packages for other devices have other names; else the package's."""
    try:
        module = sys.modules.get(package.replace("-", "_"))
        return str(getattr(module, "__version__", None) or importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _reset_peak() -> None:
    """Resets the peak of the resident set to its present size (`proc_pid_clear_refs(5)`; only on Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Peak of the resident set since `_reset_peak`, in bytes."""
    with suppress(OSError, IndexError, ValueError):
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Runs `serve`; stdout is only for answers, output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    kind, folder, threads, provider = sys.argv[1:]
    serve(kind, folder, int(threads), provider, answer)


if __name__ == "__main__":
    main()
