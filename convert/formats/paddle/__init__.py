"""PaddleNLP: `.pdparams` and safetensors files, tensor-parallel ranks, adapters."""
