"""One call of the model inside a patch context, on the model's own code.

A call is a `boundaries.Run`. `frames` maps module calls to captured frames, `boundaries` patches inputs, parameters and
outputs (through `module_hooks` and `stand_in` if needed), `operations` patches the operations inside, and opens fused
calls as `capture/decompositions` says, and `apply` checks and patches one value. `tracebacks` names the node that
raised an error.
"""
