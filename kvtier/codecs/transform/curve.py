"""Quantizers of N(0, 1) of 1 to 8 bits: a curve, cut into equal steps.

    t = y * RATE[b], held within [-1, 1];   s = t * (C1 + t^2 * (C3 + t^2 * C5))
    code = floor((s + 1) * 2^(b - 1)), held within [0, 2^b - 1]

The coefficients were fitted to give the least error with the best levels, which are the mean of what each code takes.
It is that of Lloyd's and Max's quantizers, but for 0.4 % at 7 bits and 1.3 % at 8.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

# By bits from 0 on: rate, and the coefficients of t, t^3, t^5.
CURVES = (
    (0.0, 0.0, 0.0, 0.0),
    (0.4, 1.5, -0.6, 0.1),
    (0.3927745, 1.35975547, -0.43374989, 0.07399442),
    (0.3578512, 1.41679099, -0.64737382, 0.23058283),
    (0.3098471, 1.56436445, -0.87028708, 0.30593463),
    (0.2822889, 1.66753116, -1.05246209, 0.38493093),
    (0.2575376, 1.78277109, -1.24960701, 0.46683592),
    (0.2385469, 1.87458587, -1.39879104, 0.52420517),
    (0.2253963, 1.93158129, -1.49114126, 0.55955997),
)
# t = -T_MAX makes the first code and t = T_MAX the last, as -1 and 1 do. A kernel that clamps t to this range need not
# clamp the codes.
T_MAX = 1 - 2.0**-10
_GRID = np.linspace(-8, 8, 64_001)  # deviations at which the levels are integrated


@cache
def levels() -> tuple[npt.NDArray[np.float16], tuple[float, ...]]:
    """Return the table's `levels`, and the error of each number of bits, of a variance of 1."""
    weights = np.exp(-_GRID * _GRID / 2)
    weights /= weights.sum()
    found, errors = np.zeros(512, dtype=np.float16), [1.0]
    for bits in range(1, 9):
        rate, *coefficients = CURVES[bits]
        t = np.clip(_GRID * rate, -1, 1)
        s = t * (coefficients[0] + t * t * (coefficients[1] + t * t * coefficients[2]))
        codes = np.clip(np.floor((s + 1) * 2.0 ** (bits - 1)), 0, 2**bits - 1).astype(np.int64)
        mass, moment = (np.bincount(codes, each, 1 << bits) for each in (weights, weights * _GRID))
        found[(1 << bits) - 2 : (2 << bits) - 2] = moment / np.maximum(mass, 1e-300)
        errors.append(float(1 - (moment * moment / np.maximum(mass, 1e-300)).sum()))
    return found, tuple(errors)
