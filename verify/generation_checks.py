"""The checks of `verify --client` after those of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmconv.runtime.onnxruntime.float32_graph import half_precision
from llmconv.verify.clients.client import Client
from llmconv.verify.clients.client_files import ClientFiles
from llmconv.verify.clients.comparison import ClientChecks
from llmconv.verify.clients.expected_tokens import EagerLogits, LogitsSource, OwnLogits
from llmconv.verify.float_folder import FloatFolder
from llmconv.verify.verification import Checking


def then_generation(checks: Checking, folder: FloatFolder, clients: Sequence[Client], *, has_codes: bool) -> Checking:
    """The checks of the graphs, then those of the tokens that clients generate.

    Args:
        checks: of the graphs.
        folder: of the graphs.
        clients: to run.
        has_codes: weights or caches are quantized. The tokens are then those of llmconv's own loop: what the codes
            change is measured by the checks before.
    """
    found = yield from checks
    source: Callable[[], LogitsSource] = partial(OwnLogits.of, folder.verified)
    if not has_codes:
        half = half_precision(next(iter(folder.verified.models.values())))
        model = folder.rounded_model() if half else folder.reference
        source = partial(EagerLogits, model, half or "float32", folder.code)
    files = ClientFiles(folder.verified, folder.reference)
    yield from ClientChecks(clients, folder.verified.path, folder.reference, source, files).checks()
    return found
