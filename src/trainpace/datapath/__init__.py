"""The way of the data to the model: what a loader costs, and preprocessing done once instead of every epoch."""
