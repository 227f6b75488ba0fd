"""PEFT adapters: what one says, which weights it changes, and the change itself."""
