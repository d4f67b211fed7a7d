"""Models and optimizers: FSDP2, DeepSpeed, LoRA, and models that do not train."""
