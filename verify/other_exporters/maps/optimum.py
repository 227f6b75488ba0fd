"""optimum-onnx: `optimum-cli export onnx --task text-generation-with-past`, merged graphs and pairs included."""

from llmconv.verify.other_exporters.port_map import PortMap

MAP = PortMap(name="optimum", title="optimum-onnx", producers=("pytorch",))
