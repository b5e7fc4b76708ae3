"""What micro-batching means for a model: along which dimensions its inputs are cut, and how its
outputs are put together."""
