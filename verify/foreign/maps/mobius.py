"""mobius-onnx: `mobius build`."""

from llmconv.verify.foreign.ports import PortMap

MAP = PortMap(name="mobius", title="mobius-onnx", producers=("mobius",))
