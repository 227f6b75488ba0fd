"""Graphs against the eager model: `verify` for folders of llmconv, `verify_graphs` for other exporters."""

import sys

if __name__ != "llmconv.verify":
    raise ImportError("import llmconv.verify: `verify` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

from llmconv.verify.other_exporters.maps import register_port_map
from llmconv.verify.other_exporters.port_map import PortMap
from llmconv.verify.other_exporters.run import verify_graphs
from llmconv.verify.results.report import Check, Report
from llmconv.verify.run import verify

__all__ = ["Check", "PortMap", "Report", "register_port_map", "verify", "verify_graphs"]


def __dir__() -> list[str]:
    """The public names."""
    return __all__
