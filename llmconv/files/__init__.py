"""Files: safetensors, torch, pickles, archives; checksums, copies, and where inputs come from."""
