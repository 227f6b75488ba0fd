"""transformers' own exporter (`transformers.exporters`): flattened names of its cache, in two graphs."""

from llmconv.verify.other_exporters.port_map import PortMap

MAP = PortMap(
    name="transformers",
    title="transformers' exporter",
    producers=("pytorch",),
    past=("input.past_key_values.layers.{layer}.{part}", "past_key_values.layers.{layer}.{part}"),
    present=("output.past_key_values.layers.{layer}.{part}", "past_key_values.layers.{layer}.{part}"),
    parts=("keys", "values"),
    window=("input.past_key_values.layers.{layer}._sliding_window_tensor",),
    ignored=("output.past_key_values.layers.{layer}._sliding_window_tensor",),
)
