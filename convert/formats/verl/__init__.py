"""verl and its relatives on FSDP: a file per process, with tensors that torch sharded over all of them."""
