"""How long a step each layer takes: the rates of LARS and LAMB, from norms.

LARS: Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, equation 6.
LAMB: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm 2
with the identity as its phi.

Where a norm is 0 the rate is 1: a layer that starts at zero would never leave it otherwise.
"""

from __future__ import annotations


def lars_rate(
    weight_norm: float, gradient_norm: float, *, coefficient: float = 0.001, weight_decay: float = 0.0
) -> float:
    """The rate of a layer by LARS: ``coefficient |w| / (|g| + weight_decay |w|)``.

    Parameters
    ----------
    weight_norm, gradient_norm : float
        Of the layer's weights w and of its gradient g.
    coefficient : float
        How far a layer trusts its gradient: eta in the paper.
    weight_decay : float
        beta in the paper.

    Returns
    -------
    float
        To be multiplied with the learning rate of all layers.

    Examples
    --------
    >>> lars_rate(10.0, 4.0, coefficient=0.5, weight_decay=0.1)
    1.0
    >>> lars_rate(0.0, 4.0)
    1.0
    """
    if weight_norm == 0 or gradient_norm == 0:
        return 1.0
    return coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)


def lamb_rate(weight_norm: float, update_norm: float) -> float:
    """The rate of a layer by LAMB: ``|w| / |u|``.

    Parameters
    ----------
    weight_norm, update_norm : float
        Of the layer's weights w and of its update u: Adam's direction and the weight decay.

    Returns
    -------
    float
        To be multiplied with the learning rate of all layers.

    Examples
    --------
    >>> lamb_rate(3.0, 4.0), lamb_rate(3.0, 0.0)
    (0.75, 1.0)
    """
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    return weight_norm / update_norm
