"""MindFormers' ChatGLM-6B in the names of its published code.

Source: mindformers `models/glm/{glm,glm_config,convert_reversed}.py`: only norms and the embedding have other names.
"""

from __future__ import annotations

from llmconv.convert.algebra.operations import rename
from llmconv.convert.formats.mindformers.config import RunConfig
from llmconv.convert.formats.mindformers.converted_model import ConvertedModel, check_embedding_sizes, require_embedding
from llmconv.convert.formats.mindformers.names import CHATGLM_6B
from llmconv.convert.models.own_families import chatglm, needs_code
from llmconv.convert.models.trusted_code import trusted_code
from llmconv.errors import MalformedInput, UnsupportedInput
from llmconv.tensors import LazyTensor


def build_chatglm_6b(run: RunConfig, tensors: dict[str, LazyTensor]) -> ConvertedModel:
    """ChatGLM-6B as its own code has it.

    Raises:
        UnsupportedInput: its code is not given, or the run has a prefix.
        MalformedInput: names and configuration contradict each other.
    """
    reason = "it has two rotary positions per token, which no model of transformers has"
    code = needs_code(trusted_code(run.fields), run.source, "a ChatGLM-6B", reason)
    if run.fields.get("pre_seq_len"):
        raise UnsupportedInput(
            f"`{run.source}` is a ChatGLM-6B with a prefix (`pre_seq_len`)", hint="convert the model without the prefix"
        )
    renamed = {target: tensors[name] for target, name in rename(tensors, CHATGLM_6B, run.source).items()}
    embedding = require_embedding(run, renamed.get("transformer.word_embeddings.weight"))
    up = renamed.get("transformer.layers.0.mlp.dense_h_to_4h.weight")
    heads = run.integer("num_heads", "num_attention_heads", default=32)
    if embedding.shape[1] % (4 * heads):
        raise MalformedInput(
            f"the hidden size {embedding.shape[1]} of `{run.source}` is not a multiple of four times {heads} heads",
            hint="the configuration belongs to another model; give the YAML file of the run with `--config`",
        )
    fields = {
        **check_embedding_sizes(run, embedding),
        "num_layers": run.integer("num_layers", "num_hidden_layers", default=28),
        "num_attention_heads": heads,
        "inner_hidden_size": up.num_rows if up else 0,
        "max_sequence_length": run.integer("seq_length", default=2048),
        "layernorm_epsilon": run.number("layernorm_epsilon", default=1e-5),
        "position_encoding_2d": True,
        **run.tokens(bos_token_id=None, eos_token_id=None, pad_token_id=None, gmask_token_id=None),
    }
    return ConvertedModel(*chatglm(renamed, fields, code, run.source))
