"""How external graphs in half precision and with quantized weights are compared."""
