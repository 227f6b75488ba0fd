"""Graphs against the eager model: `verify` for folders of llmconv, `verify_graphs` for other exporters."""

import sys
from typing import TYPE_CHECKING

from llmconv.requirements import lazily

if __name__ != "llmconv.verify":
    raise ImportError("import llmconv.verify: `verify` is not a top-level package")
if sys.platform == "win32":
    raise ImportError("llmconv does not run on native Windows: use the Windows Subsystem for Linux")

if TYPE_CHECKING:  # at run time each is loaded when it is first used: an early refusal needs none of torch
    from llmconv.verify.other_exporters.port_map import PortMap, register_port_map
    from llmconv.verify.other_exporters.run import verify_graphs
    from llmconv.verify.results import Check, Report
    from llmconv.verify.run import verify

__all__ = ["Check", "PortMap", "Report", "register_port_map", "verify", "verify_graphs"]

__getattr__, __dir__ = lazily(__name__)
