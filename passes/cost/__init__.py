"""What each node of the model graph costs, in time and memory: computed, measured, or given."""
