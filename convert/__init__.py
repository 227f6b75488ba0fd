import sys

if __name__ != "llmconv.convert":
    raise ImportError("import llmconv.convert: `convert` is no top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on Windows itself: use the Windows Subsystem for Linux")

from llmconv.convert.delta import apply_delta as apply_delta
from llmconv.convert.delta import extract_delta as extract_delta
from llmconv.convert.from_hf import from_hf as from_hf
from llmconv.convert.inspect import inspect as inspect
from llmconv.convert.lora import merge_lora as merge_lora
from llmconv.convert.to_hf import to_hf as to_hf
