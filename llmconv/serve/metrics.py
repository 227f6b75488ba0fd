"""What the server counts: a page for Prometheus, and a line of log for each request.

Neither has texts of requests or answers; the log has those of requests with `--log-prompts` alone. Source of the
format: Prometheus, "Exposition formats", the text format 0.0.4.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
CUT = 2000  # characters of a request in the log
MOST_NAMES, MOST_OF_NAME = 8, 40  # ignored fields in the log, and characters of each


@dataclass
class Metrics:
    """Counters since the start; for one thread, that of the event loop.

    Attributes:
        log: takes the line of each request; None for no log.
        shows_prompts: whether the lines have the texts of requests.
    """

    log: Callable[[str], None] | None = None
    shows_prompts: bool = False
    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # by path, model and status
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and model
    first: Counter[float] = field(default_factory=Counter)  # times to the first token, by bucket
    first_seconds: float = 0.0

    def begin(self, path: str) -> RequestRecord:
        return RequestRecord(self, path)

    def text(self, load: Mapping[str, int]) -> str:
        """The page; `load` has the numbers of `active` and `waiting` requests."""
        return "\n".join((*self._lines(load), ""))

    def _lines(self, load: Mapping[str, int]) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests that have ended, by HTTP status.")
        for (path, model, status), count in sorted(self.requests.items()):
            yield f"llmconv_requests_total{_labels(path=path, model=model, status=str(status))} {count}"
        for kind, words in (("prompt", "Tokens of prompts"), ("generation", "New tokens")):
            yield from _head(f"{kind}_tokens_total", "counter", f"{words} of requests that have ended.")
            for (one, model), count in sorted(self.tokens.items()):
                if one == kind:
                    yield f"llmconv_{kind}_tokens_total{_labels(model=model)} {count}"
        for name, words in (("active", "Requests whose answers are generated."), ("waiting", "Requests that wait.")):
            yield from _head(f"requests_{name}", "gauge", words)
            yield f"llmconv_requests_{name} {load[name]}"
        name = "time_to_first_token_seconds"
        yield from _head(name, "histogram", "From the body of a request to the first token of its answer.")
        total = 0
        for most in (*BUCKETS, float("inf")):
            total += self.first[most]
            yield f"llmconv_{name}_bucket{_labels(le='+Inf' if most == float('inf') else str(most))} {total}"
        yield f"llmconv_{name}_sum {self.first_seconds:.6f}"
        yield f"llmconv_{name}_count {total}"


class RequestRecord:
    """One request while it is answered; `model` is the name of the one that answers, empty until it is known."""

    def __init__(self, metrics: Metrics, path: str) -> None:
        self._metrics, self._path, self._started = metrics, path, time.monotonic()
        self._first: float | None = None
        self._ended = False
        self.model, self.request = "", ""
        self.unknown: Sequence[str] = ()  # names of fields that have no effect

    def note(self, request: Any) -> None:
        """Keeps the text of a request for the log, if the log has it."""
        if self._metrics.shows_prompts:
            self.request = json.dumps(request)[:CUT]  # in ASCII, so no text can end the line or move the cursor

    def token(self) -> None:
        """Notes the time of the first token."""
        if self._first is None:
            self._first = time.monotonic() - self._started

    def end(self, status: int, prompt: int = 0, new: int = 0) -> None:
        """Counts and logs the request, once, with its numbers of tokens."""
        if self._ended:
            return
        self._ended = True
        metrics, seconds = self._metrics, time.monotonic() - self._started
        metrics.requests[self._path, self.model, status] += 1
        metrics.tokens["prompt", self.model] += prompt
        metrics.tokens["generation", self.model] += new
        if self._first is not None:
            metrics.first[next((most for most in BUCKETS if self._first <= most), float("inf"))] += 1
            metrics.first_seconds += self._first
        if metrics.log:
            first = "-" if self._first is None else f"{self._first:.3f}s"
            counts = f"prompt={prompt} new={new} first={first} total={seconds:.3f}s"
            shown = f" request={self.request}" if self.request else ""
            if self.unknown:
                names = [name[:MOST_OF_NAME] for name in self.unknown[:MOST_NAMES]]
                shown = f" ignored={json.dumps(names, separators=(',', ':'))}{shown}"
            metrics.log(f"{self._path} {status} model={self.model or '-'} {counts}{shown}")


def _head(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP llmconv_{name} {words}"
    yield f"# TYPE llmconv_{name} {kind}"


def _labels(**values: str) -> str:
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in values.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(values, quoted, strict=True)) + "}"
