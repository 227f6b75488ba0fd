"""mobius-onnx: `mobius build`."""

from llmconv.verify.other_exporters.port_map import PortMap

MAP = PortMap(name="mobius", title="mobius-onnx", producers=("mobius",))
