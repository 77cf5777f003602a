"""One call of the model inside a patch context, on the model's own code.

A call is a `boundaries.Run`. `frames` maps module calls to captured frames, `boundaries` patches inputs, parameters and
outputs, `patched_operations` patches the operations inside, and `apply` checks and patches one value. `stand_in` lets
a forward run on other tensors than its module holds. `tracebacks` names the node that raised an error.
"""
