"""A fixed random rotation of states: one that has a few huge entries comes out with all entries of about one size.

Knows widths and seeds. Does not know what is done with the rotated states.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def rotate(states: Tensor, seed: int, back: bool = False) -> Tensor:
    """states [..., W] @ Q for the orthogonal Q of that width and seed, or @ Qᵀ (`back`); float32 [..., W].

    Q = signs · (M_1 ⊗ M_2 ⊗ …): for W = 2^a · m Hadamard matrices of about 2^(a/2) and, where m > 1, a random orthogonal
    one of m, so that a rotation costs W · Σ sizes products instead of W².
    """
    signs, factors = _rotation(states.shape[-1], seed)
    signs = signs.to(states.device)
    x = states if back else states * signs
    right = states.shape[-1]
    for factor in factors:
        matrix = factor.to(states.device) if back else factor.mT.to(states.device)
        size = len(factor)
        right //= size
        x = x.reshape(-1, size) @ matrix.mT if right == 1 else matrix @ x.reshape(-1, size, right)
    x = x.reshape(states.shape)
    return x * signs if back else x


@lru_cache(maxsize=8)
def _rotation(width: int, seed: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Signs [W] and the factors, largest index last. The legacy generator, since its numbers never change."""
    random = np.random.RandomState(seed)
    signs = torch.from_numpy(random.randint(0, 2, width).astype(np.float32) * 2 - 1)
    power = (width & -width).bit_length() - 1
    odd = width >> power
    factors = [_orthogonal(odd, random)] if odd > 1 else []
    factors += [_hadamard(half) for half in (power // 2, power - power // 2) if half]
    return signs, tuple(factors)


def _hadamard(power: int) -> Tensor:
    """Sylvester's matrix of 2^power rows, with rows of length 1."""
    matrix = np.ones((1, 1))
    for _ in range(power):
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2), matrix)
    return torch.from_numpy(matrix.astype(np.float32))


def _orthogonal(size: int, random: np.random.RandomState) -> Tensor:
    """Q of a random matrix's QR decomposition, made unique by R's diagonal being positive."""
    q, r = np.linalg.qr(random.standard_normal((size, size)))
    return torch.from_numpy((q * np.sign(np.diag(r))).astype(np.float32))
