"""What all rooms share: graphs and their metadata, devices as numbers, structures of values."""
