"""What processes tell and send each other where each runs some of a pipeline's stages."""
