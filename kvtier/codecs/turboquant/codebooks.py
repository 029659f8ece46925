"""Quantizers of N(0, 1) by bits of a code: constants, and what they are used for.

A code is the number of a bucket, from the most negative on. Buckets come of a curve (`buckets`), which the exact
quantizer's (Lloyd 1982, Max 1960) are hardly better than. Centroids are whole numbers times `unit`, so that sums of
them are exact in any order: at most 127 up to 4 bits (they fit int8), else at most 2047 (fp16 holds them). `reach` is
what gives the curve the least error, `unit` what gives it to these whole numbers.

    bits   error of the exact quantizer   of this one (of a variance of 1)
       4   0.009501                       0.009553
       5   0.0025047                      0.0025097
       6   0.00064424                     0.00065581

`tests/codecs/test_codebooks.py` solves for all of it again.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Codebook:
    """reach: range of the curve on either side, standard deviations. curve: its coefficients, exact in fp16, from that
    of v on. centroids: of the positive half, ascending; the negative half mirrors them."""

    bits: int
    unit: float
    reach: float
    curve: tuple[float, ...]
    centroids: tuple[int, ...]


CODEBOOKS = {
    book.bits: book
    for book in (
        Codebook(
            4, 0.0226636716, 3.0365, (0.0, 45.0, -30.0),
            (
                6, 18, 30, 43, 57, 72, 91, 119,
            ),
        ),
        Codebook(
            5, 0.0016588451, 3.367, (6.1875, 24.8125, 148.8125, -248.0, 99.1875),
            (
                41, 123, 205, 289, 374, 461, 551, 645, 743, 847, 959, 1083, 1223, 1391, 1611, 1955,
            ),
        ),
        Codebook(
            6, 0.00198999096, 3.611, (12.625, 50.375, 302.375, -504.0, 201.625),
            (
                18, 54, 90, 126, 163, 199, 236, 273, 310, 348, 387, 426, 465, 505, 546, 588, 631, 675,
                720, 767, 816, 868, 921, 977, 1037, 1102, 1173, 1252, 1343, 1451, 1590, 1821,
            ),
        ),
    )
}  # fmt: skip
