if __name__ != "llmconv.verify":
    raise ImportError("import llmconv.verify: `verify` is no top-level package")

from llmconv.verify.report import Check, Report
from llmconv.verify.session import verify

__all__ = ["Check", "Report", "verify"]
