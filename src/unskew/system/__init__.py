"""The machine: threads, memory and devices; processes that work for this one, and being told to stop."""
