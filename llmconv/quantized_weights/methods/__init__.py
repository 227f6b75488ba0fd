"""The quantization methods: one file each in this folder, found by listing it, named after `quant_method`."""
