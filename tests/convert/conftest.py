"""What the conversion tests share: genuine checkpoints, and a judge that loads a folder with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from llmconv.causal_lm import mtp_tensors

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def composer() -> Path:
    """The folder of genuine Composer checkpoints."""
    return FIXTURES / "composer"


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers itself copies the code that it imports: one folder, since it remembers the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="session")
def dcp() -> Path:
    """The folder of genuine distributed checkpoints."""
    return FIXTURES / "dcp"


@pytest.fixture(scope="session")
def meta() -> Path:
    """The folder of genuine Meta checkpoints."""
    return FIXTURES / "meta"


@pytest.fixture(scope="session")
def mindspore() -> Path:
    """The folder of genuine MindSpore files."""
    return FIXTURES / "mindspore"


@pytest.fixture(scope="session")
def mindformers() -> Path:
    """The folder of genuine MindFormers checkpoints."""
    return FIXTURES / "mindformers"


def field(number: int, value: int | bytes) -> bytes:
    """One field of a protobuf message: a number, or bytes."""
    if isinstance(value, bytes):
        return bytes([number << 3 | 2]) + varint(len(value)) + value
    return bytes([number << 3]) + varint(value)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    low = bytes([value & 0x7F | (0x80 if value > 0x7F else 0)])
    return low + (varint(value >> 7) if value > 0x7F else b"")


@pytest.fixture(scope="session")
def encode_field() -> Callable[[int, int | bytes], bytes]:
    """`encode_field(number, value)` is one field of a protobuf message."""
    return field


@pytest.fixture
def save_ckpt() -> Callable[..., Path]:
    """`save_ckpt(path, {name: array}, chunk=bytes)` writes as MindSpore's `save_checkpoint` does."""

    def save(path: Path, tensors: Mapping[str, Any], chunk: int = 512 << 20) -> Path:
        with open(path, "wb") as file:
            for name, array in tensors.items():
                kind = array.dtype.name.title().replace("Uint", "UInt").replace("Bfloat", "BFloat")
                head = b"".join(field(1, size) for size in array.shape) + field(2, kind.encode())
                content = array.tobytes()
                for start in range(0, len(content), chunk):
                    tensor = head + field(3, content[start : start + chunk])
                    file.write(field(1, field(1, name.encode()) + field(2, tensor)))
        return path

    return save


@pytest.fixture
def logits_of() -> Callable[..., Any]:
    """`logits_of(folder, ids, mask)`: float32 logits of the model as transformers loads it, no weight missing."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def run(folder: Path, ids: Any, mask: Any = None) -> Any:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        heads = mtp_tensors([*loading["unexpected_keys"]], model.config.to_dict())  # which transformers leaves out
        loading["unexpected_keys"] -= {*heads}
        assert not any(loading.values()), loading
        inputs = {} if mask is None else {"attention_mask": torch.from_numpy(np.asarray(mask))}
        with torch.no_grad():
            return model.eval()(torch.from_numpy(np.asarray(ids)), **inputs).logits.numpy()

    return run
