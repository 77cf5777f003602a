"""The kinds of operations, by the names of torch's functions.

These are names of torch functions, never of modules or variables: a model that computes attention from products and a
softmax is found however it is written.
"""

from __future__ import annotations

_VIEWS = """
    view reshape transpose permute unsqueeze squeeze flatten unflatten expand expand_as swapaxes swapdims movedim
    moveaxis T mT t view_as reshape_as getitem split chunk unbind tensor_split split_with_sizes split_copy narrow select
    repeat_interleave repeat rearrange roll pad slice index_select gather unfold as_strided stack cat concat concatenate
    hstack vstack flip
"""
_SAME_VALUES = """
    dropout dropout1d dropout2d feature_dropout alpha_dropout contiguous to float type_as clone type half bfloat16
    double detach identity requires_grad_ nan_to_num cast where clamp clip deepcopy copy masked_fill drop_path
"""
_NONLINEARITIES = """
    gelu relu silu sigmoid tanh relu6 selu elu mish hardswish leaky_relu softplus erf pow square exp prelu glu relu_
    celu hardtanh hardsigmoid softmax log_sigmoid logsigmoid
"""

VIEWS = frozenset(_VIEWS.split())
"""Rearrange or select elements, and do no arithmetic."""

SAME_VALUES = frozenset(_SAME_VALUES.split())
"""Return their first tensor, up to dtype, dropout and single elements."""

ADDITIONS = frozenset("add iadd radd add_".split())
SCALINGS = frozenset("mul imul rmul mul_ div truediv itruediv multiply div_".split())
PRODUCTS = frozenset("matmul bmm einsum baddbmm rmatmul mm tensordot".split())
"""Products of tensors."""

LINEAR_MAPS = frozenset("linear addmm conv1d conv2d conv3d matmul einsum mm bmm grouped_mm _grouped_mm".split())
"""Linear maps, if one of their tensors is a weight."""

CONVOLUTIONS = frozenset("conv1d conv2d conv3d".split())
SOFTMAXES = frozenset("softmax _safe_softmax sparsemax entmax".split())
FUSED_ATTENTION = frozenset(["scaled_dot_product_attention", "flex_attention"])
"""Attention in one call, of queries, keys and values."""

ATTENTION = SOFTMAXES | FUSED_ATTENTION | frozenset(["multi_head_attention_forward", "XSoftmax"])
"""Occur in attention of any form."""

NORMS = frozenset("layer_norm rms_norm group_norm batch_norm instance_norm normalize".split())
"""Norms as one call."""

MOMENTS = NORMS | frozenset("mean var norm vector_norm linalg_vector_norm linalg_norm var_mean std".split())
"""An operation of each norm is one of these."""

NONLINEARITIES = frozenset(_NONLINEARITIES.split())
MIXING = frozenset(
    "pad cumsum scan fft rfft irfft fft2 roll avg_pool2d avg_pool1d causal_conv1d conv_transpose1d".split()
)
"""Moves values between positions without attention."""

UNFILLED = frozenset("empty new_empty empty_like empty_strided new_empty_strided".split())
"""Return tensors of what memory happens to hold."""

CREATIONS = UNFILLED | frozenset("zeros new_zeros zeros_like".split())
"""Return tensors that the model fills later."""

SHAPED_LIKE = frozenset("expand_as view_as reshape_as type_as".split())
"""Return their first tensor; of the second they use the shape, or the dtype."""

CHOICES = frozenset("topk argmax _topk sort max".split())
"""Choose among experts."""
