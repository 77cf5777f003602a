"""Scores for all values of a model, by gradients.

`attribute` selects the nodes to score, and the dimension of positions in their values (`scored_nodes`). It runs the
model on the clean inputs to record values, and on the corrupted inputs with gradients, and multiplies differences with
gradients (`gradient_runs`). The methods differ in the derivatives of operations (`rules`): those of the secant
(`secants`) explain the whole change between two runs. `top_scores` and plots
rank the scores, with one rank for all names of a value. `direct_logits` has what each part of a model adds to a logit.
"""
