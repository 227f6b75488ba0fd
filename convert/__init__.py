if __name__ != "llmconv.convert":
    raise ImportError("import llmconv.convert: `convert` is no top-level package")

from llmconv.convert.lora import merge_lora as merge_lora
