"""The model types of transformers' causal-LM table without an input map, with the reason for each."""

from __future__ import annotations

INDEXER = "its sparse attention chooses keys with an indexer, whose own keys are a third kind of cache"
NO_CACHE = "transformers has no cache of keys and values for it"
FEATURES = "its decoder also reads features of images or sounds, which graphs of text do not take"
STATES = "its layers keep states of a kind that no graph computes yet"
LOOP = "its code for experts loops over values, which cannot be traced"
SOUNDS = "it generates codes of sounds, several for each step"
DRAFT = "it continues the hidden states of another model, which a graph alone does not have"

NOT_EXPORTED: dict[str, str] = {
    "axk2": INDEXER,
    "blt": "it reads bytes in patches, whose lengths a second model decides",
    "cpmant": "its attention adds segments and a prompt of its own before the tokens",
    "dbrx": LOOP,
    "deepseek_v32": INDEXER,
    "deepseek_v4": "its attention keeps compressed keys next to those of a window",
    "dots3_note": INDEXER,
    "dots3_note_text": INDEXER,
    "emu3": "its images are tokens of a second vocabulary, which a quantizer of images makes",
    "gemma3n": f"{FEATURES}; its text model alone is `gemma3n_text`",
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
    "git": FEATURES,
    "glm_moe_dsa": INDEXER,
    "hrm_text": "it runs the same layers several times for each token, with a cache entry for each run",
    "hy_v4": INDEXER,
    "inkling2_text": STATES,
    "inkling_text": STATES,
    "jetmoe": LOOP,
    "longcat_flash": LOOP,
    "minimax": STATES,
    "mllama": FEATURES,
    "musicgen": SOUNDS,
    "musicgen_melody": SOUNDS,
    "openai-gpt": NO_CACHE,
    "prophetnet": "its attention predicts several tokens at once, in streams of their own",
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": STATES,
    "reformer": "its attention sorts tokens into buckets by their hashes",
    "rwkv": STATES,
    "xglm": "its table of positions has a row of zeros, which `verify` cannot tell from a changed graph",
    "xlm": NO_CACHE,
    "xlnet": "its cache keeps the hidden states of earlier texts instead of keys and values",
    "xlstm": STATES,
    "xmod": "it needs the language of each text as an input",
    "zamba": STATES,
    "zaya": STATES,
}
"""The reason in words, by `model_type`; `llmconv families` and docs/families.md list them."""

OWN_CODE: dict[str, str] = {
    "baichuan": "its code is its own, not of transformers, and no input map describes it",
    "chatglm": "its code is its own, not of transformers, and no input map describes it; ChatGLM2 and later are `glm`",
}
"""Types that conversions write for the code of their publishers."""
