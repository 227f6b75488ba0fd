"""PaddleNLP's LoRA; see `llmconv.convert.formats.paddle.lora`."""

from __future__ import annotations

from llmconv.convert.adapters.other_tools import AdapterFormat
from llmconv.convert.formats.paddle.lora import is_paddle_adapter, open_paddle_adapter

ADAPTER = AdapterFormat(
    title="PaddleNLP (`lora_config.json` next to `lora_model_state*.pdparams`)",
    detect=is_paddle_adapter,
    open=lambda path, base, alpha: open_paddle_adapter(path, alpha),
)
