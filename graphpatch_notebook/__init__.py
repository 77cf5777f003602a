"""Activation patching in the notebook, on any PyTorch model, at any intermediate value."""
