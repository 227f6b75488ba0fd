"""llmconv's own graphs without the manifest of their folder."""

from llmconv.verify.other_exporters.port_map import PortMap

MAP = PortMap(name="llmconv", title="llmconv", producers=("llmconv",))
