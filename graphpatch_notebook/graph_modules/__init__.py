# Placeholder until the real package lands (overwrite freely).
from torch.nn import Module


class GraphModule(Module):
    pass


class CompiledGraphModule(GraphModule):
    pass


class OpaqueGraphModule(GraphModule):
    pass


class MultiplyInvokedModule(Module):
    pass


class UnusedModule(GraphModule):
    pass


def build_hierarchy(root):
    return CompiledGraphModule()
