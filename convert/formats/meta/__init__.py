"""Meta's Llama: `consolidated.NN.pth` with `params.json`."""
