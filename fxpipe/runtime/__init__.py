"""What runs: ordering of the backward pass and portals. Knows nothing of passes."""
