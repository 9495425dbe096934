"""Preprocessing done once instead of every epoch, into Parquet shards that stream back."""
