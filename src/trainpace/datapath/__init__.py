"""The way from stored samples to the training step: how fast it is, and the expensive part of it done once, ahead."""
