"""optimum-onnx: `optimum-cli export onnx --task text-generation-with-past`, merged graphs and pairs included."""

from llmconv.verify.foreign.ports import PortMap

MAP = PortMap(name="optimum", title="optimum-onnx", producers=("pytorch",))
