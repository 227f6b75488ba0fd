"""The model builder of onnxruntime-genai, `python -m onnxruntime_genai.models.builder`; keys come before all values."""

from llmconv.verify.other_exporters.port_map import PortMap

MAP = PortMap(name="genai", title="ONNX Runtime GenAI model builder", producers=("onnxruntime-genai",))
