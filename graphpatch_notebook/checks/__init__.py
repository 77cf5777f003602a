"""Questions that the whole package asks, each answered here and nowhere else.

call_signature   does this call look like that one?
model_state      has the model changed? snapshot, compare, restore
equality         are two values equal, bit for bit?
sharding         is the model sharded over several processes?
outer_values     what the code of a module reads from outside of it
"""
