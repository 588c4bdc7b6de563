"""DeepSpeed's ZeRO as a way to spread a model over workers."""
