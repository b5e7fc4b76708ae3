"""What micro-batching means for a model: which dimension is the batch, and what its outputs are."""
