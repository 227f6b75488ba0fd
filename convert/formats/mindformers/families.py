"""The model families of MindFormers; each is detected by a tensor name that only it has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmconv.convert.formats.mindformers.chatglm_6b import build_chatglm_6b
from llmconv.convert.formats.mindformers.converted_model import MindFormersFamily
from llmconv.convert.formats.mindformers.glm import build_glm, store_glm
from llmconv.convert.formats.mindformers.gpt import build_bloom, build_gpt2, store_bloom, store_gpt2
from llmconv.convert.formats.mindformers.llama import build_core, build_llama, build_qwen, store_core, store_llama
from llmconv.errors import UnsupportedInput, listing
from llmconv.tensors import LazyTensor

FAMILIES = (
    MindFormersFamily(
        re.compile(r"model\.(?:layers\.\d+\.attention|tok_embeddings)\."),
        build_llama,
        {"llama": store_llama, "qwen2": store_llama},
    ),
    MindFormersFamily(re.compile(r"transformer\.(?:layers\.\d+\.attention\.w[qkvo_]|wte\.)"), build_qwen),
    MindFormersFamily(re.compile(r"^decoder\.layers\."), build_core, {"qwen3": store_core}),
    MindFormersFamily(re.compile(r"^backbone\."), build_gpt2, {"gpt2": store_gpt2}),
    MindFormersFamily(
        re.compile(r"^(?:transformer\.)?blocks\.\d+\.attention\.dense1\."), build_bloom, {"bloom": store_bloom}
    ),
    MindFormersFamily(re.compile(r"^transformer\.encoder\."), build_glm, {"glm": store_glm}),
    MindFormersFamily(re.compile(r"^transformer\.layers\.\d+\.attention\.query_key_value\."), build_chatglm_6b),
)


def family_of(tensors: Mapping[str, LazyTensor], source: str) -> MindFormersFamily:
    """The family whose `sign` matches a tensor name.

    Raises:
        UnsupportedInput: no family matches.
    """
    for family in FAMILIES:
        if any(family.sign.search(name) for name in tensors):
            return family
    raise UnsupportedInput(
        f"`{source}` is a MindSpore checkpoint of an unknown model: it holds {listing(sorted(tensors)) or 'nothing'}",
        hint="supported are llama, qwen, internlm, baichuan, gpt2, bloom and chatglm2/3 in MindFormers' names",
    )
