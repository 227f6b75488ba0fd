"""PaddleNLP's LoRA; see `llmconv.convert.paddle.lora`."""

from __future__ import annotations

from llmconv.convert.adapters.foreign import Foreign
from llmconv.convert.paddle.lora import is_paddle_adapter, open_paddle_adapter

FOREIGN = Foreign(
    title="PaddleNLP (`lora_config.json` beside `lora_model_state*.pdparams`)",
    detect=is_paddle_adapter,
    open=lambda path, base, alpha: open_paddle_adapter(path, alpha),
)
