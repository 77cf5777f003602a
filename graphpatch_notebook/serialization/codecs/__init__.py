"""How single values become JSON and tensors, and back: values, tensors, specs, functions, classes."""
