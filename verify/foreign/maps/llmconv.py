"""llmconv's own graphs of keys and values, where they lie without their folder's manifest."""

from llmconv.verify.foreign.ports import PortMap

MAP = PortMap(name="llmconv", title="llmconv", producers=("llmconv",))
