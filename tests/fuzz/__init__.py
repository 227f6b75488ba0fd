"""Every parser, fed with what nobody wrote: `make fuzz SECONDS=60`."""
