"""What `auto` means: sizes chosen from the hardware and the model."""
