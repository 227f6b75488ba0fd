import sys

if __name__ != "llmconv.verify":
    raise ImportError("import llmconv.verify: `verify` is no top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on Windows itself: use the Windows Subsystem for Linux")

from llmconv.verify.foreign.maps import register_port_map
from llmconv.verify.foreign.ports import PortMap
from llmconv.verify.foreign.session import verify_graphs
from llmconv.verify.report import Check, Report
from llmconv.verify.session import verify

__all__ = ["Check", "PortMap", "Report", "register_port_map", "verify", "verify_graphs"]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
