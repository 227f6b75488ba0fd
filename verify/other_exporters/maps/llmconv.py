"""llmconv's own graphs of keys and values, where they lie without their folder's manifest."""

from llmconv.verify.other_exporters.port_map import PortMap

MAP = PortMap(name="llmconv", title="llmconv", producers=("llmconv",))
