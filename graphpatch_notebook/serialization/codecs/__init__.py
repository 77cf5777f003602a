"""Single values as JSON and tensors, and back: plain values, tensors, functions and classes by name."""
