"""The compiler: it makes programs of a model, one for each kind of call, caches and runs them."""
